"""dramatiq with its usual worker (`dramatiq`): a process a core, as is its default, and the slots as their threads."""

from __future__ import annotations

import asyncio
import os
import sys

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from bench.peers._told import TEXT, Notes, drive, each_alone, given_url

broker = RedisBroker(url=given_url())
dramatiq.set_broker(broker)
notes = Notes() if "BENCH_NOTES" in os.environ else None


def work(text: str, sent: float) -> None:
    assert text and notes is not None
    notes.note(sent)


actor = dramatiq.actor(work, actor_name="work")


async def main() -> None:
    async def enqueue(sent: float) -> None:
        actor.send(TEXT, sent)

    processes = os.cpu_count() or 1
    threads = max(int(sys.argv[4]) // processes, 1)
    command = [sys.executable, "-m", "dramatiq", "bench.peers.dramatiq"]
    command += ["--processes", str(processes), "--threads", str(threads)]
    await drive(command, enqueue, each_alone(enqueue, 1))


if __name__ == "__main__":
    asyncio.run(main())
