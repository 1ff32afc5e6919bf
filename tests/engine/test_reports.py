"""Reports end a lease once, by its holder, never by an old one; a lease nobody reports on ends by itself."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.engine._rig import Rig

from comfyfleet.model.calls import LeasedJob, Poll, ProgressReport, Release
from comfyfleet.model.dispatch import AttemptOutcome, Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import ProgressEvent, ProgressKind
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import LeaseToken, PollId, WorkerId, prompt_id_of
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.time import ManualClock


async def test_completing_twice_gets_the_same_answer_and_counts_once() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        assert await rig.complete(leased) == await rig.complete(leased)
        assert rig.facts(job_id).count("completed") == 1
        (worker,) = await rig.engine.workers()
        assert worker.completed == 1


async def test_failing_twice_gets_the_same_answer_even_after_another_worker_took_over() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("b")
        job_id = await rig.submit()
        leased = await rig.take("a")
        first = await rig.fail(leased, FailureKind.CRASHED)
        assert first.will_retry
        assert await rig.fail(leased, FailureKind.CRASHED) == first
        await rig.clock.advance(2)
        await rig.complete(await rig.take("b"))
        assert await rig.fail(leased, FailureKind.CRASHED) == first
        view = await rig.engine.get(job_id)
        assert (view.dispatch.charged, view.job.phase) == (1, Phase.COMPLETED)
        assert view.job.failure is None


@pytest.mark.parametrize("report", ["complete", "fail", "release", "progress"])
async def test_a_report_with_an_old_lease_changes_nothing(report: str) -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        old = await rig.take("a")
        await rig.clock.advance(60)
        await rig.worker("b")
        new = await rig.take("b")
        before = await rig.engine.get(job_id)
        events = len(rig.events)
        if report == "progress":
            beat = await rig.engine.progress([ProgressReport(old.ref, ProgressKind.STARTED, {"value": 1})])
            assert (beat.alive, beat.lost) == ((), (old.ref,))
        else:
            with pytest.raises(Refusal) as refused:
                if report == "complete":
                    await rig.complete(old)
                elif report == "fail":
                    await rig.fail(old)
                else:
                    await rig.engine.release(Release(old.ref))
            assert refused.value.code is RefusalCode.LEASE_LOST
        after = await rig.engine.get(job_id)
        assert (after.job, after.dispatch) == (before.job, before.dispatch)
        assert len(rig.events) == events
        assert after.attempts[0].reported_late is (report != "progress")
        assert (await rig.complete(new)).phase is Phase.COMPLETED


async def test_a_report_with_a_forged_token_is_refused_and_the_holder_goes_on() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        forged = msgspec.structs.replace(
            leased, ref=msgspec.structs.replace(leased.ref, token=LeaseToken("tökén"))
        )
        with pytest.raises(Refusal):
            await rig.complete(forged)
        beat = await rig.engine.heartbeat(WorkerId("a"), [forged.ref])
        assert beat.lost == (forged.ref,)
        assert (await rig.engine.get(job_id)).dispatch.phase is Phase.LEASED
        assert (await rig.complete(leased)).phase is Phase.COMPLETED


async def test_progress_of_a_held_lease_goes_out_and_is_noted_in_the_record() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        await rig.engine.cancel(job_id)
        beat = await rig.engine.progress(
            [
                ProgressReport(leased.ref, ProgressKind.STARTED),
                ProgressReport(leased.ref, ProgressKind.PROGRESS, {"value": 3}),
            ]
        )
        assert beat.alive == (leased.ref,)
        assert [command.action for command in beat.commands] == ["cancel"], "every answer carries commands"
        told = [event for event in rig.events if isinstance(event, ProgressEvent)]
        assert [(event.kind.value, event.lease_number) for event in told] == [("started", 1), ("progress", 1)]
        job = (await rig.engine.get(job_id)).job
        assert (job.started_at, job.worker_id) == (rig.clock.now(), "a")


async def test_what_a_job_says_of_its_run_is_of_the_run_it_is_in() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        first = await rig.take("a")
        await rig.engine.progress(
            [
                ProgressReport(first.ref, ProgressKind.ACCEPTED),
                ProgressReport(first.ref, ProgressKind.STARTED),
            ]
        )
        view = await rig.engine.get(job_id)
        assert (view.worker_id, view.started_at) == ("a", rig.clock.now())
        assert view.prompt_id == prompt_id_of(first.ref.attempt_id)

        await rig.engine.pause(job_id)
        await rig.engine.release(Release(first.ref, "cancelled"))
        view = await rig.engine.get(job_id)
        assert (view.started_at, view.prompt_id) == (None, None), "it waits, and what ran is over"

        await rig.engine.resume(job_id)
        await rig.clock.advance(5)
        second = await rig.take("a")
        view = await rig.engine.get(job_id)
        assert (view.started_at, view.prompt_id) == (None, None), "this run has not started yet"
        await rig.engine.progress(
            [
                ProgressReport(second.ref, ProgressKind.ACCEPTED),
                ProgressReport(second.ref, ProgressKind.STARTED),
            ]
        )
        view = await rig.engine.get(job_id)
        assert (view.started_at, view.prompt_id) == (rig.clock.now(), prompt_id_of(second.ref.attempt_id))
        await rig.complete(second)
        assert (await rig.engine.get(job_id)).started_at == rig.clock.now()


async def test_a_job_that_fails_before_its_last_run_has_started_shows_nothing_of_the_run_before() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("b")
        job_id = await rig.submit(max_attempts=2, retry_delay_s=0)
        first = await rig.take("a")
        await rig.engine.progress(
            [
                ProgressReport(first.ref, ProgressKind.ACCEPTED),
                ProgressReport(first.ref, ProgressKind.STARTED),
            ]
        )
        await rig.clock.advance(5)
        assert (await rig.fail(first)).will_retry
        await rig.fail(await rig.take("b"))
        view = await rig.engine.get(job_id)
        assert (view.dispatch.phase, view.worker_id) == (Phase.FAILED, "b")
        assert (view.started_at, view.prompt_id) == (None, None)


async def test_a_start_is_shown_where_the_clock_of_the_engine_is_behind_that_of_the_store() -> None:
    """Leases have the time of the store; on a shared one that is another machine's."""

    class Ahead(MemoryStore):
        def __init__(self, clock: ManualClock) -> None:
            super().__init__(ManualClock(clock.now() + 3600))

    async with Rig(store=Ahead) as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        await rig.engine.progress([ProgressReport(leased.ref, ProgressKind.STARTED)])
        view = await rig.engine.get(job_id)
        assert view.dispatch.lease is not None
        assert view.started_at == view.dispatch.lease.leased_at


