"""News of jobs that other engines move: on a shared store, whoever watches a job here hears of its facts all the same.

The bus of a process tells what its own engine did. For the jobs somebody follows, the store is asked once a second for
facts the bus has not told of, and they are published here. A fact is told once, by whoever is first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from comfyfleet.engine.context import Context
from comfyfleet.model.fact import Event, Fact
from comfyfleet.model.ids import JobId
from comfyfleet.ports import Timer

_LOG = logging.getLogger(__name__)


class Follower:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._followers: Counter[JobId] = Counter()
        self._told: dict[JobId, int] = {}
        self._timer: Timer | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False
        context.bus.listen(self._hear)

    @contextmanager
    def follow(self, job_id: JobId, after: int = 0) -> Iterator[None]:
        """What happens to the job from that fact on is published here, wherever it happens."""
        if not self._context.store.is_shared:
            yield
            return
        self._followers[job_id] += 1
        self._told.setdefault(job_id, after)
        self._arm()
        try:
            yield
        finally:
            self._followers[job_id] -= 1
            if not self._followers[job_id]:
                del self._followers[job_id], self._told[job_id]

    def _hear(self, event: Event) -> None:
        if isinstance(event, Fact) and event.job_id in self._told:
            self._told[event.job_id] = max(self._told[event.job_id], event.number)

    def _arm(self) -> None:
        if self._timer is None and self._running is None and not self._is_closed:
            clock = self._context.clock
            self._timer = clock.call_at(clock.now() + self._context.rules.round_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._followers and not self._is_closed:
            self._running = asyncio.get_running_loop().create_task(self._look(), name="follow")

    async def _look(self) -> None:
        try:
            for job_id in list(self._followers):
                for fact in await self._context.store.facts(job_id, self._told.get(job_id, 0)):
                    if fact.number > self._told.get(job_id, fact.number):
                        self._context.bus.publish(fact)
        except Exception:
            _LOG.exception("the jobs that are followed could not be looked at; the next look tries again")
        finally:
            self._running = None
            if self._followers:
                self._arm()

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
