"""A hub in a process of its own, as `comfyfleet hub` has it, or an empty Starlette route on the same server.

    python -m bench.hub_process hub <data folder> [<store url>]
    python -m bench.hub_process empty <data folder>

Prints one line of JSON (port and key) when it answers, and ends when its input does. How often one key may ask is not
limited, since all load here comes with one key; and leases last, so that nothing falls due while it is measured.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from bench._report import ROOT
from comfyfleet.cli.bootstrap import run_hub, run_loop
from comfyfleet.cli.settings import read_settings

_HUB = {
    "port": 0,
    "limits.requests_per_s": 1e9,
    "limits.burst": 1_000_000_000,
    "rules.lease_ttl_s": 3600.0,
    "rules.acknowledge_s": 3600.0,
}
_TICKS = os.sysconf("SC_CLK_TCK")


class Answering(msgspec.Struct, frozen=True):
    port: int
    key: str
    pid: int

    def cpu_s(self) -> float:
        """Of all its threads, the writer's included; in steps of a hundredth of a second."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


@asynccontextmanager
async def answering(what: str, store: str | None = None) -> AsyncIterator[Answering]:
    """A fresh process with a data folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        more = () if store is None else (store,)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.hub_process", what, folder, *more),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            line = await child.stdout.readline()
            if not line:
                raise SystemExit(f"the process that should answer ({what}) ended before it did")
            yield msgspec.json.decode(line, type=Answering)
        finally:
            child.stdin.close()
            await child.wait()


async def _serve_hub(folder: str, store: str | None) -> None:
    resolved = read_settings({**_HUB, "data": folder, "store": store}, environment={})
    async with run_hub(resolved) as running_hub:
        await _say_and_wait(running_hub.serving.port, running_hub.key)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


async def _serve_empty() -> None:
    async def nothing(request: Request) -> JSONResponse:
        await request.body()
        return JSONResponse({})

    application = Starlette(routes=[Route("/{path:path}", nothing, methods=["POST"])])
    config = uvicorn.Config(
        application,
        port=0,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve())
    await server.is_up.wait()
    gc.collect()
    gc.freeze()
    await _say_and_wait(server.servers[0].sockets[0].getsockname()[1], "none")
    server.should_exit = True
    await serving


async def _say_and_wait(port: int, key: str) -> None:
    print(msgspec.json.encode(Answering(port, key, os.getpid())).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    what, folder, *more = sys.argv[1:]
    work: Any = _serve_empty() if what == "empty" else _serve_hub(folder, more[0] if more else None)
    run_loop(work)


if __name__ == "__main__":
    main()
