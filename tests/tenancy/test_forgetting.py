"""What is old in tenants' databases goes after the store has forgotten it, and the book of credits never does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.tenancy._tenant_services import ACME, BORG, Fleet, one_fleet

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId
from comfyfleet.model.ledger import Account
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy.rules import DAY_S, Retention
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.deletion import TenantRetention
from comfyfleet.testing.time import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def fleet(clock: ManualClock, tmp_path: Path) -> AsyncIterator[Fleet]:
    # Days pass here: the engine sweeps when it is told to.
    async with one_fleet(MemoryStore(clock), clock, tmp_path, sweep_s=1e9, round_s=1e9) as fleet:
        await fleet.tenant(granted=100)
        await fleet.worker()
        yield fleet


async def database(fleet: Fleet) -> TenantDatabase:
    home = await fleet.tenant_services.directory.locate(ACME)
    assert home is not None
    return home.database


async def three_ends(fleet: Fleet) -> dict[Phase, JobId]:
    ended = {Phase.COMPLETED: await fleet.submit(reference="mine")}
    await fleet.complete(await fleet.take())
    ended[Phase.FAILED] = await fleet.submit()
    await fleet.fail(await fleet.take())
    ended[Phase.CANCELLED] = await fleet.submit()
    await fleet.engine.cancel(ended[Phase.CANCELLED])
    return ended


async def kept(fleet: Fleet, ended: dict[Phase, JobId]) -> set[Phase]:
    found = await (await database(fleet)).get_many(list(ended.values()))
    return {phase for phase, job_id in ended.items() if job_id in found}


async def test_jobs_go_by_their_phase_when_the_store_has_forgotten_them(
    fleet: Fleet, clock: ManualClock
) -> None:
    ended = await three_ends(fleet)
    waiting = await fleet.submit()
    await clock.advance(1.1 * DAY_S)
    await fleet.tenant_services.retention.clean_up()
    assert len(await kept(fleet, ended)) == 3, "the store still has them"
    await fleet.engine.sweep()
    await fleet.tenant_services.retention.clean_up()
    assert await kept(fleet, ended) == {Phase.FAILED}
    assert await (await database(fleet)).by_reference(ACME, "mine") is None
    again = await fleet.submit(reference="mine")
    assert again != ended[Phase.COMPLETED], "a reference is good for another job then"
    await clock.advance(6 * DAY_S)
    await fleet.engine.sweep()
    await fleet.tenant_services.retention.clean_up()
    assert await kept(fleet, ended) == set()
    assert await (await database(fleet)).get(waiting) is not None
    assert await fleet.account() == Account(ACME, 90, held=20)
    await fleet.check()


async def test_a_job_that_the_store_still_has_stays(fleet: Fleet, clock: ManualClock) -> None:
    ended = await three_ends(fleet)
    # Nobody sweeps: the engine's own time is longer than this.
    short = Retention(completed_days=1 / 24, cancelled_days=1 / 24, failed_days=1 / 24)
    forgetting = TenantRetention(fleet.central, fleet.tenant_services.directory, short)
    await clock.advance(7200)
    await forgetting.clean_up()
    assert len(await kept(fleet, ended)) == 3
    for phase in ended:
        assert await fleet.central.purge(phase, clock.now(), 10) == 1
    await forgetting.clean_up()
    assert await kept(fleet, ended) == set()


async def test_nothing_goes_while_the_book_of_its_tenant_is_closed(fleet: Fleet, clock: ManualClock) -> None:
    ended = await three_ends(fleet)
    await clock.advance(8 * DAY_S)
    await fleet.engine.sweep()
    there = await database(fleet)
    assert await there.freeze_account(ACME, 1)
    await fleet.tenant_services.retention.clean_up()
    assert len(await kept(fleet, ended)) == 3
    assert await there.unfreeze_account(ACME, 1)
    await fleet.tenant_services.retention.clean_up()
    assert await kept(fleet, ended) == set()


async def test_events_that_were_taken_in_go_and_settle_nothing_twice(
    fleet: Fleet, clock: ManualClock
) -> None:
    await three_ends(fleet)
    await clock.advance(29 * DAY_S)
    assert await (await database(fleet)).forget_events(clock.now() - 30 * DAY_S, 10) == 0
    await clock.advance(1.1 * DAY_S)
    await fleet.tenant_services.retention.clean_up()
    assert await (await database(fleet)).forget_events(clock.now(), 10) == 0, "they are gone"
    await fleet.check()


async def test_a_database_that_is_away_keeps_no_other_full(
    fleet: Fleet, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.tenant_services.tenants.create(Tenant(BORG, "nowhere", clock.now()))
    ended = await three_ends(fleet)
    await clock.advance(8 * DAY_S)
    await fleet.engine.sweep()
    await fleet.tenant_services.retention.clean_up()
    assert await kept(fleet, ended) == set()
    assert "cannot delete old jobs and events in database nowhere, will retry" in caplog.text
