"""pgqueuer on asyncpg and uvloop: callers enqueue in lists, one queue manager takes batches, all at the same time.

    python -m bench.peers.pgqueuer <url> <jobs> <callers>

Its tables are installed with their default, the durable setting. Enqueued one by one it is several times slower. The
last jobs' completions may still be in its buffer when it stops counting. Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import asyncpg
import uvloop
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, QueueManager
from pgqueuer.queries import Queries

_TEXT = b"x" * 256
_LIST = 50
_BATCH = 100


async def main() -> None:
    url, jobs_text, callers = sys.argv[1:]
    jobs = int(jobs_text)
    connection = await asyncpg.connect(url)
    pool = await asyncpg.create_pool(url, min_size=10, max_size=10)
    queries = Queries(AsyncpgPoolDriver(pool))
    await queries.install()
    manager = QueueManager(Queries(AsyncpgDriver(connection)))
    left, done = jobs, asyncio.Event()

    async def work(job: object) -> None:
        nonlocal left
        assert job is not None
        left -= 1
        if left == 0:
            done.set()

    manager.entrypoint("work")(work)
    firsts = iter(range(0, jobs, _LIST))

    async def caller() -> None:
        for first in firsts:
            count = min(_LIST, jobs - first)
            await queries.enqueue(["work"] * count, [_TEXT] * count, [0] * count)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(manager.run(batch_size=_BATCH))
        await asyncio.sleep(0.5)
        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(int(callers))))
        await done.wait()
        print(json.dumps({"process_s": time.perf_counter() - began}), flush=True)
        manager.shutdown.set()
    await pool.close()


if __name__ == "__main__":
    uvloop.run(main())
