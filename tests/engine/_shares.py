"""A fleet that never idles, under a clock wound by hand: how many GPU-seconds does each tenant get?"""

from __future__ import annotations

import itertools
from collections import Counter
from heapq import heappop, heappush

import msgspec
from tests.engine._rig import graph, offers

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.ids import PollId, TenantId, WorkerId
from comfyfleet.model.job import JobResult, Submission
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Store
from comfyfleet.testing.time import ManualClock, SeededRandom


class Demand(msgspec.Struct, frozen=True):
    """A tenant that always has so many jobs waiting, each of so many seconds."""

    tenant: TenantId
    seconds: float
    weight: float = 1.0
    waiting: int = 8


class SharedFleet:
    def __init__(self, store: Store, clock: ManualClock, workers: int) -> None:
        self.clock = clock
        rules = Rules(worker_lost_s=1e9)
        self.engine = Engine(store, rules=rules, clock=clock, rng=SeededRandom())
        self.store = store
        self.used: Counter[str] = Counter()
        self.done_after: dict[str, list[float]] = {}
        """From the submit of each job to its end."""
        self.idle = [WorkerId(f"worker-{number}") for number in range(workers)]
        self._polls = itertools.count()
        self._running: list[tuple[float, int, WorkerId, LeasedJob, float]] = []
        self._submitted: dict[str, tuple[float, Demand]] = {}

    async def __aenter__(self) -> SharedFleet:
        await self.engine.__aenter__()
        for worker_id in self.idle:
            await self.engine.register(
                RegisterWorker(
                    worker_id,
                    offers("KSampler", models=tuple(f"{seconds}.safetensors" for seconds in (1, 2, 10, 30))),
                    1,
                )
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def submit(self, demand: Demand) -> None:
        # Another model is another workflow, so that the fleet can learn how long each takes.
        workflow = graph(model=f"{demand.seconds:g}.safetensors")
        submitted = await self.engine.submit(Submission(workflow, tenant=demand.tenant))
        self._submitted[submitted.job_id] = (self.clock.now(), demand)

    async def run(self, demands: list[Demand], seconds: float) -> None:
        """Whenever a job of a tenant is leased, it submits another."""
        for demand in demands:
            for _ in range(demand.waiting):
                await self.submit(demand)
        until = self.clock.now() + seconds
        while True:
            for leased in await self.lease():
                demand = self._submitted[leased.ref.job_id][1]
                if demand in demands:
                    await self.submit(demand)
            if not self._running or self._running[0][0] > until:
                return
            await self.finish_next()

    async def work_until(self, at: float) -> None:
        await self.lease()
        while self._running and self._running[0][0] <= at:
            await self.finish_next()
            await self.lease()
        await self.clock.advance(max(0.0, at - self.clock.now()))

    async def lease(self) -> list[LeasedJob]:
        """Every idle worker asks once."""
        taken: list[LeasedJob] = []
        for worker_id in list(self.idle):
            leased = await self.engine.poll(Poll(worker_id, PollId(f"poll-{next(self._polls)}"), 0))
            if leased is None:
                continue
            await self.engine.heartbeat(worker_id, [leased.ref])
            demand = self._submitted[leased.ref.job_id][1]
            self.idle.remove(worker_id)
            end = self.clock.now() + demand.seconds
            heappush(self._running, (end, next(self._polls), worker_id, leased, demand.seconds))
            taken.append(leased)
        return taken

    async def finish_next(self) -> None:
        at, _, worker_id, leased, seconds = heappop(self._running)
        await self.clock.advance(max(0.0, at - self.clock.now()))
        await self.engine.complete(Completion(leased.ref, JobResult(), seconds))
        submitted_at, demand = self._submitted[leased.ref.job_id]
        self.used[demand.tenant] += seconds  # type: ignore[assignment]
        self.done_after.setdefault(demand.tenant, []).append(self.clock.now() - submitted_at)
        self.idle.append(worker_id)

    def part_of(self, tenant: str) -> float:
        return self.used[tenant] / self.used.total()
