"""arq: one worker with so many jobs at a time, on uvloop; no result is kept.

It looks for jobs at intervals; the default of half a second would be most of its time, so it looks as often as it can.
"""

from __future__ import annotations

import sys
from typing import Any

import uvloop
from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker, func

from bench.peers._told import TEXT, Notes, drive, each_alone, given_url


async def main() -> None:
    pool = await create_pool(RedisSettings.from_dsn(given_url()))

    async def enqueue(sent: float) -> None:
        await pool.enqueue_job("work", TEXT, sent)

    await drive([sys.executable, "-m", "bench.peers.arq"], enqueue, each_alone(enqueue, 50))
    await pool.aclose()


async def serve() -> None:
    notes = Notes()

    async def work(context: dict[Any, Any], text: str, sent: float) -> None:
        assert context and text
        notes.note(sent)

    worker = Worker(
        [func(work, name="work")],
        redis_settings=RedisSettings.from_dsn(notes.url),
        max_jobs=notes.slots,
        poll_delay=0.001,
        keep_result=0,
    )
    await worker.async_run()


if __name__ == "__main__":
    uvloop.run(main() if len(sys.argv) > 1 else serve())
