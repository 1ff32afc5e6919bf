"""taskiq on Redis streams with its usual worker (`taskiq worker`), one process, uvloop, no result backend."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from taskiq_redis import RedisStreamBroker

from bench.peers._told import TEXT, drive


async def main() -> None:
    brokers: list[Any] = []
    tasks: list[Any] = []

    async def connect(url: str) -> None:
        brokers.append(RedisStreamBroker(url, max_connection_pool_size=50))
        await brokers[0].startup()
        tasks.append(brokers[0].register_task(_nothing, task_name="work"))

    async def enqueue(sent: float) -> None:
        await tasks[0].kiq(TEXT, sent)

    slots = sys.argv[4]
    command = [str(Path(sys.executable).with_name("taskiq")), "worker", "bench.peers.taskiq_worker:broker"]
    command += ["--workers", "1", "--max-async-tasks", slots, "--log-level", "ERROR"]
    await drive(command, connect, enqueue, at_once=50)
    await brokers[0].shutdown()


async def _nothing(text: str, sent: float) -> None:
    """The worker's task of this name does the work."""


if __name__ == "__main__":
    asyncio.run(main())
