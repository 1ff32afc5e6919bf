"""A WebSocket connection as such: what arrives on it is read a little at a time, and no faster than it is worked on.

uvicorn reads all that has arrived at once. A quarter of a megabyte may be forty thousand empty frames, or sixteen
packed messages of sixteen megabytes each: so what is left waits while others have their turn, while a message is not
taken yet, and while nobody reads what is answered.

One WebSocket connection as a line: one reader, one writer, and no more unread answers than it may hold.

Whoever reads nothing is not read from either. What a message means, and what else there is to tell, is for the sessions
in `sessions.py` and `agents.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Send
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.exceptions import InvalidState

from comfyfleet.hub.http.body import PIECE_BYTES
from comfyfleet.hub.http.uvicorn_logging import UvicornLogger, tell

_STEP_BYTES = 4 * 1024
"""As frames without content, about ten milliseconds."""
_TURN_S = 0.005
_MAX_UNREAD_BYTES = 1024 * 1024
"""Each ping is answered by the connection itself, whether anybody reads that or not."""
_TOO_MUCH = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class WebSocketConnection(WebSocketsSansIOProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = UvicornLogger(self.logger)  # type: ignore[assignment]
        self._behind = bytearray()
        """What has arrived and is not read yet."""
        self._next: asyncio.Handle | None = None

    def data_received(self, data: bytes) -> None:
        self._behind += data
        if self._next is None:
            self._take_turn()
        elif not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    async def receive(self) -> Any:
        self._go_on()
        message = await super().receive()
        if self._behind and not self.transport.is_closing():
            # What came before goes before what comes next, its end included.
            self.transport.pause_reading()
            self._go_on()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # A refusal in words is an answer too; else uvicorn takes it for none, and logs an error for each.
            self.handshake_complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._behind.clear()
        super().connection_lost(exc)

    def send_receive_event_to_app(self) -> None:
        if sum(map(len, self.frames)) > PIECE_BYTES:
            # Left as bytes, which is all that is read of it: as a text it would take up to four times as much.
            self.curr_msg_data_type = "bytes"
        super().send_receive_event_to_app()

    @property
    def _has_to_wait(self) -> bool:
        is_asked = self.handshake_initiated and not self.handshake_complete
        is_unread = not self.writable.is_set() and self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES
        return is_asked or self.read_paused or is_unread

    def _go_on(self) -> None:
        if self._behind and self._next is None:
            self._next = self.loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._next = None
        until = self.loop.time() + _TURN_S
        while self._behind and not self.transport.is_closing():
            if self._has_to_wait:
                # Gone on with by `receive`, or by `resume_writing`.
                self.transport.pause_reading()
                return
            if self.loop.time() > until:
                self.transport.pause_reading()
                self._go_on()
                return
            step = bytes(self._behind[:_STEP_BYTES])
            del self._behind[:_STEP_BYTES]
            self._read(step)
        if self.transport.is_closing():
            self._behind.clear()
        elif not self.read_paused:
            self.transport.resume_reading()

    def _read(self, step: bytes) -> None:
        try:
            super().data_received(step)
        except InvalidState as error:
            # Behind a frame that ended the connection came another that would end it.
            tell(error)
            self.transport.close()
            return
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # Fewer and shorter headers than over HTTP. Nobody would answer, and nobody would end it.
            self.transport.write(_TOO_MUCH)
            self.transport.close()


_LOG = logging.getLogger(__name__)

_MAX_UNREAD = 256


async def _nothing_more() -> None:
    """Answers are all there is to tell."""


class WebSocketChannel:
    """`tell_more` is called after the answers, each time `wake` was; it tells by `put`."""

    def __init__(self, send: Send, tell_more: Callable[[], Awaitable[None]] = _nothing_more) -> None:
        self._send = send
        self._tell_more = tell_more
        self._answers: deque[bytes] = deque()
        self._progress = asyncio.Event()
        self._room_for_more = asyncio.Event()
        self._closing: tuple[int, str] | None = None

    def wake(self) -> None:
        self._progress.set()

    def answer(self, message: bytes) -> None:
        """Told in its turn."""
        self._answers.append(message)
        self._progress.set()

    def close(self, code: int = 1012, reason: str = "the hub is stopping") -> None:
        """After what is to be told already. 1012: the service restarts; come again."""
        self._closing = self._closing or (code, reason)
        self._progress.set()

    async def put(self, message: bytes) -> None:
        """At once."""
        await self._send({"type": "websocket.send", "text": message.decode()})

    async def run(self, receive: Receive, hear: Callable[[bytes], Awaitable[None]]) -> None:
        """Until either side ends it. `hear` is given one message after the other."""
        both = (
            asyncio.ensure_future(self._read(receive, hear)),
            asyncio.ensure_future(self._write()),
        )
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)
            for task in both:
                if not task.cancelled() and (error := task.exception()) is not None:
                    _LOG.debug("a connection ended: %r", error)

    async def _read(self, receive: Receive, hear: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            event = await receive()
            if event["type"] == "websocket.disconnect":
                return
            text = event.get("text")
            await hear(event.get("bytes") or b"" if text is None else text.encode("utf-8", "surrogatepass"))
            while len(self._answers) > _MAX_UNREAD:
                self._room_for_more.clear()
                await self._room_for_more.wait()

    async def _write(self) -> None:
        while True:
            await self._progress.wait()
            self._progress.clear()
            while self._answers:
                await self.put(self._answers.popleft())
            self._room_for_more.set()
            await self._tell_more()
            if self._closing is not None:
                code, reason = self._closing
                await self._send({"type": "websocket.close", "code": code, "reason": reason})
                return
