"""RQ with its pool of workers (`rq worker-pool`), one for each core; no result is kept.

A worker has one job at a time and, as `SimpleWorker`, does not fork for it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from functools import cache
from pathlib import Path

from redis import Redis
from rq import Queue

from bench.peers._told import TEXT, Notes, drive, given_url

_LIST = 1000


@cache
def notes() -> Notes:
    return Notes()


def work(text: str, sent: float) -> None:
    assert text
    notes().note(sent)


async def main() -> None:
    url = given_url()
    queue = Queue(connection=Redis.from_url(url))

    def put(jobs: int, sent: float) -> None:
        data = (
            Queue.prepare_data("bench.peers.rq.work", args=(TEXT, sent), result_ttl=0) for _ in range(jobs)
        )
        queue.enqueue_many(list(data))

    async def enqueue(sent: float) -> None:
        put(1, sent)

    async def fill(jobs: int) -> None:
        for first in range(0, jobs, _LIST):
            put(min(_LIST, jobs - first), time.time())

    command = [str(Path(sys.executable).with_name("rq")), "worker-pool", "--url", url, "--quiet"]
    command += ["--worker-class", "rq.worker.SimpleWorker", "--num-workers", str(os.cpu_count() or 1)]
    await drive(command, enqueue, fill)


if __name__ == "__main__":
    asyncio.run(main())
