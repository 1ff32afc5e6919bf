"""WebSocket clients and the messages to them.

All messages pass through one queue and one sender, as on a real server: they keep their order, and one client
that does not read delays all others. `execution` decides which events exist.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import uuid
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web

from comfyfleet.testing.fake_comfyui.faults import Faults

_log = logging.getLogger(__name__)

PREVIEW, TEXT, PREVIEW_WITH_METADATA = 1, 3, 4
JPEG, PNG = 1, 2

Message = tuple[str, Any, str | None]

_HUGE_PIECE = 1 << 16


class FakeSockets:
    """The connected clients, by client id."""

    def __init__(self, faults: Faults, loop_is_free: asyncio.Event) -> None:
        self._faults = faults
        self._loop_is_free = loop_is_free
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._clients: dict[str, web.WebSocketResponse] = {}
        self._flags: dict[str, dict[str, Any]] = {}
        self._transports: set[asyncio.Transport] = set()
        self.client_id: str | None = None
        """The client of the running or last prompt."""
        self.last_node_id: str | None = None

    def post(self, event: str, data: Any, client_id: str | None = None) -> None:
        """Queue a message; without a client id it goes to everybody. Bytes are sent as they are."""
        self._messages.put_nowait((event, data, client_id))

    async def publish(self) -> None:
        """Sends queued messages for ever. A message that cannot become JSON raises and ends the server."""
        while True:
            event, data, client_id = await self._messages.get()
            await self._loop_is_free.wait()
            await self._send(event, data, client_id)

    def wants_metadata(self, client_id: str | None) -> bool:
        """Whether this client accepts previews with metadata."""
        flags = self._flags.get(client_id, {}) if client_id is not None else {}
        return flags.get("supports_preview_metadata", False) is True

    def drop_all(self) -> None:
        """Cuts every WebSocket without a close frame."""
        for transport in list(self._transports):
            transport.abort()

    async def serve(
        self, request: web.Request, queue_info: Callable[[], Any], server_flags: dict[str, Any] | None
    ) -> web.WebSocketResponse:
        """Serves one client until it leaves. `server_flags` is None in releases that do not negotiate."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        transport = request.transport
        if transport is not None:
            self._transports.add(transport)
        client_id = request.rel_url.query.get("clientId", "") or uuid.uuid4().hex
        if self._faults.huge_frame_bytes and transport is not None:
            await self._send_huge(transport)
            return socket
        self._clients.pop(client_id, None)
        self._clients[client_id] = socket
        self._flags[client_id] = {}
        try:
            await self._send("status", {"status": queue_info(), "sid": client_id}, client_id)
            if self.client_id == client_id and self.last_node_id is not None:
                await self._send("executing", {"node": self.last_node_id}, client_id)
            await self._listen(socket, client_id, server_flags)
        finally:
            # By id, not by socket: when an old socket closes, a newer one of the same id is forgotten too.
            # Real servers have this fault, and clients have to notice it.
            self._clients.pop(client_id, None)
            self._flags.pop(client_id, None)
            if transport is not None:
                self._transports.discard(transport)
        return socket

    async def _send_huge(self, transport: asyncio.Transport) -> None:
        """Writes the frame's head and content directly, so that it is never whole in memory."""
        left = self._faults.huge_frame_bytes
        transport.write(struct.pack(">BBQ", 0x82, 127, left))
        while left > 0 and not transport.is_closing():
            if transport.get_write_buffer_size() < _HUGE_PIECE:
                piece = min(left, _HUGE_PIECE)
                transport.write(bytes(piece))
                left -= piece
            await asyncio.sleep(0)

    async def _listen(
        self, socket: web.WebSocketResponse, client_id: str, server_flags: dict[str, Any] | None
    ) -> None:
        is_first = True
        async for message in socket:
            if message.type != aiohttp.WSMsgType.TEXT or server_flags is None:
                continue
            try:
                content = json.loads(message.data)
            except json.JSONDecodeError:
                continue
            if is_first and isinstance(content, dict) and content.get("type") == "feature_flags":
                self._flags[client_id] = content.get("data", {})
                await self._send("feature_flags", server_flags, client_id)
            is_first = False

    async def _send(self, event: str, data: Any, client_id: str | None) -> None:
        if self._faults.deaf_sockets:
            return
        if client_id is None:
            receivers = list(self._clients.values())
        else:
            receivers = [self._clients[client_id]] if client_id in self._clients else []
        for socket in receivers:
            try:
                if isinstance(data, bytes):
                    await socket.send_bytes(data)
                else:
                    await socket.send_json({"type": event, "data": data})
            except (aiohttp.ClientError, ConnectionError) as error:
                _log.debug("a client went away while it was sent %s: %s", event, error)


def preview_frame(image: bytes, image_format: int) -> bytes:
    """A preview for clients without feature flags: no prompt id, no node."""
    return struct.pack(">II", PREVIEW, image_format) + image


def preview_frame_with_metadata(image: bytes, metadata: dict[str, Any]) -> bytes:
    """A preview with its prompt and node."""
    encoded = json.dumps(metadata).encode()
    return struct.pack(">II", PREVIEW_WITH_METADATA, len(encoded)) + encoded + image


def text_frame(node_id: str, text: str) -> bytes:
    """A line of progress text."""
    encoded = node_id.encode()
    return struct.pack(">II", TEXT, len(encoded)) + encoded + text.encode()
