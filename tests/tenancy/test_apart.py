"""A tenant that was set up: its jobs and credits lie in its own database, and the engine does not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.engine._rig import graph
from tests.tenancy._tenant_services import ACME, BORG, Fleet, one_fleet

from comfyfleet.model.calls import Release
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import Event, Fact, FactKind
from comfyfleet.model.ids import DEFAULT_TENANT, JobId
from comfyfleet.model.job import Submission
from comfyfleet.model.ledger import Account, GpuPrice, HoldId, Outcome, OutputPrice
from comfyfleet.model.tenant import TenantState
from comfyfleet.ports import RecordQuery
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.values import OutboxEntry, PostingResult, RoundEnd, RoundEnded
from comfyfleet.testing.time import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def fleet(clock: ManualClock, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        yield fleet


async def database(fleet: Fleet) -> TenantDatabase:
    home = await fleet.tenant_services.directory.locate(ACME)
    assert home is not None
    return home.database


async def test_credits_are_held_at_submit_and_consumed_on_completion(fleet: Fleet) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    job_id = await fleet.submit()
    assert await fleet.account() == Account(ACME, 100, held=10)
    await fleet.complete(await fleet.take())
    assert await fleet.account() == Account(ACME, 90)
    settlement = await (await database(fleet)).settlement(HoldId(job_id, 1))
    assert settlement is not None and settlement.outcome is Outcome.CONSUMED
    await fleet.check()


@pytest.mark.parametrize("asked", ["pause", "retry"])
async def test_credits_stay_held_while_a_running_job_is_stopped_and_run_again(
    fleet: Fleet, asked: str
) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    job_id = await fleet.submit()
    leased = await fleet.take()
    held = await fleet.account()
    await getattr(fleet.engine, asked)(job_id)
    assert (await fleet.engine.release(Release(leased.ref, "cancelled"))).phase is Phase.QUEUED
    assert await fleet.account() == held
    if asked == "pause":
        assert await fleet.poll() is None
        await fleet.engine.resume(job_id)
    await fleet.complete(await fleet.take())
    assert await fleet.account() == Account(ACME, 90)
    await fleet.check()


async def test_credits_come_back_when_a_job_fails_or_is_cancelled(fleet: Fleet) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    await fleet.submit()
    await fleet.fail(await fleet.take())
    await fleet.engine.cancel(await fleet.submit())
    assert await fleet.account() == Account(ACME, 100)
    await fleet.check()


async def test_a_job_the_account_does_not_cover_is_refused_and_is_nowhere(fleet: Fleet) -> None:
    await fleet.tenant(granted=15)
    await fleet.submit()
    with pytest.raises(Refusal) as refused:
        await fleet.submit()
    assert refused.value.code is RefusalCode.CREDITS_SHORT
    assert (await fleet.engine.stats()).waiting == 1
    assert await fleet.account() == Account(ACME, 15, held=10)


async def test_payload_and_result_lie_in_the_tenants_database_alone(fleet: Fleet) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    job_id = await fleet.submit(metadata={"whose": "mine"}, reference="order 7")
    await fleet.complete(await fleet.take())
    stub = await fleet.central.records.get(job_id)
    assert stub is not None
    assert (stub.payload, stub.result, stub.reference) == (Submission({}, tenant=ACME), None, None)
    job = (await fleet.engine.get(job_id)).job
    assert job.payload.workflow == graph() and job.payload.metadata == {"whose": "mine"}
    assert job.result is not None and job.result.files and job.reference == "order 7"
    kept = await (await database(fleet)).get(job_id)
    assert kept == job, "and it is whole there, for when the store has forgotten it"


async def test_a_worker_gets_the_payload_with_its_lease(fleet: Fleet) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    await fleet.submit()
    assert (await fleet.take()).workflow == graph()


async def test_a_tenant_that_was_not_set_up_lives_in_the_store_as_before(fleet: Fleet) -> None:
    await fleet.tenant()
    await fleet.worker()
    job_id = await fleet.submit(DEFAULT_TENANT)
    await fleet.complete(await fleet.take())
    stub = await fleet.central.records.get(job_id)
    assert stub is not None and stub.payload.workflow == graph() and stub.result is not None
    dispatch = await fleet.central.load(job_id)
    assert dispatch is not None and not dispatch.has_tenant_database


async def test_jobs_from_before_a_tenant_was_set_up_end_as_they_began(fleet: Fleet) -> None:
    await fleet.worker()
    job_id = await fleet.submit()
    await fleet.tenant(granted=0)
    await fleet.complete(await fleet.take())
    view = await fleet.engine.get(job_id)
    assert view.job.result is not None and view.job.payload.workflow == graph()
    await fleet.check()


async def test_the_same_submission_under_the_same_reference_is_held_for_once(fleet: Fleet) -> None:
    await fleet.tenant(granted=100)
    first = await fleet.submit(reference="order 7")
    assert await fleet.submit(reference="order 7") == first
    assert await fleet.account() == Account(ACME, 100, held=10)
    with pytest.raises(Refusal) as refused:
        await fleet.submit(reference="order 7", priority=3)
    assert refused.value.code is RefusalCode.DUPLICATE_DIFFERS


async def test_a_retry_by_hand_is_a_new_round_with_a_hold_of_its_own(fleet: Fleet) -> None:
    await fleet.tenant(granted=15)
    await fleet.worker()
    job_id = await fleet.submit()
    await fleet.fail(await fleet.take())
    await fleet.engine.retry(job_id)
    assert await fleet.account() == Account(ACME, 15, held=10)
    await fleet.complete(await fleet.take())
    assert await fleet.account() == Account(ACME, 5)
    outcomes = [await (await database(fleet)).settlement(HoldId(job_id, number)) for number in (1, 2)]
    assert [each and each.outcome for each in outcomes] == [Outcome.REFUNDED, Outcome.CONSUMED]
    await fleet.check()


async def test_a_retry_that_cannot_be_paid_for_is_refused_and_the_job_stays_as_it_was(fleet: Fleet) -> None:
    await fleet.tenant(granted=10)
    await fleet.worker()
    job_id = await fleet.submit()
    await fleet.fail(await fleet.take())
    await fleet.submit()
    with pytest.raises(Refusal) as refused:
        await fleet.engine.retry(job_id)
    assert refused.value.code is RefusalCode.CREDITS_SHORT
    assert (await fleet.engine.get(job_id)).dispatch.phase is Phase.FAILED
    await fleet.check()


async def test_by_output_what_was_not_made_goes_back(fleet: Fleet) -> None:
    await fleet.tenant(granted=100, price=OutputPrice(5, 10, base=1))
    await fleet.worker()
    await fleet.submit()
    assert await fleet.account() == Account(ACME, 100, held=51)
    await fleet.complete(await fleet.take(), outputs=3)
    assert await fleet.account() == Account(ACME, 84)
    await fleet.check()


async def test_by_the_second_the_time_of_the_attempt_counts_and_never_more_than_was_held(
    fleet: Fleet, clock: ManualClock
) -> None:
    await fleet.tenant(granted=100, price=GpuPrice(2, 20))
    await fleet.worker()
    await fleet.submit()
    leased = await fleet.take()
    await clock.advance(7.5)
    await fleet.complete(leased)
    assert await fleet.account() == Account(ACME, 85)
    (run,) = await (await database(fleet)).runs(ACME, after=0, limit=10)
    assert (run.gpu_milliseconds, run.outputs, run.consumed, run.verified_by) == (7500, 1, 15, "hub")
    await fleet.submit()
    leased = await fleet.take()
    await clock.advance(50)
    await fleet.complete(leased)
    assert await fleet.account() == Account(ACME, 45)
    await fleet.check()


async def test_a_price_that_changes_counts_for_what_is_submitted_from_then_on(fleet: Fleet) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    await fleet.submit()
    await fleet.tenant_services.tenants.change(ACME, lambda known: msgspec.structs.replace(known, price=None))
    await fleet.complete(await fleet.take())
    assert await fleet.account() == Account(ACME, 90)
    await fleet.submit()
    assert await fleet.account() == Account(ACME, 90)


@pytest.mark.parametrize(
    ("state", "code"),
    [(TenantState.SUSPENDED, RefusalCode.NOT_ALLOWED), (TenantState.MOVING, RefusalCode.UNAVAILABLE)],
)
async def test_nothing_is_taken_for_a_tenant_that_is_suspended_or_moving(
    fleet: Fleet, state: TenantState, code: RefusalCode
) -> None:
    await fleet.tenant(granted=100)
    await fleet.tenant_services.tenants.change(
        ACME, lambda known: msgspec.structs.replace(known, state=state)
    )
    with pytest.raises(Refusal) as refused:
        await fleet.submit()
    assert refused.value.code is code
    assert await fleet.account() == Account(ACME, 100)


async def test_lists_have_what_lies_apart_beside_what_does_not(fleet: Fleet) -> None:
    await fleet.tenant(granted=100)
    await fleet.tenant(BORG, database="second", price=None)
    jobs = [await fleet.submit(tenant, metadata={"of": tenant}) for tenant in (ACME, BORG, DEFAULT_TENANT)]
    listed = await fleet.engine.store.records.listing(RecordQuery(limit=10))
    assert [each.job_id for each in listed] == jobs
    assert [each.payload.metadata for each in listed] == [{"of": t} for t in (ACME, BORG, DEFAULT_TENANT)]
    mine = await fleet.engine.store.records.listing(RecordQuery(tenant=BORG, phase=Phase.QUEUED, limit=10))
    assert [each.job_id for each in mine] == [jobs[1]]


class Crash(BaseException):
    """The process ends here."""


async def crash(*_: object) -> None:
    raise Crash


async def submit_and_die(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between S1 and S2."""
    with monkeypatch.context() as patch:
        patch.setattr(fleet.central, "enqueue", crash)
        with pytest.raises(Crash):
            await fleet.submit()


