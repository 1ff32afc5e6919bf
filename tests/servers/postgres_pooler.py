"""A transaction pooler in a few lines: each transaction of a client may run on another connection to the server.

It hands connections out in turn, so that whoever keeps a state in one of them does not find it there again.
"""

from __future__ import annotations

import asyncio
import struct
from types import TracebackType

Backend = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_ASKS_FOR_ENCRYPTION = (80877103, 80877104)


class TransactionPooler:
    def __init__(self, host: str, port: int) -> None:
        self._server_at = (host, port)
        self._backends: asyncio.Queue[Backend] = asyncio.Queue()
        self._opened: list[asyncio.StreamWriter] = []
        self._listener: asyncio.Server | None = None
        self.transactions = 0

    async def __aenter__(self) -> TransactionPooler:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._listener is not None
        self._listener.close()
        for writer in self._opened:
            writer.close()
        for writer in self._opened:
            await writer.wait_closed()

    @property
    def port(self) -> int:
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held: Backend | None = None
        try:
            await self._greet(reader, writer)
            while True:
                kind, message = await _message(reader)
                if kind == b"X":
                    break
                if held is None:
                    held = await self._backends.get()
                held[1].write(message)
                # After these the server answers to the end; everything else is only passed on.
                if kind in b"QS" and await self._answer(held, writer) == b"I":
                    self._backends.put_nowait(held)
                    self.transactions += 1
                    held = None
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            if held is not None:
                held[1].close()
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(8)
            length, code = struct.unpack("!ii", head)
            hello = head + await reader.readexactly(length - 8)
            if code not in _ASKS_FOR_ENCRYPTION:
                break
            writer.write(b"N")
        backend = await asyncio.open_connection(*self._server_at)
        self._opened.append(backend[1])
        backend[1].write(hello)
        await self._answer(backend, writer)
        self._backends.put_nowait(backend)

    @staticmethod
    async def _answer(backend: Backend, writer: asyncio.StreamWriter) -> bytes:
        """Passes on until the server is ready again, and says in which state."""
        while True:
            kind, message = await _message(backend[0])
            writer.write(message)
            if kind == b"Z":
                await writer.drain()
                return message[-1:]


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readexactly(5)
    kind, length = struct.unpack("!ci", head)
    return kind, head + await reader.readexactly(length - 4)
