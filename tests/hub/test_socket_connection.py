"""WebSocket connections of people who want to keep the hub busy: others have their turn all the same."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable

import aiohttp
import pytest
from tests.hub._hub import running_hub
from tests.hub.test_connections import rest, wire
from tests.hub.test_quiet import upgrade
from websockets.http11 import Request

from comfyfleet.hub.websocket.connection import WebSocketConnection

_DEFLATE = b"sec-websocket-extensions: permessage-deflate; client_no_context_takeover\r\n\r\n"


def frame(first: int, content: bytes = b"") -> bytes:
    """Masked with zeros."""
    size = len(content)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes([first]) + length + bytes(4) + content


def packed(content: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -12)
    return (packer.compress(content) + packer.flush(zlib.Z_SYNC_FLUSH))[:-4]


def bombs() -> bytes:
    return frame(0xC1, packed(b" " * 16_000_000)) * 16


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(lambda: frame(0x01, b"{") + frame(0x00) * 40_000 + frame(0x80, b"}"), id="empty frames"),
        pytest.param(lambda: frame(0x89, b"p") * 36_000 + frame(0x81, b"{}"), id="pings"),
        pytest.param(bombs, id="packed messages"),
    ],
)
async def test_what_arrived_at_once_is_not_read_at_once(
    frames: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[WebSocketConnection] = []
    accept = WebSocketConnection.handle_connect

    def recorded(connection: WebSocketConnection, event: Request) -> None:
        seen.append(connection)
        accept(connection, event)

    monkeypatch.setattr(WebSocketConnection, "handle_connect", recorded)
    async with running_hub() as rig, wire(rig, upgrade(rig)[:-2] + _DEFLATE) as (reader, _):
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = seen
        connection.data_received(frames() + frame(0x88))
        # All of it is here. Nobody else has had a turn since, so most of it must wait.
        assert connection.conn.close_rcvd is None
        assert connection.queue.qsize() < 2
        assert len(connection.frames) < 20_000
        await rest(reader)
        assert connection.conn.close_rcvd is not None


async def test_messages_that_came_at_once_are_answered_in_their_order() -> None:
    asked = [frame(0x81, b'{"type":"ping","request_id":%d}' % number) for number in range(1_000)]
    async with running_hub() as rig, wire(rig, upgrade(rig)) as (reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"".join(asked))
        async with asyncio.timeout(60):
            answer = await reader.readuntil(b'"request_id":999}')
    places = [answer.find(b'"request_id":%d}' % number) for number in range(1_000)]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("more", [b"x: " + b"a" * 20_000, b"\r\n".join([b"x: a"] * 200)])
async def test_a_request_to_connect_with_too_long_a_head_is_answered_and_ended(more: bytes) -> None:
    """Fewer and shorter headers are taken than of other requests."""
    async with running_hub() as rig:
        head = upgrade(rig).partition(b"authorization")[0] + more + b"\r\n\r\n"
        async with wire(rig, head) as (reader, _):
            assert (await rest(reader)).startswith(b"HTTP/1.1 431 ")


async def test_a_connection_that_is_refused_is_no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with running_hub() as rig:
        for path in ("/hub", "/ws"):
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await rig.session.ws_connect(rig.url + path)
        # Whatever is said of those before is said by now.
        async with wire(rig, upgrade(rig)) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
