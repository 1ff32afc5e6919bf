"""What senders do wrong on their connections is one quiet line; a defect of our own keeps its traceback."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.hub._hub import HubRig, running_hub
from tests.hub.test_connections import rest, wire

from comfyfleet.hub.http.uvicorn_logging import UvicornLogger
from comfyfleet.model.access import Role

_NO_TEXT = b"\x81\x82\0\0\0\0\xff\xfe"
"""A text frame, masked with zeros, that is no UTF-8."""


def upgrade(rig: HubRig) -> bytes:
    return (
        b"GET /hub HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        b"authorization: Bearer " + rig.keys[Role.ADMIN].encode() + b"\r\n\r\n"
    )


@pytest.mark.parametrize("frames", [_NO_TEXT, _NO_TEXT * 3], ids=["one", "several at once"])
async def test_text_that_is_none_ends_its_socket_with_a_line_and_no_traceback(
    frames: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running_hub() as rig:
        async with wire(rig, upgrade(rig)) as (reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(frames)
            answer = await rest(reader)
        assert answer.endswith(b"\x88\x02\x03\xef"), "1007: the text is not what its type says"
        assert (await rig.get("/health")).status == 200
    told = [record for record in caplog.records if record.name == "comfyfleet.hub.http.uvicorn_logging"]
    assert told and all(record.levelname == "INFO" and record.exc_info is None for record in told)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "\\xff" not in caplog.text


@pytest.mark.parametrize(
    "first", [b"5\r\n{", b"zz\r\n", b"5\r\n{}\r\n"], ids=["cut off", "no number", "cut off later"]
)
async def test_a_body_that_is_cut_off_or_none_leaves_no_traceback(
    first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_hub() as rig:
        key = rig.keys[Role.ADMIN].encode()
        head = b"POST /api/jobs HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\nauthorization: Bearer "
        async with wire(rig, head + key + b"\r\n\r\n" + first) as (_, writer):
            await asyncio.sleep(0)
            transport = writer.transport
            transport.abort()
        assert (await rig.get("/health")).status == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]


def told(error: Exception, caplog: pytest.LogCaptureFixture, *, deep: bool = False) -> bool:
    """Whether it was told as a defect."""

    def fail() -> None:
        raise error

    caplog.clear()
    try:
        if deep:
            fail()
        raise error
    except Exception:
        UvicornLogger(logging.getLogger("uvicorn.error")).exception("Exception in ASGI application")
    return any(record.exc_info for record in caplog.records)


def test_only_what_the_sender_did_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    no_text = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    gone = RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")
    assert not told(no_text, caplog) and told(no_text, caplog, deep=True)
    assert not told(gone, caplog, deep=True)
    assert told(RuntimeError("dictionary changed size"), caplog) and told(KeyError("x"), caplog)
