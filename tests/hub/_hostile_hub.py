"""A hub in a process of its own that tells how long its event loop was kept from its work, and how much memory it took.

It reads lines: `begin` starts a measurement, `end` answers it as JSON with `lag_s` and `grown_bytes`. Its first line
has its address and a key of each role.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from tests.hub._hub import running_hub

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.policy.rules import Rules

_TICK_S = 0.005


class Meter:
    def __init__(self) -> None:
        self.lag_s = 0.0
        self._before = 0
        self._libc = ctypes.CDLL(None)

    async def run(self) -> None:
        now, worked = time.perf_counter(), time.process_time()
        while True:
            last, last_worked = now, worked
            await asyncio.sleep(_TICK_S)
            now, worked = time.perf_counter(), time.process_time()
            # What this process did not work in the meantime was other processes' time: a busy machine is no lag.
            self.lag_s = max(self.lag_s, min(now - last - _TICK_S, worked - last_worked))

    def begin(self) -> None:
        gc.collect()
        self._libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _memory("VmRSS")

    def grown(self) -> int:
        return _memory("VmHWM") - self._before


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not tell {name}")


def _say(what: Any) -> None:
    print(msgspec.json.encode(what).decode(), flush=True)


async def _main(settings: str, max_open_bytes: str) -> None:
    limits, rules = msgspec.json.decode(settings, type=HubLimits), Rules(max_open_bytes=int(max_open_bytes))
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/fleet.db"
        async with running_hub(
            limits=limits, rules=rules, store_url=url, folder=Path(folder) / "files"
        ) as rig:
            meter = Meter()
            ticking = asyncio.create_task(meter.run())
            _say({"url": rig.url, "keys": {role.value: key for role, key in rig.keys.items()}})
            loop = asyncio.get_running_loop()
            while line := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
                if line == "begin":
                    meter.begin()
                    await asyncio.sleep(2 * _TICK_S)
                    meter.lag_s = 0.0
                    _say({})
                else:
                    _say({"lag_s": meter.lag_s, "grown_bytes": meter.grown()})
            ticking.cancel()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
