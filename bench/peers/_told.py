"""What a peer's workers note about the jobs they run, and how its driver hears of it: through a file they append to.

    python -m bench.peers.<name> throughput|latency <url> <jobs> <slots>

Every driver prints one line of JSON. Throughput: all jobs are enqueued, then a worker is started; counted from its
first job to its last. Latency: a worker is idle, one job comes at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

TEXT = "x" * 256
WARM_UPS = 5
_NOTE = struct.Struct("dd")
_PATIENCE_S = 120

Enqueue = Callable[[float], Awaitable[object]]


class Notes:
    """In the worker. A note is one append, which threads and processes may do at the same time."""

    def __init__(self) -> None:
        self.url = os.environ["BENCH_URL"]
        self.slots = int(os.environ["BENCH_SLOTS"])
        self._file = os.open(os.environ["BENCH_NOTES"], os.O_WRONLY | os.O_APPEND)

    def note(self, sent: float) -> None:
        os.write(self._file, _NOTE.pack(time.time(), sent))


def given_url() -> str:
    """The server's address: in the worker from its environment, in the driver its argument."""
    return os.environ.get("BENCH_URL") or sys.argv[2]


def each_alone(enqueue: Enqueue, at_once: int) -> Callable[[int], Awaitable[None]]:
    """For peers that do not enqueue in lists: one call for each job, so many of them under way."""

    async def fill(jobs: int) -> None:
        for first in range(0, jobs, at_once):
            await asyncio.gather(*(enqueue(time.time()) for _ in range(min(at_once, jobs - first))))

    return fill


async def drive(command: list[str], enqueue: Enqueue, fill: Callable[[int], Awaitable[None]]) -> None:
    """`enqueue` submits one job that carries the time it was sent; `fill` so many as fast as the peer can."""
    mode, url, jobs_text, slots = sys.argv[1:]
    jobs = int(jobs_text)
    is_latency = mode == "latency"
    expected = jobs + WARM_UPS if is_latency else jobs
    answer: dict[str, Any] = {}
    if not is_latency:
        began = time.perf_counter()
        await fill(jobs)
        answer["enqueue_s"] = time.perf_counter() - began
    with tempfile.NamedTemporaryFile() as notes:
        environment = {**os.environ, "BENCH_URL": url, "BENCH_SLOTS": slots, "BENCH_NOTES": notes.name}
        worker = await asyncio.create_subprocess_exec(
            *command, env=environment, stdout=sys.stderr, start_new_session=True
        )
        try:
            for number in range(expected if is_latency else 0):
                if number == WARM_UPS:
                    # These found the worker still on its way. One of several processes may be later than another.
                    await _written(notes.name, WARM_UPS, worker)
                    await asyncio.sleep(1)
                await enqueue(time.time())
                await asyncio.sleep(random.uniform(0.02, 0.04))
            await _written(notes.name, expected, worker)
        finally:
            await _stopped(worker)
        noted = sorted(_NOTE.iter_unpack(notes.read()))
    answer["process_s"] = noted[-1][0] - noted[0][0]
    answer["latencies_ms"] = [(at - sent) * 1000 for at, sent in noted[WARM_UPS:]] if is_latency else []
    print(json.dumps(answer))


async def _written(path: str, expected: int, worker: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while (done := _count(path)) < expected:
        if worker.returncode is not None:
            raise SystemExit(f"the worker ended with {worker.returncode} before the jobs were done")
        if time.monotonic() > deadline:
            raise SystemExit(f"{done} of {expected} jobs were done within {_PATIENCE_S} seconds")
        await asyncio.sleep(0.02)


def _count(path: str) -> int:
    return Path(path).stat().st_size // _NOTE.size


async def _stopped(worker: asyncio.subprocess.Process) -> None:
    """With all of its processes."""
    with contextlib.suppress(TimeoutError, ProcessLookupError):
        worker.terminate()
        await asyncio.wait_for(worker.wait(), 10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    await worker.wait()
