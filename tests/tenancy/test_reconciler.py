"""What crashes, failovers and old backups leave between the store and tenants' databases is found, and mended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.tenancy._tenant_services import ACME, Fleet, one_fleet

from comfyfleet.model.dispatch import AtRevision, Change, Dispatch, Phase, Write
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.ledger import Account, HoldId
from comfyfleet.policy import accounting
from comfyfleet.policy.accounting import FindingKind
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy import reconciler
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.values import RoundEnd
from comfyfleet.testing.time import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def fleet(clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(reconciler, "LOOK_AGAIN_S", 0.0)
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        await fleet.tenant(granted=100)
        await fleet.worker()
        yield fleet


async def found(fleet: Fleet, *, is_dry: bool = False) -> list[FindingKind]:
    return [each.kind for each in await fleet.tenant_services.reconciler.reconcile(is_dry=is_dry)]


async def database(fleet: Fleet) -> TenantDatabase:
    home = await fleet.tenant_services.directory.locate(ACME)
    assert home is not None
    return home.database


async def loaded(fleet: Fleet, job_id: JobId) -> Dispatch:
    dispatch = await fleet.central.load(job_id)
    assert dispatch is not None
    return dispatch


async def cancel_apart(fleet: Fleet, job_id: JobId) -> None:
    """Ends a round in the tenant's database alone, as after a failover that lost the end in the store."""
    apart = await database(fleet)
    hold = await apart.hold(HoldId(job_id, 1))
    assert hold is not None
    settlement = accounting.settle(hold, Phase.CANCELLED, 0, 5.0)
    posting = accounting.settling_posting(hold, settlement)
    await apart.end_round(RoundEnd("lost", settlement, posting, Phase.CANCELLED))


async def forget(fleet: Fleet, job_id: JobId) -> None:
    """As a store does that comes back without its newest writes."""
    assert isinstance(fleet.central, MemoryStore)
    fleet.central._state.forget(fleet.central._state.entries[job_id])


async def test_nothing_is_found_where_nothing_is_wrong(fleet: Fleet) -> None:
    await fleet.submit()
    await fleet.submit()
    await fleet.complete(await fleet.take())
    assert await found(fleet) == []


async def test_a_job_that_the_store_lost_is_sent_again_and_runs(fleet: Fleet) -> None:
    job_id = await fleet.submit()
    await forget(fleet, job_id)
    assert await found(fleet, is_dry=True) == [FindingKind.UNSENT]
    assert await found(fleet, is_dry=True) == [FindingKind.UNSENT], "a dry run changes nothing"
    assert await found(fleet) == [FindingKind.UNSENT]
    await fleet.relay.run_once(at_once=True)
    await fleet.complete(await fleet.take())
    assert await fleet.account() == Account(ACME, 90)
    assert await found(fleet) == []


async def test_an_end_whose_settlement_is_missing_is_settled(fleet: Fleet) -> None:
    job_id = await fleet.submit()
    dispatch = await loaded(fleet, job_id)
    # Marked as settled all the same: as after a backup of the tenant's database that is older than the store.
    change = Change(phase=Phase.FAILED, settled_at=1.0)
    await fleet.central.write(
        Write(job_id, AtRevision(dispatch.revision), change, job={"phase": Phase.FAILED})
    )
    assert await found(fleet) == [FindingKind.UNSETTLED]
    assert await fleet.account() == Account(ACME, 100)
    assert await found(fleet) == []


async def test_a_job_that_is_over_for_its_tenant_ends_in_the_store_too(fleet: Fleet) -> None:
    job_id = await fleet.submit()
    await cancel_apart(fleet, job_id)
    assert await found(fleet) == [FindingKind.OUTLIVED]
    assert (await loaded(fleet, job_id)).phase is Phase.CANCELLED
    assert await found(fleet) == []


async def test_a_dispatch_without_a_job_is_ended_and_never_leased(fleet: Fleet) -> None:
    known = await loaded(fleet, await fleet.submit())
    stray = JobId("01900000-0000-7000-8000-000000000000")
    stub = await fleet.central.records.get(known.job_id)
    assert stub is not None
    await fleet.central.enqueue(
        msgspec.structs.replace(known, job_id=stray), msgspec.structs.replace(stub, job_id=stray), ()
    )
    assert await found(fleet) == [FindingKind.UNKNOWN]
    ended = await fleet.central.records.get(stray)
    assert ended is not None and ended.phase is Phase.FAILED and ended.failure is not None
    assert "does not know" in ended.failure.message
    assert (await fleet.take()).ref.job_id == known.job_id
    assert await fleet.poll() is None
    assert await found(fleet) == []


