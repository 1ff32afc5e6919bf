"""Who waits for the end of which job, and for how long: woken by the fact that ends it, or by the end of the pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from comfyfleet.model.fact import Event, Fact
from comfyfleet.model.ids import JobId


class Waiting:
    def __init__(self) -> None:
        self._waiting: dict[JobId, set[asyncio.Event]] = {}

    @contextmanager
    def for_end_of(self, job_id: JobId) -> Iterator[asyncio.Event]:
        ended = asyncio.Event()
        waiting = self._waiting.setdefault(job_id, set())
        waiting.add(ended)
        try:
            yield ended
        finally:
            waiting.discard(ended)
            if not waiting:
                self._waiting.pop(job_id, None)

    def hear(self, event: Event) -> None:
        if isinstance(event, Fact) and event.kind.is_final:
            for ended in self._waiting.get(event.job_id, ()):
                ended.set()

    def wake_all(self) -> None:
        for waiting in self._waiting.values():
            for ended in waiting:
                ended.set()


@asynccontextmanager
async def within(limit_s: float | None) -> AsyncIterator[None]:
    """`asyncio.timeout`, for those too who wait while they are being cancelled, to take back what they began.

    There Python before 3.11.4 lets the cancellation out by which a timeout works, and nobody hears that time is over.
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine that waits has a task"
    requests = task.cancelling()
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except asyncio.CancelledError:
        if limit.expired() and task.cancelling() <= requests:
            raise TimeoutError from None
        raise
