"""Cancelling in every phase: at once where nobody runs it, by request where somebody does."""

from __future__ import annotations

import pytest
from tests.engine._rig import Rig

from comfyfleet.model.calls import Release
from comfyfleet.model.dispatch import AttemptOutcome, Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import Fact
from comfyfleet.model.ids import JobId, WorkerId


async def phase_of(rig: Rig, job_id: JobId) -> Phase:
    view = await rig.engine.get(job_id)
    assert view.job.phase is view.dispatch.phase
    return view.dispatch.phase


@pytest.mark.parametrize("state", ["in line", "delayed", "paused"])
async def test_a_waiting_job_is_cancelled_at_once_and_never_runs(state: str) -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit(not_before=rig.clock.now() + 5 if state == "delayed" else None)
        if state == "paused":
            await rig.engine.pause(job_id)
        answer = await rig.engine.cancel(job_id)
        assert (answer.phase, answer.cancel_requested) == (Phase.CANCELLED, False)
        parked = rig.park("a")
        await rig.clock.advance(10)
        assert not parked.done()
        assert await phase_of(rig, job_id) is Phase.CANCELLED
        assert rig.facts(job_id)[-1] == "cancelled"


async def test_a_lease_that_was_never_acknowledged_ends_cancelled_when_it_is_over() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        assert await rig.poll("a") is not None
        answer = await rig.engine.cancel(job_id)
        assert (answer.phase, answer.cancel_requested) == (Phase.LEASED, True)
        await rig.clock.advance(10)
        assert await phase_of(rig, job_id) is Phase.CANCELLED


async def test_a_running_job_is_told_to_stop_with_the_next_heartbeat_and_again_until_it_does() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        await rig.engine.cancel(job_id)
        for _ in range(2):
            beat = await rig.engine.heartbeat(WorkerId("a"), [leased.ref])
            assert [(each.action, each.job_id) for each in beat.commands] == [("cancel", job_id)]
        settled = await rig.engine.release(Release(leased.ref, "cancelled"))
        assert settled.phase is Phase.CANCELLED
        assert (await rig.engine.release(Release(leased.ref, "cancelled"))) == settled
        (attempt,) = (await rig.engine.get(job_id)).attempts
        assert attempt.outcome is AttemptOutcome.CANCELLED


async def test_a_worker_that_listens_hears_of_a_cancel_at_once() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        await rig.take("a")
        await rig.engine.cancel(job_id)
        (command,) = await rig.engine.commands(WorkerId("a"), 0.01)
        assert (command.action, command.job_id, command.lease_number) == ("cancel", job_id, 1)
        assert await rig.engine.commands(WorkerId("a"), 0.001) == ()


async def test_whichever_commits_first_wins_and_completing_was_first() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        await rig.engine.cancel(job_id)
        assert (await rig.complete(leased)).phase is Phase.COMPLETED
        answer = await rig.engine.cancel(job_id)
        assert answer.phase is Phase.COMPLETED
        assert await phase_of(rig, job_id) is Phase.COMPLETED


async def test_giving_a_lease_back_after_a_cancel_cancels() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        await rig.engine.cancel(job_id)
        assert (await rig.engine.release(Release(leased.ref, "drain"))).phase is Phase.CANCELLED


async def test_what_a_run_died_of_while_it_was_being_stopped_is_of_no_interest_and_can_be_said_twice() -> (
    None
):
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        await rig.engine.cancel(job_id)
        first = await rig.fail(leased)
        assert first.phase is Phase.CANCELLED
        assert await rig.fail(leased) == first
        assert await rig.engine.blocks() == []


async def test_thirty_seconds_after_the_request_the_lease_is_revoked_and_a_late_result_changes_nothing() -> (
    None
):
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        await rig.clock.advance(5)
        await rig.engine.cancel(job_id)
        await rig.clock.advance(29.9)
        assert await phase_of(rig, job_id) is Phase.LEASED
        await rig.clock.advance(0.1)
        assert await phase_of(rig, job_id) is Phase.CANCELLED
        before = await rig.engine.get(job_id)
        with pytest.raises(Refusal) as refused:
            await rig.complete(leased)
        assert refused.value.code is RefusalCode.LEASE_LOST
        after = await rig.engine.get(job_id)
        assert after.dispatch == before.dispatch
        assert after.job == before.job
        assert [attempt.reported_late for attempt in after.attempts] == [True]


async def test_cancelling_twice_is_cancelling_once_and_an_unknown_job_is_refused() -> None:
    async with Rig() as rig:
        job_id = await rig.submit()
        await rig.engine.cancel(job_id)
        await rig.engine.cancel(job_id)
        assert rig.facts(job_id) == ["queued", "cancelled"]
        with pytest.raises(Refusal) as refused:
            await rig.engine.cancel(JobId("nobody"))
        assert refused.value.code is RefusalCode.NOT_FOUND


@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_the_reason_of_a_cancel_is_told_to_the_worker_kept_and_told_at_the_end(
    is_confirmed: bool,
) -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        await rig.engine.cancel(job_id, "the customer left")
        beat = await rig.engine.heartbeat(WorkerId("a"), [leased.ref])
        assert [command.reason for command in beat.commands] == ["the customer left"]
        if is_confirmed:
            await rig.engine.release(Release(leased.ref, "cancelled"))
        else:
            await rig.clock.advance(30)
        told = [event.data for event in rig.events if isinstance(event, Fact)][-2:]
        assert [(data or {}).get("reason") for data in told] == ["the customer left"] * 2
        assert (await rig.engine.get(job_id)).dispatch.cancel_reason == "the customer left"
        await rig.engine.retry(job_id)
        assert (await rig.engine.get(job_id)).dispatch.cancel_reason == ""


async def test_a_waiting_job_is_cancelled_with_its_reason_and_a_long_one_is_cut() -> None:
    async with Rig() as rig:
        job_id = await rig.submit()
        await rig.engine.cancel(job_id, "x" * 2_000)
        assert (await rig.engine.get(job_id)).dispatch.cancel_reason == "x" * 500
        (fact,) = [event for event in rig.events if isinstance(event, Fact)][-1:]
        assert fact.data == {"reason": "x" * 500}
