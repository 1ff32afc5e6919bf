"""procrastinate on psycopg's own C: callers defer in batches, one worker with so many jobs at a time, all at once.

    python -m bench.peers.procrastinate <url> <jobs> <callers>

Prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time

import uvloop
from procrastinate import App, PsycopgConnector

_TEXT = "x" * 256
_BATCH = 50


async def main() -> None:
    url, jobs_text, callers = sys.argv[1:]
    jobs = int(jobs_text)
    logging.disable(logging.INFO)
    app = App(connector=PsycopgConnector(conninfo=url, min_size=10, max_size=10))
    left, done = jobs, asyncio.Event()

    async def work(text: str) -> None:
        nonlocal left
        assert text
        left -= 1
        if left == 0:
            done.set()

    task = app.task(name="work")(work)
    firsts = iter(range(0, jobs, _BATCH))

    async def caller() -> None:
        for first in firsts:
            await task.batch_defer_async(*({"text": _TEXT},) * min(_BATCH, jobs - first))

    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        worker = asyncio.create_task(
            app.run_worker_async(concurrency=int(callers), install_signal_handlers=False)
        )
        await asyncio.sleep(0.5)
        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(int(callers))))
        ended = asyncio.create_task(done.wait())
        await asyncio.wait((worker, ended), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
        print(json.dumps({"process_s": time.perf_counter() - began}), flush=True)
        worker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await worker


if __name__ == "__main__":
    uvloop.run(main())