async def test_a_run_whose_worker_never_said_that_it_started_began_with_its_lease() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        first, second = await rig.submit(), await rig.submit()
        leased = await rig.take("a")
        leased_at = rig.clock.now()
        await rig.clock.advance(3)
        await rig.complete(leased)
        assert (await rig.engine.get(first)).started_at == leased_at

        leased = await rig.take("a")
        await rig.engine.cancel(second)
        await rig.engine.release(Release(leased.ref, "cancelled"))
        view = await rig.engine.get(second)
        assert (view.dispatch.phase, view.worker_id) == (Phase.CANCELLED, "a")


async def test_a_lease_that_expires_after_a_heartbeat_charges_the_worker_and_goes_elsewhere_by_itself() -> (
    None
):
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        await rig.take("a")
        await rig.worker("b")
        parked = rig.park("b")
        await rig.clock.advance(59.9)
        assert not parked.done()
        await rig.clock.advance(0.1)
        leased = parked.result()
        assert leased is not None
        assert leased.job_id == job_id
        view = await rig.engine.get(job_id)
        assert (view.dispatch.charged, view.dispatch.worker_faults, view.dispatch.expired_on) == (
            0,
            1,
            ("a",),
        )
        assert view.attempts[0].outcome is AttemptOutcome.EXPIRED


async def test_heartbeats_keep_a_lease_alive() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        for _ in range(20):
            await rig.clock.advance(15)
            beat = await rig.engine.heartbeat(WorkerId("a"), [leased.ref])
            assert beat.alive == (leased.ref,)
        assert (await rig.engine.get(job_id)).dispatch.lease_number == 1


async def test_a_poll_asked_again_gets_the_same_lease() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("b")
        await rig.submit()
        await rig.submit()
        call = Poll(WorkerId("a"), PollId("mine"), 0)
        first = await rig.engine.poll(call)
        assert first is not None
        assert await rig.engine.poll(call) == first
        other = await rig.engine.poll(Poll(WorkerId("b"), PollId("mine"), 0))
        assert other is not None
        assert other.job_id != first.job_id, "another worker that chose the same id has polls of its own"


async def test_a_poll_asked_again_while_it_is_parked_takes_the_place_of_the_first() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        call = Poll(WorkerId("a"), PollId("mine"), 1e9)
        first = asyncio.ensure_future(rig.engine.poll(call))
        await rig.settle()
        second = asyncio.ensure_future(rig.engine.poll(call))
        await rig.settle()
        assert first.done()
        assert first.result() is None
        assert (await rig.engine.stats()).idle_slots == 1
        job_id = await rig.submit()
        await rig.settle()
        leased: LeasedJob | None = second.result()
        assert leased is not None
        assert leased.job_id == job_id
        await rig.engine.heartbeat(WorkerId("a"), [leased.ref])
        await rig.complete(leased)
        assert (await rig.engine.stats()).idle_slots == 0
        await rig.clock.advance(62)
        assert len(rig.fleet_events("offline")) == 1, "no poll is left behind that keeps the worker alive"


async def test_a_poll_that_hangs_up_after_it_was_asked_again_does_not_give_back_the_second_ones_lease() -> (
    None
):
    async with Rig() as rig:
        await rig.worker("a")
        call = Poll(WorkerId("a"), PollId("mine"), 1e9)
        first = asyncio.ensure_future(rig.engine.poll(call))
        await rig.settle()
        # The grant, the repeat and the hang-up meet in one turn of the loop.
        await rig.engine.pause_queue()
        job_id = await rig.submit()
        await rig.store.pause_queue(False)
        second = asyncio.ensure_future(rig.engine.poll(call))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await rig.settle()
        leased = second.result()
        assert leased is not None
        assert leased.job_id == job_id
        assert (await rig.engine.get(job_id)).dispatch.phase is Phase.LEASED
