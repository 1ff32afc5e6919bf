"""Tenants get the GPU-seconds their weights say, whatever their jobs take and however many of them wait."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
from tests.engine._rig import Rig
from tests.engine._shares import Demand, SharedFleet

from comfyfleet.model.calls import Release
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.time import ManualClock

ANN, BOB, EVE = TenantId("ann"), TenantId("bob"), TenantId("eve")


async def shares(demands: list[Demand], seconds: float, workers: int) -> SharedFleet:
    clock = ManualClock()
    async with SharedFleet(MemoryStore(clock), clock, workers) as fleet:
        for demand in demands:
            await fleet.store.fair_share.put_terms(TenantTerms(demand.tenant, demand.weight))
        await fleet.run(demands, seconds)
    return fleet


@pytest.mark.parametrize("workers", [1, 4])
async def test_equal_weights_give_equal_gpu_seconds_to_short_and_long_jobs(workers: int) -> None:
    fleet = await shares([Demand(ANN, 1.0), Demand(BOB, 30.0)], 1800.0, workers)
    assert fleet.part_of(ANN) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("heavy", [ANN, BOB])
async def test_three_times_the_weight_gives_three_times_the_gpu_seconds(
    workers: int, heavy: TenantId
) -> None:
    demands = [
        Demand(ANN, 1.0, 3.0 if heavy == ANN else 1.0),
        Demand(BOB, 30.0, 3.0 if heavy == BOB else 1.0),
    ]
    fleet = await shares(demands, 1800.0, workers)
    assert fleet.part_of(heavy) == pytest.approx(0.75, rel=0.05)


async def test_three_tenants_of_unequal_jobs_get_a_third_each() -> None:
    fleet = await shares([Demand(ANN, 1.0), Demand(BOB, 30.0), Demand(EVE, 10.0)], 1800.0, 3)
    for name in (ANN, BOB, EVE):
        assert fleet.part_of(name) == pytest.approx(1 / 3, rel=0.05)


async def test_without_terms_the_oldest_goes_first_whoever_it_is_of() -> None:
    clock = ManualClock()
    async with SharedFleet(MemoryStore(clock), clock, 1) as fleet:
        await fleet.run([Demand(ANN, 1.0), Demand(BOB, 30.0)], 600.0)
    assert fleet.part_of(BOB) > 0.9


async def bursts_beside(others: int) -> list[float]:
    """How long each job of a tenant takes, from its submit to its end, that submits ten at once, now and then. Of the
    fleet it has half beside another, and all of it alone."""
    clock = ManualClock()
    async with SharedFleet(MemoryStore(clock), clock, 2) as fleet:
        await fleet.store.fair_share.put_terms(TenantTerms(ANN))
        for _ in range(others):
            await fleet.submit(Demand(BOB, 1.0))
        await fleet.work_until(clock.now() + 30)
        for _ in range(2):
            for _ in range(10):
                await fleet.submit(Demand(ANN, 10.0))
            await fleet.work_until(clock.now() + 200)
    return fleet.done_after[ANN]


@pytest.mark.slow
async def test_a_quiet_tenant_beside_fifty_thousand_jobs_has_its_own_done_in_at_most_twice_the_time() -> None:
    alone, beside = await bursts_beside(0), await bursts_beside(50_000)
    assert len(alone) == len(beside) == 20
    assert sum(beside) <= 2 * sum(alone)
    # One job of the other tenant runs when they come.
    assert max(beside) <= 2 * max(alone) + 1.0


async def test_a_round_of_many_slots_gives_each_tenant_its_part_of_them() -> None:
    """All slots come at once: what the first jobs of a tenant cost counts before it gets the next."""
    async with Rig() as rig:
        await rig.worker("wide", slots=9)
        await rig.store.fair_share.put_terms(TenantTerms(BOB, weight=2.0))
        for tenant in (ANN, BOB):
            for _ in range(9):
                await rig.submit(tenant=tenant)
        await rig.engine.pause_queue()
        parked = [rig.park("wide") for _ in range(9)]
        await rig.settle()
        await rig.engine.pause_queue(False)
        await rig.settle()
        jobs = [await rig.engine.get(leased.ref.job_id) for task in parked if (leased := task.result())]
        assert Counter(job.job.tenant for job in jobs) == {ANN: 3, BOB: 6}


async def test_a_tenant_that_falls_below_its_cap_wakes_whoever_waits() -> None:
    async with Rig() as rig:
        for name in ("one", "two"):
            await rig.worker(name)
        await rig.store.fair_share.put_terms(TenantTerms(ANN, max_leased=1))
        for _ in range(2):
            await rig.submit(tenant=ANN)
        first = await rig.take("one")
        parked = rig.park("two")
        await rig.settle()
        assert not parked.done()
        # No time passes: nobody has found it by looking now and then.
        await rig.complete(first)
        await rig.settle()
        assert parked.done()


async def test_a_hold_that_ends_wakes_whoever_waits_by_itself() -> None:
    async with Rig(round_s=1e9) as rig:
        await rig.worker("one")
        await rig.store.fair_share.put_terms(TenantTerms(ANN, held_until=rig.clock.now() + 100))
        job_id = await rig.submit(tenant=ANN)
        parked = rig.park("one")
        await rig.clock.advance(99.5)
        assert not parked.done()
        explained = await rig.engine.explain(job_id)
        assert explained.summary.startswith("the tenant ann is held for another")
        await rig.clock.advance(0.5)
        assert parked.done()


async def test_an_explanation_says_that_the_tenant_has_all_it_may_have() -> None:
    async with Rig() as rig:
        for name in ("one", "two"):
            await rig.worker(name)
        await rig.store.fair_share.put_terms(TenantTerms(ANN, max_leased=1))
        await rig.submit(tenant=ANN)
        job_id = await rig.submit(tenant=ANN)
        await rig.take("one")
        explained = await rig.engine.explain(job_id)
        assert explained.summary == "the tenant ann has as many jobs running as it may: 1"
        await rig.store.fair_share.put_terms(TenantTerms(ANN, held_until=inf))
        explained = await rig.engine.explain(job_id)
        assert explained.summary == "the tenant ann is held: workers get none of its jobs"


async def test_a_tenant_is_charged_for_what_its_jobs_took_however_they_ended() -> None:
    async with Rig(charge_s=10.0, cooldown_s=1.0, worker_lost_s=1e9) as rig:
        await rig.worker("one")
        await rig.store.fair_share.put_terms(TenantTerms(ANN))

        async def charged() -> float:
            share = await rig.store.fair_share.get(ANN)
            return share.virtual_time - share.credit

        await rig.submit(tenant=ANN)
        leased = await rig.poll("one")
        assert leased is not None
        assert await charged() == 10.0
        # Nobody took it up: it goes back, and nothing was used.
        await rig.clock.advance(10.0)
        assert await charged() == 0.0
        leased = await rig.take("one")
        await rig.clock.advance(4.0)
        await rig.fail(leased)
        assert await charged() == 4.0
        await rig.clock.advance(60.0)
        leased = await rig.take("one")
        await rig.complete(leased, seconds=25.0)
        assert await charged() == 29.0
        await rig.submit(tenant=ANN)
        leased = await rig.take("one")
        # The estimate is what the workflow was seen to take.
        assert await charged() == 54.0
        await rig.clock.advance(1.0)
        await rig.engine.cancel(leased.ref.job_id)
        await rig.engine.release(Release(leased.ref, "cancelled"))
        assert await charged() == 30.0
