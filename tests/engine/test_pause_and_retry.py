"""Pause and retry of a job that runs: its worker stops it and confirms; then it is paused, or waits at its place."""

from __future__ import annotations

import pytest
from tests.engine._rig import Rig

from comfyfleet.model.calls import LeasedJob, Release
from comfyfleet.model.dispatch import AttemptOutcome, Dispatch, Phase, Readiness
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import Fact
from comfyfleet.model.ids import JobId, WorkerId


async def running(rig: Rig) -> tuple[JobId, LeasedJob]:
    await rig.worker("a")
    job_id = await rig.submit()
    return job_id, await rig.take("a")


async def state_of(rig: Rig, job_id: JobId) -> Dispatch:
    view = await rig.engine.get(job_id)
    assert view.job.phase is view.dispatch.phase
    return view.dispatch


async def told(rig: Rig, leased: LeasedJob) -> list[tuple[str, JobId | None]]:
    beat = await rig.engine.heartbeat(leased.worker_id, [leased.ref])
    return [(command.action, command.job_id) for command in beat.commands]


async def test_a_running_job_is_paused_when_its_worker_has_stopped_it_and_resume_queues_it_again() -> None:
    async with Rig() as rig:
        job_id, leased = await running(rig)
        await rig.engine.pause(job_id)
        assert (await state_of(rig, job_id)).phase is Phase.LEASED
        # Agents of the version before know `cancel`: for them it is the same.
        assert await told(rig, leased) == [("cancel", job_id)]
        assert (await rig.engine.release(Release(leased.ref, "cancelled"))).phase is Phase.QUEUED
        paused = await state_of(rig, job_id)
        assert (paused.phase, paused.standing, paused.lease) == (Phase.QUEUED, Readiness.PAUSED, None)
        assert await rig.poll("a") is None
        await rig.engine.resume(job_id)
        again = await rig.take("a")
        assert (again.job_id, again.ref.round, again.ref.number) == (job_id, 1, 2)
        assert (await rig.complete(again)).phase is Phase.COMPLETED
        assert rig.facts(job_id) == [
            "queued",
            "leased",
            "pause_requested",
            "paused",
            "resumed",
            "leased",
            "completed",
        ]
        outcomes = [attempt.outcome for attempt in (await rig.engine.get(job_id)).attempts]
        assert outcomes == [AttemptOutcome.CANCELLED, AttemptOutcome.COMPLETED]


async def test_a_retried_job_goes_back_to_its_place_in_line_in_the_same_round_and_is_charged_nothing() -> (
    None
):
    async with Rig() as rig:
        job_id, leased = await running(rig)
        later = await rig.submit()
        answer = await rig.engine.retry(job_id)
        assert answer.phase is Phase.LEASED
        assert await told(rig, leased) == [("retry", job_id)]
        settled = await rig.engine.release(Release(leased.ref, "retry"))
        assert (settled.phase, settled.will_retry) == (Phase.QUEUED, True)
        waiting = await state_of(rig, job_id)
        assert (waiting.round, waiting.charged, waiting.releases, waiting.attempts) == (1, 0, 0, 1)
        again = await rig.take("a")
        assert (again.job_id, again.attempt) == (job_id, 2), f"before {later}, which came later"
        assert rig.facts(job_id) == ["queued", "leased", "retry_requested", "released", "leased"]


@pytest.mark.parametrize("asked", ["pause", "retry"])
async def test_a_completion_that_comes_first_wins(asked: str) -> None:
    async with Rig() as rig:
        job_id, leased = await running(rig)
        await getattr(rig.engine, asked)(job_id)
        assert (await rig.complete(leased)).phase is Phase.COMPLETED
        assert (await state_of(rig, job_id)).phase is Phase.COMPLETED
        with pytest.raises(Refusal) as refused:
            await getattr(rig.engine, asked)(job_id)
        assert refused.value.code is RefusalCode.WRONG_PHASE


@pytest.mark.parametrize("asked", ["pause", "retry"])
async def test_a_cancel_that_comes_second_wins_and_one_that_came_first_stands(asked: str) -> None:
    async with Rig() as rig:
        job_id, leased = await running(rig)
        await getattr(rig.engine, asked)(job_id)
        assert (await rig.engine.cancel(job_id)).cancel_requested
        with pytest.raises(Refusal) as refused:
            await getattr(rig.engine, asked)(job_id)
        assert refused.value.code is RefusalCode.WRONG_PHASE
        assert "cancelled" in refused.value.message
        assert (await rig.engine.release(Release(leased.ref, "cancelled"))).phase is Phase.CANCELLED
        # Cancelled, it is run again as any other: what was asked for before is over.
        await rig.engine.retry(job_id)
        assert await told(rig, await rig.take("a")) == []


