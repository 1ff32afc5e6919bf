"""Goal 14: how long a caller waits for its entry in the audit log when three hubs write to one Redis, beside one hub.

Entries of one log stand in a chain. Of hubs that write at the same moment one alone gets the next place; the others
read what it wrote and follow. Three connections to one Redis stand for three hubs.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack

from bench._measure import Case, Entry, Plan, entry, in_turn, ratio, ratio_range, rounded
from bench._places import Place
from comfyfleet.engine.system import SystemClock
from comfyfleet.hub.audit.chain import HashChain
from comfyfleet.hub.audit.log import COLLECTIONS
from comfyfleet.model.access import AuditEntry, Role
from comfyfleet.stores.redis.store import RedisStore

_HUBS = 3
_ENTRIES_A_SECOND = 150
"""Of all hubs together, in both cases."""
_SECONDS = 10.0


async def audit_of_several_hubs(plan: Plan, kind: str) -> list[Entry]:
    waits: dict[str, list[float]] = {"one": [], "several": []}
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(Place(kind))
        cases = {
            "one": await _case(plan, place.redis_server().url, stack, 1, waits["one"]),
            "several": await _case(plan, place.redis_server().url, stack, _HUBS, waits["several"]),
        }
        await in_turn(cases, 1)
        for each in waits.values():
            each.clear()
        found = await in_turn(cases, plan.rounds)
    one, several = (sorted(waits[name]) for name in ("one", "several"))
    p50_ms = [_milliseconds(each, 0.5) for each in (one, several)]
    p99_ms = [_milliseconds(each, 0.99) for each in (one, several)]
    what = f"audit entry, {_ENTRIES_A_SECOND} a second, {_HUBS} hubs"
    return [
        entry(
            "14a",
            kind,
            f"{what}: p99 / that of one hub",
            ratio(found["several"], found["one"]),
            None,
            "ratio",
            range=ratio_range(found["several"], found["one"]),
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            entries=len(several),
        ),
        entry("14b", kind, f"{what}: p99", p99_ms[1], None, "ms", p50_ms=p50_ms[1]),
    ]


async def _case(plan: Plan, url: str, stack: AsyncExitStack, hubs: int, waits: list[float]) -> Case:
    clock, chance = SystemClock(), random.Random(1)
    chains = []
    for _ in range(hubs):
        store = RedisStore(url)
        await store.open()
        stack.push_async_callback(store.close)
        chains.append(HashChain(store.documents, clock, COLLECTIONS["jobs"]))

    async def wait_for(chain: HashChain) -> float:
        began = time.perf_counter()
        await chain.append(
            AuditEntry(clock.now(), "k_bench", Role.TENANT, "submit", "a job", address="127.0.0.1")
        )
        return time.perf_counter() - began

    async def measure() -> float:
        """p99 in seconds. Entries come at random moments and wait for no answer to another."""
        under_way: list[asyncio.Task[float]] = []
        due, until = 0.0, plan.seconds(_SECONDS)
        began = time.perf_counter()
        while (due := due + chance.expovariate(_ENTRIES_A_SECOND)) < until:
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            under_way.append(asyncio.create_task(wait_for(chance.choice(chains))))
        found = await asyncio.gather(*under_way)
        waits.extend(found)
        return _at(sorted(found), 0.99)

    return measure


def _at(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def _milliseconds(ordered: list[float], part: float) -> float:
    return rounded(_at(ordered, part) * 1e3)
