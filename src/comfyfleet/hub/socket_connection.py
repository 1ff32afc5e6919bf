"""A WebSocket connection as such: what arrives on it is read a little at a time, and no faster than it is worked on.

uvicorn reads all that has arrived at once. A quarter of a megabyte may be forty thousand empty frames, or sixteen
packed messages of sixteen megabytes each: so what is left waits while others have their turn, while a message is not
taken yet, and while nobody reads what is answered.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.exceptions import InvalidState

from comfyfleet.hub.json_bounds import PIECE_BYTES
from comfyfleet.hub.quiet import QuietLogger, tell

_STEP_BYTES = 4 * 1024
"""As frames without content, about ten milliseconds."""
_TURN_S = 0.005
_MAX_UNREAD_BYTES = 1024 * 1024
"""Each ping is answered by the connection itself, whether anybody reads that or not."""
_TOO_MUCH = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class SocketConnection(WebSocketsSansIOProtocol):
    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = QuietLogger(self.logger)  # type: ignore[assignment]
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
