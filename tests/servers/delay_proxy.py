"""A network that takes its time: a process that passes TCP on, each byte so many milliseconds after it came, both ways.

What is sent while earlier bytes are on their way is not held up by them, as on a longer cable. It knows no protocol, so
it stands before Redis and PostgreSQL alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self

_PIECE = 1 << 16


class DelayProxy:
    def __init__(self, port: int, delay_s: float) -> None:
        self._arguments = (str(port), str(delay_s))
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        command = [sys.executable, "-I", __file__, *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()


async def _serve(port: int, delay_s: float) -> None:
    async def link(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        ways = [
            asyncio.ensure_future(_pass_on(reader, there_writer, delay_s)),
            asyncio.ensure_future(_pass_on(there_reader, writer, delay_s)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        for each in (writer, there_writer):
            each.transport.abort()

    server = await asyncio.start_server(link, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def arrive() -> None:
        while True:
            at, piece = await under_way.get()
            if (left := at - loop.time()) > 0:
                await asyncio.sleep(left)
            if not piece:
                return
            writer.write(piece)
            await writer.drain()

    arriving = asyncio.ensure_future(arrive())
    try:
        with contextlib.suppress(OSError):
            while piece := await reader.read(_PIECE):
                under_way.put_nowait((loop.time() + delay_s, piece))
        under_way.put_nowait((loop.time() + delay_s, b""))
        with contextlib.suppress(OSError):
            await arriving
    finally:
        arriving.cancel()


if __name__ == "__main__":
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2])))