async def test_an_end_that_only_waits_to_be_confirmed_is_marked(fleet: Fleet) -> None:
    job_id = await fleet.submit()
    await cancel_apart(fleet, job_id)
    dispatch = await loaded(fleet, job_id)
    await fleet.central.write(
        Write(
            job_id,
            AtRevision(dispatch.revision),
            Change(phase=Phase.CANCELLED),
            job={"phase": Phase.CANCELLED},
        )
    )
    assert await found(fleet) == [FindingKind.UNCONFIRMED]
    assert (await loaded(fleet, job_id)).settled_at is not None
    assert await found(fleet) == []


async def test_what_was_held_for_very_long_is_told(
    fleet: Fleet, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "OLD_HOLD_S", 10.0)
    await fleet.submit(not_before=clock.now() + 1e9)
    assert await found(fleet) == []
    await clock.advance(11)
    assert await found(fleet) == [FindingKind.OLD_HOLD]


async def test_a_database_that_was_set_back_behind_the_store_is_told_and_left_alone(fleet: Fleet) -> None:
    job_id = await fleet.submit()
    dispatch = await loaded(fleet, job_id)
    await fleet.central.write(Write(job_id, AtRevision(dispatch.revision), Change(round=2), job={"round": 2}))
    assert set(await found(fleet)) == {FindingKind.AHEAD, FindingKind.UNKNOWN}


async def test_an_end_that_the_tenants_database_has_never_heard_of_is_told_and_left_alone(
    fleet: Fleet,
) -> None:
    known = await loaded(fleet, await fleet.submit())
    stray = JobId("01900000-0000-7000-8000-000000000000")
    stub = await fleet.central.records.get(known.job_id)
    assert stub is not None
    await fleet.central.enqueue(
        msgspec.structs.replace(known, job_id=stray), msgspec.structs.replace(stub, job_id=stray), ()
    )
    there = await loaded(fleet, stray)
    end = Write(
        stray, AtRevision(there.revision), Change(phase=Phase.COMPLETED), job={"phase": Phase.COMPLETED}
    )
    await fleet.central.write(end)
    await fleet.engine.cancel(known.job_id)
    await fleet.relay.run_once(at_once=True)
    assert await found(fleet) == [FindingKind.AHEAD]
    assert [each.job_id for each in await fleet.central.unsettled(10)] == [stray]


async def test_a_hub_whose_database_has_another_address_ends_no_job_and_takes_none(
    fleet: Fleet, clock: ManualClock, tmp_path: Path
) -> None:
    """An empty database knows of nothing. To believe it would be to end everything that is open."""
    job_id = await fleet.submit()
    wrong = {"first": f"sqlite:///{tmp_path}/wrong.db"}
    async with Fleet(fleet.central, clock, wrong, seed=1) as other:
        assert await found(other) == [FindingKind.UNSEEN]
        assert (await loaded(fleet, job_id)).phase is Phase.QUEUED
        await other.worker()
        assert await other.poll() is None
        with pytest.raises(Refusal) as refused:
            await other.submit()
        assert refused.value.code is RefusalCode.UNAVAILABLE
        assert (await loaded(fleet, job_id)).phase is Phase.QUEUED
    await clock.advance(5.0)
    await fleet.complete(await fleet.take())
    assert await fleet.account() == Account(ACME, 90)


async def test_a_database_that_this_hub_does_not_have_is_not_said_to_agree(
    fleet: Fleet, clock: ManualClock, tmp_path: Path
) -> None:
    async with Fleet(fleet.central, clock, {"second": f"sqlite:///{tmp_path}/second.db"}, seed=1) as other:
        seen = await other.tenant_services.reconciler.reconcile(is_dry=True)
    assert [(each.kind, each.tenant) for each in seen] == [(FindingKind.UNSEEN, ACME)]
    assert "add it to [databases]" in seen[0].message and not seen[0].kind.mends_itself


async def test_ends_that_wait_are_read_once_however_many_tenants_there_are(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        await fleet.tenant(TenantId(f"quiet-{number}"))
    reads: list[int] = []
    unsettled = fleet.central.unsettled

    async def counted(limit: int, after: JobId | None = None) -> list[Dispatch]:
        reads.append(limit)
        return await unsettled(limit, after)

    monkeypatch.setattr(fleet.central, "unsettled", counted)
    assert await found(fleet) == []
    assert len(reads) == 1
