"""Leases on PostgreSQL where tenants have terms: in few steps under the lock, and yet as if each had come alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import psycopg
import pytest
from tests.servers.postgres_database import emptied_database
from tests.stores._postgres import Jobs, fill_table

from comfyfleet.model.dispatch import LeaseRef, WriteResult
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.ports import Store
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.postgres import PostgresStore, fair_share, lanes
from comfyfleet.testing.contract.store_bench import completion, release
from comfyfleet.testing.leases import lease_next
from comfyfleet.testing.time import ManualClock

ANN, BOB, EVE = TENANTS = (TenantId("ann"), TenantId("bob"), TenantId("eve"))


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return emptied_database(request.config)


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url, clock_for_tests=ManualClock())
    await store.open()
    await fill_table(store)
    yield store
    await store.close()


async def test_a_lease_ends_while_somebody_else_leases(url: str, store: PostgresStore) -> None:
    jobs = Jobs()
    await store.fair_share.put_terms(TenantTerms(ANN, max_leased=2))
    await jobs.enqueue(store, tenant=ANN)
    leased = await lease_next(store, jobs.offer())
    assert leased is not None
    async with await psycopg.AsyncConnection.connect(url) as other, asyncio.timeout(60):
        await other.execute(fair_share.HOLD)
        assert await store.write(completion(leased.dispatch.lease_ref(), used_s=3.0)) is not None
    share = await store.fair_share.get(ANN)
    assert (share.leased, share.virtual_time, share.credit) == (0, 10.0, 7.0)


@pytest.mark.parametrize("seed", range(4))
async def test_leases_in_turn_are_those_of_the_memory_store(
    store: PostgresStore, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_EMPTY", 1)
    chance, memory = random.Random(seed), MemoryStore(ManualClock())
    await fill_table(memory)
    both: tuple[Store, Store] = (memory, store)
    makers = (Jobs(), Jobs())
    refs: list[LeaseRef] = []

    async def take(count: int) -> list[WriteResult | None]:
        expected = [await lease_next(memory, makers[0].offer()) for _ in range(count)]
        assert [await lease_next(store, makers[1].offer()) for _ in range(count)] == expected
        return expected

    for _ in range(60):
        match chance.choice(["enqueue", "lease", "lease", "end", "return", "terms"]):
            case "enqueue":
                for _ in range(chance.randint(1, 12)):
                    name, priority = f"hash-{chance.randrange(20)}", chance.choice([0, 0, 0, 1])
                    tenant = chance.choice(TENANTS)
                    for target, jobs in zip(both, makers, strict=True):
                        await jobs.enqueue(target, name, priority=priority, tenant=tenant)
            case "lease":
                taken = await take(chance.randint(1, 20))
                refs += [each.dispatch.lease_ref() for each in taken if each is not None]
            case "end" | "return" as how:
                for _ in range(min(len(refs), chance.randint(1, 6))):
                    ref = refs.pop(chance.randrange(len(refs)))
                    write = (
                        completion(ref, chance.choice([None, 0.1, 3.0, 70.0]))
                        if how == "end"
                        else release(ref)
                    )
                    assert await store.write(write) == await memory.write(write)
            case "terms":
                terms = TenantTerms(
                    chance.choice(TENANTS),
                    chance.choice([0.3, 1.0, 7.0]),
                    chance.choice([None, 2, 5]),
                    chance.choice([None, None, float("inf")]),
                )
                for target in both:
                    await target.fair_share.put_terms(terms)
        for tenant in TENANTS:
            assert await store.fair_share.get(tenant) == await memory.fair_share.get(tenant)


async def test_nobody_is_measured_by_a_tenant_whose_lane_stands_empty(store: PostgresStore) -> None:
    """Eve had a job and has none any more; her lane is kept for her next one."""
    jobs = Jobs()
    await store.fair_share.put_terms(TenantTerms(ANN, held_until=float("inf")))
    await jobs.enqueue(store, tenant=EVE)
    leased = await lease_next(store, jobs.offer())
    assert leased is not None
    assert await store.write(completion(leased.dispatch.lease_ref(), used_s=10.0)) is not None
    await store.fair_share.charge(BOB, 50.0)
    for _ in range(2):
        await jobs.enqueue(store, tenant=ANN)
    before = (await store.fair_share.get(ANN)).virtual_time
    await store.fair_share.charge(BOB, 50.0)
    await store.fair_share.put_terms(TenantTerms(ANN))
    assert None not in [await lease_next(store, jobs.offer()) for _ in range(2)]
    assert (before, (await store.fair_share.get(ANN)).virtual_time) == (50.0, 120.0)


async def test_leases_step_over_what_others_hold(url: str, store: PostgresStore) -> None:
    jobs = Jobs()
    await store.fair_share.put_terms(TenantTerms(ANN))
    ids = [(await jobs.enqueue(store, tenant=tenant)).job_id for _ in range(4) for tenant in (ANN, BOB)]
    async with await psycopg.AsyncConnection.connect(url) as other:
        await other.execute("SELECT 1 FROM comfyfleet.dispatches WHERE job_id = %s FOR UPDATE", (ids[3],))
        async with asyncio.timeout(60):
            taken = [await lease_next(store, jobs.offer()) for _ in range(8)]
    found = [each.dispatch.job_id for each in taken if each is not None]
    assert sorted(found) == sorted(set(ids) - {ids[3]}) and taken[-1] is None
    assert [(await store.fair_share.get(tenant)).leased for tenant in (ANN, BOB)] == [4, 3]


async def test_all_that_leases_ends_and_sets_terms_at_once_never_waits_in_a_circle(url: str) -> None:
    stores = PostgresStore(url, connections=6), PostgresStore(url, connections=6)
    for store in stores:
        await store.open()
    await fill_table(stores[0])
    jobs, chance, total, done = Jobs(), random.Random(1), 150, 0
    for tenant in TENANTS:
        await stores[0].fair_share.put_terms(TenantTerms(tenant, max_leased=4))
    waiting = [(await jobs.enqueue(stores[0], tenant=TENANTS[n % 3])).job_id for n in range(total)]

    async def work(store: PostgresStore) -> None:
        nonlocal done
        held: WriteResult | None = None
        while done < total:
            if held is None:
                if chance.random() < 0.5:
                    held = await store.lease(chance.choice(waiting), jobs.offer())
                else:
                    held = await lease_next(store, jobs.offer())
                await asyncio.sleep(0)
                continue
            ref, held = held.dispatch.lease_ref(), None
            match chance.choice(["return", "end", "end", "next", "next"]):
                case "return":
                    assert await store.write(release(ref)) is not None
                case "end":
                    assert await store.write(completion(ref, used_s=2.0)) is not None
                    done += 1
                case _:
                    assert await store.write(completion(ref, used_s=2.0)) is not None
                    held = await lease_next(store, jobs.offer())
                    done += 1
        if held is not None:
            await store.write(release(held.dispatch.lease_ref()))

    async def change_terms() -> None:
        while done < total:
            await stores[1].fair_share.put_terms(
                TenantTerms(chance.choice(TENANTS), max_leased=chance.choice([3, 4]))
            )
            await asyncio.sleep(0.02)

    async with asyncio.timeout(120):
        await asyncio.gather(change_terms(), *(work(stores[number % 2]) for number in range(10)))
    for tenant in TENANTS:
        share = await stores[0].fair_share.get(tenant)
        assert (share.leased, share.waiting) == (0, 0)
    for store in stores:
        await store.close()
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as other:
        query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        found = await (await other.execute(query)).fetchone()
        assert found == (0,)
