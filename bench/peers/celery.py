"""Celery with its usual worker (`celery worker`) and a thread for each slot; results are ignored.

Of its pools (threads, gevent, prefork, solo) that of threads was the fastest with jobs as short as these. What only
workers of a cluster say to each other is off.
"""

from __future__ import annotations

import asyncio
import os
import sys

from celery import Celery

from bench.peers._told import TEXT, Notes, drive, each_alone, given_url

app = Celery("bench", broker=given_url())
app.conf.update(task_ignore_result=True, worker_disable_rate_limits=True)
notes = Notes() if "BENCH_NOTES" in os.environ else None


def work(text: str, sent: float) -> None:
    assert text and notes is not None
    notes.note(sent)


task = app.task(work, name="work")


async def main() -> None:
    with app.producer_pool.acquire(block=True) as producer:

        async def enqueue(sent: float) -> None:
            task.apply_async((TEXT, sent), producer=producer)

        command = [sys.executable, "-m", "celery", "--app", "bench.peers.celery", "--quiet", "worker"]
        command += ["--pool", "threads", "--concurrency", sys.argv[4], "--loglevel", "ERROR"]
        command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        await drive(command, enqueue, each_alone(enqueue, 1))


if __name__ == "__main__":
    asyncio.run(main())
