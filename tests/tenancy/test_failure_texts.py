"""What a server said of a failure lies in the database of the job's tenant, and callers see all of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.engine.test_several_engines import SharedStore
from tests.stores._at_rest import in_files
from tests.tenancy._tenant_services import ACME, Fleet, one_fleet

from comfyfleet.model.calls import FailureReport, LeasedJob
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.fact import Event, Fact, FactKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId
from comfyfleet.model.tenant import TenantState
from comfyfleet.ports import RecordQuery
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.tenancy.claims import claim
from comfyfleet.tenancy.relocation import TenantRelocation
from comfyfleet.tenancy.tenants import REMEMBER_S
from comfyfleet.testing.time import ManualClock

SECRET = "a castle for aunt Mathilde"


def said(kind: FailureKind = FailureKind.NODE_ERROR) -> Failure:
    return Failure(
        kind,
        f"cannot paint {SECRET}",
        node_id="3",
        node_type=f"Sampler of {SECRET}",
        exception_type="ValueError",
        traceback=(f"prompt = '{SECRET}'",),
        node_errors={"3": {"errors": [{"details": SECRET}]}},
    )


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def fleet(clock: ManualClock, tmp_path: Path) -> AsyncIterator[Fleet]:
    folder = tmp_path / "centre"
    folder.mkdir()
    store = SqliteStore(folder / "store.db", clock)
    async with one_fleet(store, clock, tmp_path, max_attempts=2, retry_base_s=0.0) as fleet:
        yield fleet


async def failed_twice(fleet: Fleet) -> tuple[JobId, list[Event]]:
    """A job that was tried again once, and what was published of it."""
    heard: list[Event] = []
    fleet.engine.bus.listen(heard.append)
    await fleet.tenant(granted=100)
    await fleet.worker()
    job_id = await fleet.submit()
    for _ in range(2):
        await fleet.engine.fail(FailureReport((await taken(fleet)).ref, said()))
    return job_id, heard


async def taken(fleet: Fleet) -> LeasedJob:
    async with asyncio.timeout(60):
        while (leased := await fleet.poll()) is None:
            assert isinstance(fleet.clock, ManualClock)
            await fleet.clock.advance(90)
            await fleet.worker()
    await fleet.engine.heartbeat(leased.worker_id, [leased.ref])
    return leased


async def test_the_central_store_holds_nothing_of_what_a_server_said(fleet: Fleet, tmp_path: Path) -> None:
    await failed_twice(fleet)
    await fleet.engine.close()
    await fleet.tenant_services.close()
    assert SECRET.encode() not in in_files(tmp_path / "centre")
    assert SECRET.encode() in in_files(tmp_path), "the tenant's own database has it"


async def test_callers_see_all_of_it_in_the_job_its_attempts_and_its_facts(fleet: Fleet) -> None:
    job_id, heard = await failed_twice(fleet)
    view = await fleet.engine.get(job_id)
    assert view.dispatch.phase is Phase.FAILED and view.job.failure == said()
    assert [attempt.failure for attempt in view.attempts] == [said(), said()]
    facts = [fact async for fact in fleet.engine.watch(job_id) if isinstance(fact, Fact)]
    telling = [fact for fact in facts if fact.kind in (FactKind.RETRYING, FactKind.FAILED)]
    assert [fact.data and fact.data["message"] for fact in telling] == [said().message] * 2
    assert all(fact.data and fact.data["node_id"] == "3" for fact in telling)
    assert [each for each in heard if isinstance(each, Fact) and each in telling] == telling
    assert "Mathilde" in (await fleet.engine.explain(job_id)).summary
    page = await fleet.engine.store.records.listing(RecordQuery(tenant=ACME, phase=Phase.FAILED, limit=9))
    assert [job.failure for job in page] == [said()]


async def test_the_tenants_record_is_whole_for_when_the_store_has_forgotten_the_job(fleet: Fleet) -> None:
    job_id, _ = await failed_twice(fleet)
    home = await fleet.tenant_services.directory.locate(ACME)
    assert home is not None
    kept = await home.database.get(job_id)
    assert kept is not None and kept.failure == said()
    assert kept == (await fleet.engine.get(job_id)).job


async def test_what_was_said_of_a_job_that_waits_for_its_next_attempt_is_seen_too(fleet: Fleet) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    job_id = await fleet.submit()
    await fleet.engine.fail(FailureReport((await fleet.take()).ref, said()))
    view = await fleet.engine.get(job_id)
    assert view.dispatch.phase is Phase.QUEUED and view.job.failure == said()


async def test_what_was_said_goes_with_the_job_when_it_is_forgotten(fleet: Fleet, clock: ManualClock) -> None:
    job_id, _ = await failed_twice(fleet)
    home = await fleet.tenant_services.directory.locate(ACME)
    assert home is not None
    assert len(await home.database.failures_of([job_id])) == 2
    assert await home.database.forget_jobs([job_id], clock.now() + 1) == 1
    assert await home.database.failures_of([job_id]) == {}


@pytest.mark.parametrize("is_tidied", [False, True])
async def test_a_hub_that_missed_a_move_keeps_what_was_said_where_the_tenant_is_now(
    tmp_path: Path, is_tidied: bool
) -> None:
    clock = ManualClock()
    store = SharedStore(clock)
    databases = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    async with Fleet(store, clock, databases) as relocation, Fleet(store, clock, databases, seed=1) as stale:
        await stale.tenant(granted=100)
        await stale.worker()
        job_id = await stale.submit()
        leased = await stale.take()
        await stale.tenant_services.tenants.get(ACME)
        await _moved(relocation, clock, is_tidied=is_tidied)
        if not is_tidied:
            with pytest.raises(Fault, match="moved"):
                await stale.engine.fail(FailureReport(leased.ref, said(FailureKind.INVALID_WORKFLOW)))
            await clock.advance(REMEMBER_S)
        await stale.engine.fail(FailureReport(leased.ref, said(FailureKind.INVALID_WORKFLOW)))
        for each in (relocation, stale):
            failure = (await each.engine.get(job_id)).job.failure
            assert failure == said(FailureKind.INVALID_WORKFLOW)
        home = await relocation.tenant_services.directory.locate(ACME)
        assert home is not None and home.tenant.database == "second"
        assert len(await home.database.failures_of([job_id])) == 1


async def test_what_was_said_moves_with_the_tenant(fleet: Fleet, clock: ManualClock) -> None:
    job_id, _ = await failed_twice(fleet)
    before = await fleet.engine.get(job_id)
    await _moved(fleet, clock)
    assert (await fleet.tenant_services.tenants.get_uncached(ACME)).database == "second"  # type: ignore[union-attr]
    assert await fleet.engine.get(job_id) == before


async def _moved(fleet: Fleet, clock: ManualClock, *, is_tidied: bool = True) -> None:
    async def at_once(_: float) -> None:
        """Nobody else is to hear of it first."""

    tenant_services = fleet.tenant_services
    begun = await tenant_services.tenants.change(
        ACME,
        lambda tenant: msgspec.structs.replace(
            tenant, state=TenantState.MOVING, moving_to="second", moving_since=clock.now()
        ),
    )
    mine = await claim(fleet.central.documents, clock, ACME)
    assert mine is not None
    moved = await TenantRelocation(tenant_services.tenants, tenant_services.databases, at_once).move(
        begun, mine
    )
    if is_tidied:
        await TenantRelocation(tenant_services.tenants, tenant_services.databases, at_once).clean_up(
            moved, mine
        )
