"""News of jobs that other engines move: on a shared store, whoever watches a job here hears of its facts all the same.

The bus of a process tells what its own engine did. For the jobs somebody follows, the store is asked once a second for
facts the bus has not told of, and they are published here. A fact is told once, by whoever is first.

All of this is news, which may be lost. So whoever follows a job also looks at it every few seconds (`rechecking.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager

from comfyfleet.engine.context import Context
from comfyfleet.engine.rechecking import Rechecks
from comfyfleet.model.errors import Fault
from comfyfleet.model.fact import Event, Fact, News
from comfyfleet.model.ids import JobId
from comfyfleet.ports import Timer
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

_AT_A_TIME = 256
"""Jobs that are looked at together: a store that takes many questions in one turn answers them in one."""


class Follower:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._followers: Counter[JobId] = Counter()
        self._told: dict[JobId, int] = {}
        self._timer: Timer | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False
        self._rechecks = Rechecks(context.clock, context.rules.recheck_s)
        self.is_passing_on = False
        """What the bus is being told was done by another engine."""
        self.followed: Callable[[JobId], None] = lambda _: None
        """Set by whoever tells other engines that a job is followed here."""
        self.look_also: Callable[[], Awaitable[None]] | None = None
        """Set by whoever has more to look for once a second."""
        context.bus.listen(self._hear)

    @property
    def jobs(self) -> Collection[JobId]:
        return self._followers.keys()

    def pass_on(self, event: Fact | News) -> bool:
        """Heard from another engine: to the bus here, if somebody follows the job. A fact only in its turn."""
        told = self._told.get(event.job_id)
        if told is None:
            return False
        if isinstance(event, News) or event.number == told + 1:
            self._publish(event)
        elif event.number > told and self._running is None:
            # One before it was not heard of: all are looked for at once.
            if self._timer is not None:
                self._timer.cancel()
            self._fire()
        return True

    def _publish(self, event: Fact | News) -> None:
        self.is_passing_on = True
        try:
            self._context.bus.publish(event)
        finally:
            self.is_passing_on = False

    @contextmanager
    def follow(
        self, job_id: JobId, after: int = 0, look: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """What happens to the job from that fact on is published here, wherever it happens. `look` is called every few
        seconds, heard or not: it reads the job from the store."""
        with self._rechecks.calling(look), self._hearing_of(job_id, after):
            yield

    @contextmanager
    def _hearing_of(self, job_id: JobId, after: int) -> Iterator[None]:
        if not self._context.store.is_shared:
            yield
            return
        self._followers[job_id] += 1
        self._told.setdefault(job_id, after)
        if self._followers[job_id] == 1:
            self.followed(job_id)
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
            self._running = in_background(self._look(), name="follow")

    async def _look(self) -> None:
        try:
            jobs = list(self._followers)
            for start in range(0, len(jobs), _AT_A_TIME):
                await asyncio.gather(*map(self._look_at, jobs[start : start + _AT_A_TIME]))
            if self.look_also is not None:
                await self.look_also()
        except Exception:
            log_failure(_LOG, "the jobs that are followed could not be looked at; the next look tries again")
        finally:
            self._running = None
            if self._followers:
                self._arm()

    async def _look_at(self, job_id: JobId) -> None:
        try:
            facts = await self._context.store.facts(job_id, self._told.get(job_id, 0))
        except Fault as fault:
            # One whose facts cannot be read, as without its tenant's key, hides no other's.
            _LOG.info("the facts of job %s could not be read; the next look tries again: %s", job_id, fault)
            return
        for fact in facts:
            if fact.number > self._told.get(job_id, fact.number):
                self._publish(fact)

    async def close(self) -> None:
        self._is_closed = True
        self._rechecks.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
