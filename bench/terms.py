"""Goal 13: leases on PostgreSQL once tenants have terms, beside the same leases without.

With terms, every transaction that begins leases holds one advisory lock until its commit, so that of two hubs neither
gives a tenant more than its cap, and one that ends a lease holds its tenant's row. Three stores on
one database stand for three hubs.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from bench._measure import Case, Entry, Plan, entry, in_turn, rate, ratio, ratio_range
from bench._places import Place
from bench._store import PROFILE, StoreRig, lane
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.stores.postgres import PostgresStore

_HUBS = 3
_CALLERS = 8
"""Of each hub, each with one job at a time."""
_TENANTS = 10
_WAITING = 2_000
_SECONDS = 10.0
_AT_ONCE = 64


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
        f"enqueue, lease and complete, {_HUBS} hubs, {how}: jobs/s with tenants' terms / without",
        ratio(found["terms"], found["plain"]),
        None,
        "ratio",
        range=ratio_range(found["terms"], found["plain"]),
        jobs_a_second=[rate(found["plain"]), rate(found["terms"])],
        callers=_HUBS * _CALLERS,
    )


async def _case(plan: Plan, url: str, stack: AsyncExitStack, *, has_terms: bool) -> Case:
    rigs = []
    for _ in range(_HUBS):
        store = PostgresStore(url)
        await store.open()
        stack.push_async_callback(store.close)
        rigs.append(StoreRig(store, time.perf_counter, _AT_ONCE))
    await rigs[0].add_profiles(PROFILE)
    class_key = await rigs[0].add_class("class")
    tenants = [TenantId(f"tenant-{number}") for number in range(_TENANTS)]
    lanes = [lane(class_key, tenant=tenant) for tenant in tenants]
    await rigs[0].fill(lanes, plan.size(_WAITING))
    if has_terms:
        for tenant in tenants:
            await rigs[0].store.shares.put_terms(TenantTerms(tenant, max_leased=_HUBS * _CALLERS))

    async def measure() -> float:
        """Jobs a second."""
        began = time.perf_counter()
        until = began + plan.seconds(_SECONDS)
        ended = sum(await asyncio.gather(*(_work(rig, until) for rig in rigs for _ in range(_CALLERS))))
        per_second = ended / (time.perf_counter() - began)
        await rigs[0].store.purge(Phase.COMPLETED, rigs[0].clock.now() + 60, ended)
        return per_second

    return measure


async def _work(rig: StoreRig, until: float) -> int:
    """How many jobs ended. For each an equal one comes, so that the same number waits."""
    ended = 0
    while time.perf_counter() < until:
        leased = await rig.lease_next(rig.offer())
        if leased is None:
            # Others have just taken what it looked at.
            await asyncio.sleep(0)
            continue
        await rig.finish(leased)
        await rig.enqueue(leased.dispatch.lane)
        ended += 1
    return ended