@pytest.mark.parametrize(("asked", "standing"), [("pause", Readiness.PAUSED), ("retry", Readiness.IN_LANE)])
async def test_a_worker_that_dies_meanwhile_is_waited_for_thirty_seconds(
    asked: str, standing: Readiness
) -> None:
    async with Rig() as rig:
        job_id, leased = await running(rig)
        await getattr(rig.engine, asked)(job_id)
        await rig.clock.advance(29.9)
        assert (await state_of(rig, job_id)).phase is Phase.LEASED
        await rig.clock.advance(0.1)
        after = await state_of(rig, job_id)
        assert (after.phase, after.standing, after.charged) == (Phase.QUEUED, standing, 0)
        (fact,) = [event for event in rig.events if isinstance(event, Fact)][-1:]
        reason = {"reason": "retry", "attempt": 1} if asked == "retry" else {}
        assert fact.data == {**reason, "note": "the worker did not confirm"}
        with pytest.raises(Refusal) as refused:
            await rig.complete(leased)
        assert refused.value.code is RefusalCode.LEASE_LOST


@pytest.mark.parametrize(("asked", "standing"), [("pause", Readiness.PAUSED), ("retry", Readiness.IN_LANE)])
async def test_a_lease_that_was_never_acknowledged_ends_as_it_was_asked_for(
    asked: str, standing: Readiness
) -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        assert await rig.poll("a") is not None
        await getattr(rig.engine, asked)(job_id)
        await rig.clock.advance(10)
        after = await state_of(rig, job_id)
        assert (after.phase, after.standing) == (Phase.QUEUED, standing)


@pytest.mark.parametrize(("asked", "standing"), [("pause", Readiness.PAUSED), ("retry", Readiness.IN_LANE)])
async def test_what_a_run_died_of_while_it_was_being_stopped_counts_for_nothing(
    asked: str, standing: Readiness
) -> None:
    async with Rig() as rig:
        job_id, leased = await running(rig)
        await getattr(rig.engine, asked)(job_id)
        first = await rig.fail(leased)
        assert first.phase is Phase.QUEUED
        assert await rig.fail(leased) == first
        after = await state_of(rig, job_id)
        assert (after.standing, after.charged, after.failed_on) == (standing, 0, ())
        assert await rig.engine.blocks() == []


async def test_of_pause_and_retry_the_last_word_counts_and_resume_takes_a_pause_back() -> None:
    async with Rig() as rig:
        job_id, leased = await running(rig)
        await rig.engine.retry(job_id)
        await rig.engine.pause(job_id)
        await rig.engine.pause(job_id)
        assert (await rig.engine.release(Release(leased.ref, "retry"))).phase is Phase.QUEUED
        assert (await state_of(rig, job_id)).standing is Readiness.PAUSED
        await rig.engine.resume(job_id)
        leased = await rig.take("a")
        await rig.engine.pause(job_id)
        await rig.engine.resume(job_id)
        # Its run may be stopped already, so it begins anew.
        await rig.engine.release(Release(leased.ref, "cancelled"))
        assert (await rig.take("a")).job_id == job_id


async def test_a_resume_of_a_job_that_runs_is_refused() -> None:
    async with Rig() as rig:
        job_id, _ = await running(rig)
        with pytest.raises(Refusal) as refused:
            await rig.engine.resume(job_id)
        assert refused.value.code is RefusalCode.WRONG_PHASE


async def test_a_worker_that_listens_hears_at_once() -> None:
    async with Rig() as rig:
        job_id, leased = await running(rig)
        await rig.engine.pause(job_id)
        (command,) = await rig.engine.commands(WorkerId("a"), 0.01)
        assert (command.action, command.job_id, command.lease_number) == ("cancel", job_id, leased.ref.number)


@pytest.mark.parametrize(
    ("asked", "phase", "standing"),
    [
        ("cancel", Phase.CANCELLED, Readiness.IN_LANE),
        ("pause", Phase.QUEUED, Readiness.PAUSED),
        ("retry", Phase.QUEUED, Readiness.IN_LANE),
    ],
)
async def test_a_lease_that_goes_back_unheard_goes_back_as_was_asked_for_meanwhile(
    asked: str, phase: Phase, standing: Readiness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        assert await rig.poll("a") is not None
        held = await rig.store.load(job_id)
        assert held is not None
        read = rig.store.load

        async def then_asked(each: JobId) -> Dispatch | None:
            found = await read(each)
            monkeypatch.setattr(rig.store, "load", read)
            await getattr(rig.engine, asked)(job_id)
            return found

        monkeypatch.setattr(rig.store, "load", then_asked)
        await rig.engine._context.requeue_undelivered(held)
        after = await state_of(rig, job_id)
        assert (after.phase, after.standing, after.lease) == (phase, standing, None)
        assert (after.pause_requested_at, after.retry_requested_at) == (None, None)