async def complete_and_die(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> JobId:
    """Between K and T1."""
    job_id = await fleet.submit()
    leased = await fleet.take()
    with monkeypatch.context() as patch:
        patch.setattr(fleet.tenant_services.ledger_store.settler, "settle", crash)
        with pytest.raises(Crash):
            await fleet.complete(leased)
    return job_id


async def test_a_job_that_a_crash_left_in_its_tenants_database_is_brought_into_the_queue(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    await submit_and_die(fleet, monkeypatch)
    assert (await fleet.engine.stats()).waiting == 0
    await fleet.relay.run_once(at_once=True)
    await fleet.complete(await fleet.take())
    assert await fleet.account() == Account(ACME, 90)
    await fleet.relay.run_once(at_once=True)
    assert (await fleet.engine.stats()).waiting == 0, "once"
    await fleet.check()


async def test_a_submit_is_answered_though_the_store_is_away_and_runs_when_it_is_back(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()

    async def away(*_: object) -> None:
        raise Fault("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(fleet.central, "enqueue", away)
        await fleet.submit()
    await fleet.relay.run_once(at_once=True)
    await fleet.complete(await fleet.take())
    await fleet.check()


async def test_an_end_that_a_crash_left_unsettled_is_settled_with_its_result(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    job_id = await complete_and_die(fleet, monkeypatch)
    assert await fleet.account() == Account(ACME, 100, held=10)
    assert [each.job_id for each in await fleet.central.unsettled(10)] == [job_id]
    await fleet.relay.run_once(at_once=True)
    assert await fleet.account() == Account(ACME, 90)
    job = (await fleet.engine.get(job_id)).job
    assert job.result is not None and job.result.files
    await fleet.check()


async def test_nobody_sees_a_job_that_has_completed_without_its_result(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    job_id = await complete_and_die(fleet, monkeypatch)
    view = await fleet.engine.get(job_id)
    assert view.dispatch.phase is Phase.COMPLETED
    assert view.job.result is not None and view.job.result.files
    await fleet.check()


async def test_what_is_on_its_way_is_left_alone_at_the_first_look(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.tenant(granted=100)
    await submit_and_die(fleet, monkeypatch)
    await fleet.relay.run_once()
    assert (await fleet.engine.stats()).waiting == 0
    await fleet.relay.run_once()
    assert (await fleet.engine.stats()).waiting == 1


async def test_a_round_that_is_over_in_its_tenants_database_is_not_leased(fleet: Fleet) -> None:
    """As after a failover that lost the end of a job."""
    await fleet.tenant(granted=100)
    await fleet.worker()
    job_id = await fleet.submit()
    before = await fleet.central.load(job_id)
    assert before is not None
    ended = msgspec.structs.replace(before, phase=Phase.CANCELLED)
    location = await fleet.tenant_services.directory.locate(ACME)
    assert location is not None
    await fleet.tenant_services.ledger_store.settler._end(location, ended)
    assert await fleet.poll() is None
    assert (await fleet.engine.get(job_id)).dispatch.phase is Phase.CANCELLED
    assert await fleet.account() == Account(ACME, 100)
    await fleet.check()


async def test_an_end_that_the_database_did_not_take_in_is_not_marked_as_settled(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows were erased there after they were read: its tenant has moved, and this hub overslept."""
    await fleet.tenant(granted=100)
    apart = await database(fleet)

    async def refuse(ending: RoundEnd) -> RoundEnded:
        return RoundEnded(PostingResult.REFUSED, None)

    job_id = await fleet.submit()
    with monkeypatch.context() as patch:
        patch.setattr(apart, "end_round", refuse, raising=False)
        await fleet.engine.cancel(job_id)
    assert [each.job_id for each in await fleet.central.unsettled(10)] == [job_id]
    await fleet.relay.run_once(at_once=True)
    assert await fleet.account() == Account(ACME, 100)
    await fleet.check()


async def test_a_cancel_stands_whatever_the_tenants_database_says_to_its_settlement(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.tenant(granted=100)
    apart = await database(fleet)

    async def refuse(ending: RoundEnd) -> RoundEnded:
        raise Refusal(RefusalCode.INVALID_REQUEST, "this cannot be kept")

    job_id = await fleet.submit()
    with monkeypatch.context() as patch:
        patch.setattr(apart, "end_round", refuse, raising=False)
        await fleet.engine.cancel(job_id)
    await fleet.relay.run_once(at_once=True)
    assert await fleet.account() == Account(ACME, 100)


async def test_a_look_that_fails_leaves_nothing_running_behind_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.tenant(granted=100)
    apart, has_failed, has_ended = await database(fleet), asyncio.Event(), False
    outbox = apart.outbox

    async def away(*_: object) -> None:
        has_failed.set()
        raise Fault("the store is away")

    async def slowly(*, is_sent: bool, after: HoldId | None, limit: int) -> list[OutboxEntry]:
        nonlocal has_ended
        await has_failed.wait()
        found = await outbox(is_sent=is_sent, after=after, limit=limit)
        has_ended = True
        return found

    monkeypatch.setattr(fleet.central, "unsettled", away)
    monkeypatch.setattr(apart, "outbox", slowly)
    with pytest.raises(Fault, match="the store is away"):
        await fleet.relay.run_once()
    assert has_ended


@pytest.mark.parametrize("error", [Fault("the database is away"), RuntimeError("the disk is full")])
async def test_a_job_in_the_queue_is_told_though_its_tenants_database_does_not_take_note(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    job_id = await fleet.submit()
    await fleet.fail(await fleet.take())
    heard: list[Event] = []
    fleet.engine.bus.listen(heard.append)

    async def fails(*_: object) -> bool:
        raise error

    monkeypatch.setattr(await database(fleet), "mark_sent", fails)
    assert (await fleet.engine.retry(job_id)).phase is Phase.QUEUED
    other = await fleet.submit()
    assert [(event.job_id, event.kind) for event in heard if isinstance(event, Fact)] == [
        (job_id, FactKind.QUEUED),
        (other, FactKind.QUEUED),
    ]
    monkeypatch.undo()
    await fleet.relay.run_once(at_once=True)
    for _ in range(2):
        await fleet.complete(await fleet.take())
    assert await fleet.account() == Account(ACME, 80)
    await fleet.check()


async def test_an_end_that_cannot_be_settled_now_is_told(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.tenant(granted=100)
    await fleet.worker()
    await fleet.submit()
    leased = await fleet.take()
    heard: list[Event] = []
    fleet.engine.bus.listen(heard.append)

    async def fails(*_: object) -> RoundEnded:
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(await database(fleet), "end_round", fails)
    await fleet.complete(leased)
    assert [event.kind for event in heard if isinstance(event, Fact)] == [FactKind.COMPLETED]
    monkeypatch.undo()
    await fleet.relay.run_once(at_once=True)
    assert await fleet.account() == Account(ACME, 90)
    await fleet.check()
