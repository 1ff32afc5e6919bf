"""taskiq on Redis streams with its usual worker (`taskiq worker`), one process, uvloop, no result backend."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from taskiq_redis import RedisStreamBroker

from bench.peers._told import TEXT, drive, each_alone, given_url


async def main() -> None:
    broker = RedisStreamBroker(given_url(), max_connection_pool_size=50)
    await broker.startup()
    task = broker.register_task(_nothing, task_name="work")

    async def enqueue(sent: float) -> None:
        await task.kiq(TEXT, sent)

    slots = sys.argv[4]
    command = [str(Path(sys.executable).with_name("taskiq")), "worker", "bench.peers.taskiq_worker:broker"]
    command += ["--workers", "1", "--max-async-tasks", slots, "--log-level", "ERROR"]
    await drive(command, enqueue, each_alone(enqueue, 50))
    await broker.shutdown()


async def _nothing(text: str, sent: float) -> None:
    """The worker's task of this name does the work."""


if __name__ == "__main__":
    asyncio.run(main())
