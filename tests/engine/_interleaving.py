"""A store that lets something happen before a chosen read of a job: what others do between two reads of a watcher."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

from tests.engine._rig import graph, offers
from tests.engine.test_several_engines import SharedStore

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, FailureReport, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.fact import Event
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.model.job import JobResult, Submission
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Store
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.time import ManualClock, SeededRandom

Step = Callable[[], Awaitable[None]]
WORKER = WorkerId("gpu")


class InterleavedStore:
    """`before[n]` happens before the n-th read of the job's dispatch, facts or record, counted from 1."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.job_id = JobId("")
        self.before: dict[int, list[Step]] = {}
        self.reads = 0
        self._stepping: asyncio.Task[Any] | None = None
        self._taking = asyncio.Lock()
        self.records = _Records(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def load(self, job_id: JobId) -> Any:
        await self.read(job_id)
        return await self._store.load(job_id)

    async def facts(self, job_id: JobId, after: int = 0) -> Any:
        await self.read(job_id)
        return await self._store.facts(job_id, after)

    async def read(self, job_id: JobId) -> None:
        # What a step reads for itself is no read of the watcher.
        if job_id != self.job_id or asyncio.current_task() is self._stepping:
            return
        self.reads += 1
        await self._take(self.reads)

    async def _take(self, number: int) -> None:
        # One after the other: a step may cause the read before which the next one happens.
        async with self._taking:
            self._stepping = asyncio.current_task()
            for step in self.before.pop(number, []):
                await step()
            self._stepping = None

    async def rest(self) -> None:
        """What no read came for."""
        while self.before:
            await self._take(min(self.before))
            await ManualClock.settle()


class _Records:
    def __init__(self, store: InterleavedStore) -> None:
        self._outer = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outer._store.records, name)

    async def get(self, job_id: JobId) -> Any:
        await self._outer.read(job_id)
        return await self._outer._store.records.get(job_id)


class Scene:
    """One job, an engine that watches it and one that moves it; the same one, where `is_shared` is false."""

    def __init__(self, *, is_shared: bool, bus: Any = None) -> None:
        self.clock = ManualClock()
        store = (SharedStore if is_shared else MemoryStore)(self.clock)
        self.store = InterleavedStore(store)
        rules = Rules(max_attempts=1)
        made = cast(Store, self.store)
        self.watching = Engine(made, rules=rules, clock=self.clock, rng=SeededRandom(1), bus=bus)
        self.moving = self.watching
        if is_shared:
            self.moving = Engine(store, rules=rules, clock=self.clock, rng=SeededRandom(2))
        self._polls = itertools.count(1)
        self._leased: LeasedJob | None = None
        self.job_id = JobId("")

    async def __aenter__(self) -> Scene:
        for engine in (self.watching, self.moving):
            await engine.__aenter__()
        await self.moving.register(RegisterWorker(WORKER, offers("KSampler")))
        self.job_id = (await self.moving.submit(Submission(graph()))).job_id
        return self

    async def __aexit__(self, *_: object) -> None:
        for engine in (self.watching, self.moving):
            await engine.close()

    def plan(self, steps: tuple[Step, ...], reads: tuple[int, ...]) -> None:
        self.store.job_id = self.job_id
        for step, number in zip(steps, reads, strict=True):
            self.store.before.setdefault(number, []).append(step)

    async def come_to_rest(self) -> None:
        await self.clock.settle()
        await self.store.rest()
        await self.clock.advance(10)

    async def lease(self) -> None:
        poll = PollId(f"poll-{next(self._polls)}")
        self._leased = await self.moving.poll(Poll(WORKER, poll, 0))
        assert self._leased is not None
        await self.moving.heartbeat(WORKER, [self._leased.ref])

    async def complete(self) -> None:
        assert self._leased is not None
        result = JobResult(outputs={"2": {"round": [self._leased.ref.round]}})
        await self.moving.complete(Completion(self._leased.ref, result))

    async def fail(self) -> None:
        assert self._leased is not None
        failure = Failure(FailureKind.INVALID_WORKFLOW, f"broken in round {self._leased.ref.round}")
        await self.moving.fail(FailureReport(self._leased.ref, failure))

    async def retry(self) -> None:
        await self.moving.retry(self.job_id)

    @property
    def stories(self) -> dict[str, tuple[Step, ...]]:
        """The last end of each has a result of its own."""
        return {
            "completed": (self.lease, self.complete),
            "retried": (self.lease, self.fail, self.retry, self.lease, self.complete),
            "failed twice": (self.lease, self.fail, self.retry, self.lease, self.fail),
        }


STORIES = {"completed": 2, "retried": 5, "failed twice": 5}


def interleavings(steps: int, reads: int) -> Iterator[tuple[int, ...]]:
    """Before which read each step happens, in every order-keeping way."""
    return itertools.combinations_with_replacement(range(1, reads + 1), steps)


class DeafBus:
    """Loses every message."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def publish(self, event: Event) -> None:
        """Nobody hears it."""
