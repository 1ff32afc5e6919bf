"""A tenant whose database is away is left alone for a moment, and keeps nobody else waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tenancy._tenant_services import ACME, BORG, one_fleet

from comfyfleet.model.dispatch import Phase, Readiness
from comfyfleet.model.errors import Fault
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.policy import tenants as policy
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.tenants import Tenants
from comfyfleet.tenancy.terms import FairShareSync
from comfyfleet.testing.time import ManualClock


async def test_a_job_whose_database_is_away_is_given_back_once_and_leased_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        await fleet.tenant(granted=100)
        await fleet.tenant(BORG, granted=100, database="second")
        await fleet.worker()
        theirs = await fleet.submit()
        home = await fleet.tenant_services.directory.locate(ACME)
        assert home is not None
        looks = 0

        async def away(*_: object) -> None:
            nonlocal looks
            looks += 1
            raise Fault("the database is away")

        with monkeypatch.context() as patch:
            patch.setattr(home.database, "leasable", away)
            assert [await fleet.poll() for _ in range(5)] == [None] * 5
            assert looks == 1
            other = await fleet.submit(BORG)
            assert (await fleet.take()).job_id == other
            await clock.advance(3.5)
            assert await fleet.poll() is None
            assert looks == 2
        await clock.advance(3.5)
        assert (await fleet.take()).job_id == theirs


async def test_a_moment_never_shortens_what_another_hub_has_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Suspended there, and still remembered as active here."""
    clock = ManualClock()
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        await fleet.tenant(granted=100)
        await fleet.worker()
        await fleet.submit()
        home = await fleet.tenant_services.directory.locate(ACME)
        assert home is not None

        async def suspended_meanwhile(*_: object) -> None:
            elsewhere = Tenants(fleet.central.documents, clock, is_shared=True)
            there = await elsewhere.change(ACME, policy.suspended)
            await FairShareSync(fleet.central.fair_share).put(there)
            raise Fault("the database is away")

        monkeypatch.setattr(home.database, "leasable", suspended_meanwhile)
        assert await fleet.poll() is None
        assert await fleet.central.fair_share.terms() == [TenantTerms(ACME, held_until=float("inf"))]


@pytest.mark.parametrize(
    ("asked", "phase", "standing"),
    [
        ("cancel", Phase.CANCELLED, Readiness.IN_LANE),
        ("pause", Phase.QUEUED, Readiness.PAUSED),
        ("retry", Phase.QUEUED, Readiness.IN_LANE),
    ],
)
async def test_what_is_asked_for_while_the_database_is_looked_at_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, phase: Phase, standing: Readiness
) -> None:
    """The job is leased for that moment, so its worker is to confirm; and no worker ever hears of it."""
    clock = ManualClock()
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        await fleet.tenant(granted=100)
        await fleet.worker()
        job_id = await fleet.submit()
        home = await fleet.tenant_services.directory.locate(ACME)
        assert home is not None

        async def away(*_: object) -> None:
            await getattr(fleet.engine, asked)(job_id)
            raise Fault("the database is away")

        with monkeypatch.context() as patch:
            patch.setattr(home.database, "leasable", away)
            assert await fleet.poll() is None
        dispatch = await fleet.central.load(job_id)
        assert dispatch is not None and dispatch.lease is None
        assert (dispatch.phase, dispatch.standing) == (phase, standing)
        assert (dispatch.pause_requested_at, dispatch.retry_requested_at) == (None, None)
        await clock.advance(3.5)
        if asked == "retry":
            assert (await fleet.take()).job_id == job_id
        else:
            assert await fleet.poll() is None
