"""A proxy before a Redis that can lose answers: it waits until the server has answered, then cuts the connection."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from types import TracebackType

# How what was published begins, in both forms of the protocol.
_PUBLISHED = tuple(
    b"%s\r\n$%d\r\n%s\r\n" % (mark, len(kind), kind)
    for mark in (b"*3", b">3")
    for kind in (b"message", b"smessage")
)


class CuttingProxy:
    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._server_port = port
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self.port = 0
        self.connections = 0
        self.cut_after: int | None = None
        """The answers that still pass; the next one is lost, and its connection with it. None: all pass."""
        self.plan: Iterator[int] = iter(())
        """What `cut_after` becomes after each cut, while it lasts."""
        self.cuts = 0
        self.drops_messages = False
        """What was published is lost; everything else passes."""
        self.dropped = 0
        self.is_mute = False
        """Nothing passes any more, and nobody is told."""

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for link in list(self._links):
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        await self._server.wait_closed()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        self.connections += 1
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                asking = asyncio.ensure_future(self._pass_on(reader, server_writer))
                answering = asyncio.ensure_future(self._answer(server_reader, writer))
                await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
                for each in (asking, answering):
                    each.cancel()
                await asyncio.gather(asking, answering, return_exceptions=True)
        finally:
            self._links.discard(task)
            for stream in (writer, server_writer):
                stream.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self.is_mute:
                writer.write(data)
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.cut_after is not None:
                if self.cut_after == 0:
                    self.cut_after = next(self.plan, None)
                    self.cuts += 1
                    return
                self.cut_after -= 1
            if self.drops_messages and data.startswith(_PUBLISHED):
                self.dropped += 1
                continue
            if not self.is_mute:
                writer.write(data)
                await writer.drain()
