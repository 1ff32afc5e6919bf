"""A waiting job that no known worker can run fails after a while, says what is missing, and costs nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.engine._rig import graph
from tests.engine.test_several_engines import SharedStore
from tests.tenancy._tenant_services import ACME, Fleet, one_fleet

from comfyfleet.hub.tenants.maintenance import UnrunnableJobTimeout
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import DEFAULT_TENANT, JobId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.ledger import Account
from comfyfleet.model.requirement import Requirements
from comfyfleet.policy import tenants as policy
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.time import ManualClock

HOUR = 3600.0
MINUTE = 60.0
OTHER = WorkerId("other")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def fleet(clock: ManualClock, tmp_path: Path) -> AsyncIterator[Fleet]:
    """Its jobs wait for 24 minutes, not hours: every second of the clock is work for an engine."""
    rules = {"keep_offline_workers_s": 1e9, "unrunnable_after": 24 * MINUTE}
    async with one_fleet(MemoryStore(clock), clock, tmp_path, **rules) as fleet:
        await fleet.tenant(granted=100)
        yield fleet


@pytest.fixture
async def patient_fleet(clock: ManualClock, tmp_path: Path) -> AsyncIterator[Fleet]:
    """With the term that a hub has by default."""
    async with one_fleet(MemoryStore(clock), clock, tmp_path, keep_offline_workers_s=1e9) as fleet:
        await fleet.tenant(granted=100)
        yield fleet


def looking(fleet: Fleet) -> UnrunnableJobTimeout:
    """As a hub that has just been started."""
    return UnrunnableJobTimeout(
        fleet.engine, fleet.tenant_services.tenants, fleet.central.documents, fleet.clock
    )


async def phase(fleet: Fleet, job_id: JobId) -> Phase:
    return (await fleet.engine.get(job_id)).dispatch.phase


async def test_it_fails_after_a_day_with_what_is_missing_and_its_hold_is_released(
    patient_fleet: Fleet, clock: ManualClock
) -> None:
    fleet = patient_fleet
    await fleet.worker(OTHER, "Upscaler")
    job_id = await fleet.submit()
    await looking(fleet).run_once()
    await clock.advance(23 * HOUR)
    assert await looking(fleet).run_once() == 0
    assert await fleet.account() == Account(ACME, 100, held=10)
    await clock.advance(HOUR)
    assert await looking(fleet).run_once() == 1, "also where hubs were started anew meanwhile"
    failure = (await fleet.engine.get(job_id)).job.failure
    assert failure is not None and failure.kind is FailureKind.UNRUNNABLE
    assert "24 h" in failure.message and "KSampler" in failure.message and "retry" in failure.message
    assert await fleet.account() == Account(ACME, 100)
    assert await looking(fleet).run_once() == 0
    await fleet.check()


async def test_a_worker_that_is_known_and_away_keeps_it_waiting(fleet: Fleet, clock: ManualClock) -> None:
    worker = await fleet.worker()
    await fleet.engine.unregister(worker, "gone home")
    job_id = await fleet.submit()
    await looking(fleet).run_once()
    await clock.advance(100 * MINUTE)
    await looking(fleet).run_once()
    assert await phase(fleet, job_id) is Phase.QUEUED


async def test_the_time_begins_anew_when_somebody_could_run_it_in_between(
    fleet: Fleet, clock: ManualClock
) -> None:
    job_id = await fleet.submit()
    await looking(fleet).run_once()
    await clock.advance(20 * MINUTE)
    await fleet.worker()
    await looking(fleet).run_once()
    await fleet.engine.remove_worker(WorkerId("gpu"))
    await looking(fleet).run_once()
    await clock.advance(20 * MINUTE)
    await looking(fleet).run_once()
    assert await phase(fleet, job_id) is Phase.QUEUED


async def test_a_tenant_has_a_term_of_its_own_and_the_default_one_goes_by_the_hubs_setting(
    clock: ManualClock, tmp_path: Path
) -> None:
    async with one_fleet(MemoryStore(clock), clock, tmp_path, unrunnable_after=2 * HOUR) as fleet:
        await fleet.tenant(granted=100)
        await fleet.tenant_services.tenants.change(
            ACME, lambda found: policy.changed(found, {"unrunnable_after": HOUR})
        )
        its, nobodys = await fleet.submit(), await fleet.submit(DEFAULT_TENANT)
        await looking(fleet).run_once()
        await clock.advance(HOUR)
        await looking(fleet).run_once()
        assert [await phase(fleet, each) for each in (its, nobodys)] == [Phase.FAILED, Phase.QUEUED]
        await clock.advance(HOUR)
        await looking(fleet).run_once()
        assert await phase(fleet, nobodys) is Phase.FAILED


async def test_a_retry_by_hand_waits_anew(fleet: Fleet, clock: ManualClock) -> None:
    job_id = await fleet.submit()
    await looking(fleet).run_once()
    await clock.advance(24 * MINUTE)
    assert await looking(fleet).run_once() == 1
    # Another of the same class keeps the class in the table.
    other = await fleet.submit()
    await looking(fleet).run_once()
    await clock.advance(MINUTE)
    await fleet.engine.retry(job_id)
    await clock.advance(23 * MINUTE)
    await looking(fleet).run_once()
    assert [await phase(fleet, each) for each in (job_id, other)] == [Phase.QUEUED, Phase.FAILED]
    await clock.advance(MINUTE)
    await looking(fleet).run_once()
    assert await phase(fleet, job_id) is Phase.FAILED


async def test_a_job_that_waits_for_something_else_than_a_worker_waits_on(
    fleet: Fleet, clock: ManualClock
) -> None:
    first = await fleet.submit()
    await fleet.engine.pause(first)
    held = await fleet.submit(after=(first,))
    later = await fleet.submit(not_before=clock.now() + 30 * MINUTE)
    await looking(fleet).run_once()
    await clock.advance(25 * MINUTE)
    assert await looking(fleet).run_once() == 0
    assert [await phase(fleet, each) for each in (first, held, later)] == [Phase.QUEUED] * 3


async def test_two_hubs_end_it_once(tmp_path: Path) -> None:
    clock = ManualClock()
    store = SharedStore(clock)
    databases = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    after = 24 * MINUTE
    async with (
        Fleet(store, clock, databases, unrunnable_after=after) as one,
        Fleet(store, clock, databases, seed=1, unrunnable_after=after) as other,
    ):
        await one.tenant(granted=100)
        jobs = [await one.submit() for _ in range(3)]
        needs = Requirements(node_classes=("Nobody",))
        jobs.append((await other.engine.submit(Submission(graph(), tenant=ACME, requirements=needs))).job_id)
        await looking(one).run_once()
        await looking(other).run_once()
        await clock.advance(24 * MINUTE)
        assert await looking(other).run_once() + await looking(one).run_once() == 4
        assert [await phase(one, each) for each in jobs] == [Phase.FAILED] * 4
        assert await one.account() == Account(ACME, 100)
        await one.check()
