"""A WebSocket connection: reads in small steps, no faster than messages are handled and answers read.

uvicorn parses all that has arrived at once, which may be forty thousand empty frames or many compressed
messages of sixteen megabytes. `WebSocketConnection` subclasses uvicorn's protocol because no public setting
bounds this (docs/decisions/0054). `WebSocketChannel` has one reader and one writer; `sessions.py`
and `agents.py` give messages their meaning.
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
from comfyfleet.hub.http.uvicorn_logging import UvicornLogger, log_client_error

_STEP_BYTES = 4 * 1024
"""Empty frames of this size take about ten milliseconds."""
_TURN_S = 0.005
_MAX_UNREAD_BYTES = 1024 * 1024
"""The protocol answers each ping, even if the client does not read."""
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


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
        self._unparsed = bytearray()
        """Bytes that have arrived and are not parsed yet."""
        self._next_turn: asyncio.Handle | None = None

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        if self._next_turn is None:
            self._parse_for_a_while()
        elif not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._continue()

    async def receive(self) -> Any:
        self._continue()
        message = await super().receive()
        if self._unparsed and not self.transport.is_closing():
            # Bytes that have arrived come before later ones, and before the end of the connection.
            self.transport.pause_reading()
            self._continue()
        return message

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # A refused handshake has its answer; otherwise uvicorn would log an error.
            self.handshake_complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._unparsed.clear()
        super().connection_lost(exc)

    def send_receive_event_to_app(self) -> None:
        if sum(map(len, self.frames)) > PIECE_BYTES:
            # Stays bytes: as text it would take up to four times the memory.
            self.curr_msg_data_type = "bytes"
        super().send_receive_event_to_app()

    @property
    def _must_wait(self) -> bool:
        is_asked = self.handshake_initiated and not self.handshake_complete
        is_unread = not self.writable.is_set() and self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES
        return is_asked or self.read_paused or is_unread

    def _continue(self) -> None:
        if self._unparsed and self._next_turn is None:
            self._next_turn = self.loop.call_soon(self._parse_for_a_while)

    def _parse_for_a_while(self) -> None:
        self._next_turn = None
        until = self.loop.time() + _TURN_S
        while self._unparsed and not self.transport.is_closing():
            if self._must_wait:
                # `receive` or `resume_writing` continues.
                self.transport.pause_reading()
                return
            if self.loop.time() > until:
                self.transport.pause_reading()
                self._continue()
                return
            step = bytes(self._unparsed[:_STEP_BYTES])
            del self._unparsed[:_STEP_BYTES]
            self._read(step)
        if self.transport.is_closing():
            self._unparsed.clear()
        elif not self.read_paused:
            self.transport.resume_reading()

    def _read(self, step: bytes) -> None:
        try:
            super().data_received(step)
        except InvalidState as error:
            # A frame arrived after the one that closed the connection.
            log_client_error(error)
            self.transport.close()
            return
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # A head beyond the limits of the handshake parser, which would neither answer nor close.
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()


_LOG = logging.getLogger(__name__)

_MAX_UNREAD = 256


async def _no_events() -> None: ...


class WebSocketChannel:
    """`send_events` is called after the answers each time `wake` was called; it uses `put`."""

    def __init__(self, send: Send, send_events: Callable[[], Awaitable[None]] = _no_events) -> None:
        self._send = send
        self._send_events = send_events
        self._answers: deque[bytes] = deque()
        self._woken = asyncio.Event()
        self._has_capacity = asyncio.Event()
        self._closing: tuple[int, str] | None = None

    def wake(self) -> None:
        self._woken.set()

    def answer(self, message: bytes) -> None:
        """Queues an answer."""
        self._answers.append(message)
        self._woken.set()

    def close(self, code: int = 1012, reason: str = "the hub is stopping") -> None:
        """Closes after the queued answers. 1012: the service restarts."""
        self._closing = self._closing or (code, reason)
        self._woken.set()

    async def put(self, message: bytes) -> None:
        """Sends at once."""
        await self._send({"type": "websocket.send", "text": message.decode()})

    async def run(self, receive: Receive, on_message: Callable[[bytes], Awaitable[None]]) -> None:
        """Runs until either side ends. `on_message` gets one message after the other."""
        both = (
            asyncio.ensure_future(self._read(receive, on_message)),
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

    async def _read(self, receive: Receive, on_message: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            event = await receive()
            if event["type"] == "websocket.disconnect":
                return
            text = event.get("text")
            await on_message(
                event.get("bytes") or b"" if text is None else text.encode("utf-8", "surrogatepass")
            )
            while len(self._answers) > _MAX_UNREAD:
                self._has_capacity.clear()
                await self._has_capacity.wait()

    async def _write(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._answers:
                await self.put(self._answers.popleft())
            self._has_capacity.set()
            await self._send_events()
            if self._closing is not None:
                code, reason = self._closing
                await self._send({"type": "websocket.close", "code": code, "reason": reason})
                return
