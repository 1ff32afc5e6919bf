"""SAQ: one worker with so many jobs at a time, on uvloop; a finished job is not kept."""

from __future__ import annotations

import sys
from typing import Any

import uvloop
from saq import Queue, Worker

from bench.peers._told import TEXT, Notes, drive, each_alone, given_url


async def main() -> None:
    queue = Queue.from_url(given_url(), max_concurrent_ops=50)

    async def enqueue(sent: float) -> None:
        # -1: it is deleted once it is done.
        await queue.enqueue("work", text=TEXT, sent=sent, ttl=-1)

    await drive([sys.executable, "-m", "bench.peers.saq"], enqueue, each_alone(enqueue, 50))
    await queue.disconnect()


async def serve() -> None:
    notes = Notes()

    async def work(context: dict[str, Any], *, text: str, sent: float) -> None:
        assert context and text
        notes.note(sent)

    queue = Queue.from_url(notes.url, max_concurrent_ops=notes.slots)
    await Worker(queue, [("work", work)], concurrency=notes.slots).start()
    await queue.disconnect()


if __name__ == "__main__":
    uvloop.run(main() if len(sys.argv) > 1 else serve())
