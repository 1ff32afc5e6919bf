"""What a peer's worker notes about the jobs it runs, and how its driver hears of it: through a list in the same Redis.

    python -m bench.peers.<name> throughput|latency <url> <jobs> <slots>

Every driver prints one line of JSON. Throughput: all jobs are enqueued, then a worker is started; counted from its
first job to its last. Latency: a worker is idle, one job comes at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis import Redis

TEXT = "x" * 256
WARM_UPS = 5
_LIST = "bench:told"


class Notes:
    """In the worker. The number of jobs to come is told in its environment."""

    def __init__(self) -> None:
        self.url = os.environ["BENCH_URL"]
        self.slots = int(os.environ["BENCH_SLOTS"])
        self._left = int(os.environ["BENCH_JOBS"])
        self._began = 0.0
        self._latencies: list[float] = []

    def note(self, sent: float) -> None:
        now = time.time()
        self._began = self._began or now
        self._latencies.append((now - sent) * 1000)
        self._left -= 1
        if self._left == 0:
            told = {"process_s": time.time() - self._began, "latencies_ms": self._latencies}
            with Redis.from_url(self.url) as redis:
                redis.rpush(_LIST, json.dumps(told))


async def drive(
    command: list[str],
    connect: Callable[[str], Awaitable[None]],
    enqueue: Callable[[float], Awaitable[object]],
    at_once: int,
) -> None:
    """`connect` opens the peer's own client; `enqueue` submits one job that carries the time it was sent."""
    mode, url, jobs_text, slots = sys.argv[1:]
    jobs = int(jobs_text)
    is_latency = mode == "latency"
    expected = jobs + WARM_UPS if is_latency else jobs
    environment = {**os.environ, "BENCH_URL": url, "BENCH_JOBS": str(expected), "BENCH_SLOTS": slots}
    await connect(url)
    answer: dict[str, Any] = {}
    if not is_latency:
        began = time.perf_counter()
        for first in range(0, jobs, at_once):
            await asyncio.gather(*(enqueue(time.time()) for _ in range(min(at_once, jobs - first))))
        answer["enqueue_s"] = time.perf_counter() - began
    worker = await asyncio.create_subprocess_exec(*command, env=environment, stdout=sys.stderr)
    try:
        if is_latency:
            # The first ones find the worker still on its way.
            await asyncio.sleep(4)
            for _ in range(expected):
                await enqueue(time.time())
                await asyncio.sleep(random.uniform(0.02, 0.04))
        with Redis.from_url(url, socket_timeout=None) as redis:
            found: Any = await asyncio.to_thread(redis.blpop, [_LIST], 120)
        if found is None:
            raise SystemExit(f"{command}: the jobs were not done within two minutes")
        answer |= json.loads(found[1])
    finally:
        worker.terminate()
        try:
            await asyncio.wait_for(worker.wait(), 10)
        except TimeoutError:
            worker.kill()
            await worker.wait()
    answer["latencies_ms"] = answer["latencies_ms"][WARM_UPS:] if is_latency else []
    print(json.dumps(answer))
