"""A TCP proxy before an HTTP server that loses, swallows and falsifies what passes it, for tests of clients.

It knows no service: a test tells it which request is the submit. What happens inside the server is the business of the
fake server behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, Self

_PIECE = 1 << 16
_HEAD_LIMIT = 1 << 20


class ProxyMode(StrEnum):
    """What becomes of a request."""

    PASS = "pass"
    CUT_BEFORE = "cut before"
    """The connection is cut, and the server never sees the request."""
    CUT_AFTER = "cut after"
    """The server gets the request. The connection is cut when it answers."""
    SILENT = "silent"
    """Nobody answers, and the server never sees the request."""
    ENDLESS = "endless"
    """The beginning of JSON, for as long as it is read."""
    GARBAGE = "garbage"
    """A successful answer that is no JSON."""
    REDIRECT = "redirect"
    """To `redirect_to`."""
    REFUSE = "refuse"
    """The status `refuse_with`."""


class ProxiedRequest(NamedTuple):
    method: str
    path: str


class FaultyProxy:
    """Starts and stops as an async context manager. `everything` applies to all requests, `next_submit` to submits."""

    def __init__(self, port: int, is_submit: Callable[[ProxiedRequest], bool]) -> None:
        self._upstream = port
        self._is_submit = is_submit
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.everything = ProxyMode.PASS
        self.next_submit = ProxyMode.PASS
        self.submits = 1
        """To how many submits `next_submit` applies. aiohttp itself repeats a PUT once."""
        self.redirect_to = ""
        self.refuse_with = 401
        self.refusal = b'{"detail": "refused"}'
        self.bytes_without_end = 0
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=_HEAD_LIMIT)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Cuts all connections. The server behind goes on."""
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def pass_all(self) -> None:
        self.everything = self.next_submit = ProxyMode.PASS
        self.submits = 1

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._connections.add(task)

        def close(_: object) -> None:
            self._connections.discard(task)
            # A task that is cancelled before its first step closes nothing.
            writer.transport.abort()

        task.add_done_callback(close)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        answers: asyncio.Task[None] | None = None
        is_swallowed = asyncio.Event()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                mode = self._mode_of(head)
                if mode is ProxyMode.CUT_BEFORE:
                    return
                if mode is ProxyMode.SILENT:
                    await reader.read()
                    return
                if mode not in (ProxyMode.PASS, ProxyMode.CUT_AFTER):
                    await _body(reader, head)
                    await self._answer(writer, mode)
                    return
                if upstream is None:
                    back, upstream = await asyncio.open_connection("127.0.0.1", self._upstream)
                    answers = asyncio.ensure_future(_pump(back, writer, is_swallowed))
                if mode is ProxyMode.CUT_AFTER:
                    is_swallowed.set()
                upstream.write(head)
                if b"\r\nupgrade:" in head.lower():
                    await _pump(reader, upstream, asyncio.Event())
                    return
                upstream.write(await _body(reader, head))
                await upstream.drain()
                if is_swallowed.is_set() and answers is not None:
                    await asyncio.wait({answers})
                    return
        except (OSError, EOFError, asyncio.LimitOverrunError):
            return
        finally:
            if answers is not None:
                answers.cancel()
            if upstream is not None:
                upstream.transport.abort()

    def _mode_of(self, head: bytes) -> ProxyMode:
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        if self.everything is not ProxyMode.PASS:
            return self.everything
        if self.next_submit is ProxyMode.PASS or not self._is_submit(ProxiedRequest(method, path)):
            return ProxyMode.PASS
        mode, self.submits = self.next_submit, self.submits - 1
        if self.submits <= 0:
            self.next_submit, self.submits = ProxyMode.PASS, 1
        return mode

    async def _answer(self, writer: asyncio.StreamWriter, mode: ProxyMode) -> None:
        if mode is ProxyMode.ENDLESS:
            await self._answer_without_end(writer)
            return
        status, more, body = "200 OK", "", b"<html>\x00\xff this is no JSON {{{"
        if mode is ProxyMode.REDIRECT:
            status, more = "307 Temporary Redirect", f"Location: {self.redirect_to}\r\n"
        elif mode is ProxyMode.REFUSE:
            status, body = f"{self.refuse_with} Refused", self.refusal
        head = f"HTTP/1.1 {status}\r\n{more}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def _answer_without_end(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n[0")
        piece = b",0" * (_PIECE // 2)
        while True:
            writer.write(piece)
            await writer.drain()
            self.bytes_without_end += len(piece)


async def _pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_swallowed: asyncio.Event
) -> None:
    try:
        while piece := await reader.read(_PIECE):
            if is_swallowed.is_set():
                break
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.transport.abort() if is_swallowed.is_set() else writer.close()


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    fields = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    }
    if fields.get(b"transfer-encoding", b"").lower() != b"chunked":
        return await reader.readexactly(int(fields.get(b"content-length", b"0")))
    parts = []
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        parts.append(line + await reader.readexactly(size + 2))
        if not size:
            return b"".join(parts)
