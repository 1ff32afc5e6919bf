"""Goal 13: jobs on PostgreSQL once tenants have terms, beside the same jobs without.

With terms, every transaction that begins leases holds one advisory lock until its commit, so that of two hubs neither
gives a tenant more than its cap, and one that ends a lease holds its tenant's row. Three engines on one database, each
with workers that poll, complete and submit an equal job, stand for three hubs.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from itertools import count

from bench._content import check_content
from bench._measure import Case, Entry, Plan, entry, in_turn, rate, ratio, ratio_range
from bench._places import Place
from bench.pooling import twelve_nodes
from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, Poll, RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import PollId, TenantId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.model.workflow import read_needs
from comfyfleet.stores.postgres import PostgresStore

_HUBS = 3
_WORKERS = 8
"""Of each hub, each with one job at a time."""
_TENANTS = 10
_WAITING = 2_000
_SECONDS = 10.0
_AT_ONCE = 64
_WAIT_S = 1.0


async def leases_with_terms(plan: Plan, kind: str) -> list[Entry]:
    return [
        await _compare(plan, kind, "13a", "every commit on the disk", is_durable=True),
        await _compare(plan, kind, "13b", "fsync off", is_durable=False),
    ]


async def _compare(plan: Plan, kind: str, goal: str, how: str, *, is_durable: bool) -> Entry:
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(Place(kind))
        cases = {
            name: await _case(plan, place.database(is_durable=is_durable), stack, has_terms=name == "terms")
            for name in ("plain", "terms")
        }
        await in_turn(cases, 1)
        found = await in_turn(cases, plan.rounds)
    return entry(
        goal,
        kind,
        f"submit, poll and complete, {_HUBS} hubs, {how}: jobs/s with tenants' terms / without",
        ratio(found["terms"], found["plain"]),
        None,
        "ratio",
        range=ratio_range(found["terms"], found["plain"]),
        jobs_a_second=[rate(found["plain"]), rate(found["terms"])],
        workers=_HUBS * _WORKERS,
    )


async def _case(plan: Plan, url: str, stack: AsyncExitStack, *, has_terms: bool) -> Case:
    engines = [await stack.enter_async_context(Engine(await _store(url, stack))) for _ in range(_HUBS)]
    tenants = [TenantId(f"tenant-{number}") for number in range(_TENANTS)]
    jobs = _Jobs()
    needs = read_needs(twelve_nodes(1))
    service = Service("comfyui", models=needs.models, node_classes=needs.node_classes)
    workers: list[tuple[Engine, WorkerId]] = []
    for hub, engine in enumerate(engines):
        for number in range(_WORKERS):
            worker_id = WorkerId(f"worker-{hub}-{number}")
            await engine.register(RegisterWorker(worker_id, Capabilities((service,))))
            workers.append((engine, worker_id))
    todo = [tenants[number % _TENANTS] for number in range(plan.size(_WAITING))]
    while todo:
        await asyncio.gather(*(jobs.submit(engines[0], tenant) for tenant in todo[:_AT_ONCE]))
        del todo[:_AT_ONCE]
    if has_terms:
        for tenant in tenants:
            terms = TenantTerms(tenant, max_leased=_HUBS * _WORKERS)
            await engines[0].store.fair_share.put_terms(terms)

    async def measure() -> float:
        """Jobs a second."""
        began = time.perf_counter()
        until = began + plan.seconds(_SECONDS)
        ended = sum(await asyncio.gather(*(jobs.work(*each, until) for each in workers)))
        per_second = ended / (time.perf_counter() - began)
        jobs.check()
        await engines[0].store.purge(Phase.COMPLETED, engines[0].now() + 60, ended)
        return per_second

    return measure


async def _store(url: str, stack: AsyncExitStack) -> PostgresStore:
    store = PostgresStore(url)
    await store.open()
    stack.push_async_callback(store.close)
    return store


class _Jobs:
    """Every job has a seed of its own, which the worker must get."""

    def __init__(self) -> None:
        self._seeds = count(1)
        self._asked: dict[str, int] = {}
        self._ran: list[tuple[str, int]] = []

    async def submit(self, engine: Engine, tenant: TenantId) -> None:
        seed = next(self._seeds)
        submitted = await engine.submit(Submission(twelve_nodes(seed), tenant=tenant))
        self._asked[submitted.job_id] = seed

    async def work(self, engine: Engine, worker_id: WorkerId, until: float) -> int:
        """How many jobs ended. For each an equal one comes, so that the same number waits."""
        ended = 0
        while time.perf_counter() < until:
            leased = await engine.poll(Poll(worker_id, PollId(f"{worker_id} {next(self._seeds)}"), _WAIT_S))
            if leased is None:
                continue
            self._ran.append((leased.ref.job_id, leased.workflow["5"]["inputs"]["seed"]))
            await engine.complete(Completion(leased.ref))
            await self.submit(engine, leased.tenant)
            ended += 1
        return ended

    def check(self) -> None:
        check_content(self._asked, self._ran)
        self._ran.clear()
