"""Everything that waits for a time wakes by itself: in these tests only the clock moves."""

from __future__ import annotations

import pytest
from tests.engine._rig import Rig, graph
from tests.engine.test_failures import taken

from comfyfleet.model.calls import Release
from comfyfleet.model.dispatch import AttemptOutcome, Phase, Readiness
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import Timeouts
from comfyfleet.model.requirement import Requirements


async def test_a_job_does_not_start_before_its_time_and_then_at_once() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        parked = rig.park("a")
        job_id = await rig.submit(not_before=rig.clock.now() + 30)
        assert (await rig.engine.stats()).delayed == 1
        await rig.clock.advance(29.9)
        assert not parked.done()
        await rig.clock.advance(0.1)
        assert taken(parked) == job_id


async def test_a_backoff_ends_by_itself() -> None:
    async with Rig(max_failures_before_block=9) as rig:
        await rig.worker("a")
        job_id = await rig.submit(retry_delay_s=17)
        await rig.fail(await rig.take("a"))
        parked = rig.park("a")
        await rig.clock.advance(16.9)
        assert not parked.done()
        await rig.clock.advance(0.1)
        assert taken(parked) == job_id


async def test_a_near_deadline_raises_a_job_above_older_ones_in_time() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        older = await rig.submit(priority=5)
        near = await rig.submit(deadline=rig.clock.now() + 700)
        assert (await rig.engine.get(near)).dispatch.priority == 0
        await rig.clock.advance(100)
        assert (await rig.engine.get(near)).dispatch.priority == 10
        await rig.worker("a")
        assert [(await rig.take("a")).job_id for _ in range(2)] == [near, older]


async def test_at_the_deadline_a_waiting_job_fails_as_deadline_passed() -> None:
    async with Rig() as rig:
        job_id = await rig.submit(deadline=rig.clock.now() + 20)
        await rig.clock.advance(19.9)
        assert (await rig.engine.get(job_id)).job.phase is Phase.QUEUED
        await rig.clock.advance(0.1)
        job = (await rig.engine.get(job_id)).job
        assert job.phase is Phase.FAILED
        assert job.failure is not None
        assert job.failure.kind is FailureKind.DEADLINE_PASSED


async def test_at_the_deadline_a_job_that_asked_for_it_is_flagged_late_and_still_runs_first() -> None:
    async with Rig() as rig:
        await rig.submit(priority=50)
        job_id = await rig.submit(deadline=rig.clock.now() + 20, on_deadline="flag")
        await rig.clock.advance(20)
        job = (await rig.engine.get(job_id)).job
        assert (job.phase, job.is_late) == (Phase.QUEUED, True)
        assert "late" in rig.facts(job_id)
        await rig.worker("a")
        assert (await rig.take("a")).job_id == job_id


async def test_a_deadline_that_was_not_looked_at_during_a_lease_still_ends_the_job_when_it_comes_back() -> (
    None
):
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit(deadline=rig.clock.now() + 640)
        leased = await rig.take("a")
        for _ in range(5):
            # Past the first step of its rising priority.
            await rig.clock.advance(15)
            await rig.engine.heartbeat(WorkerId("a"), [leased.ref])
        await rig.engine.release(Release(leased.ref))
        dispatch = (await rig.engine.get(job_id)).dispatch
        assert dispatch.priority == 10
        await rig.clock.advance(565)
        assert (await rig.engine.get(job_id)).job.phase is Phase.FAILED


async def test_a_preference_that_was_not_looked_at_during_a_lease_still_relaxes_when_the_job_comes_back() -> (
    None
):
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("b")
        job_id = await rig.submit(preferences=rig.prefer("a"))
        leased = await rig.take("a")
        await rig.clock.advance(5)
        parked = rig.park("b")
        await rig.engine.release(Release(leased.ref))
        await rig.clock.advance(1)
        assert taken(parked) == job_id


@pytest.mark.parametrize("is_leased", [False, True])
async def test_the_total_time_ends_a_job_waiting_or_leased(is_leased: bool) -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit(timeouts=Timeouts(total_s=40))
        leased = await rig.take("a") if is_leased else None
        await rig.clock.advance(39.9)
        assert not (await rig.engine.get(job_id)).job.phase.is_final
        await rig.clock.advance(0.1)
        job = (await rig.engine.get(job_id)).job
        assert job.phase is Phase.FAILED
        assert job.failure is not None
        assert job.failure.kind is FailureKind.TOTAL_TIMEOUT
        if leased is not None:
            (command,) = await rig.engine.commands(WorkerId("a"), 0.01)
            assert (command.action, command.job_id) == ("cancel", job_id), "its worker need not find out"
            with pytest.raises(Refusal):
                await rig.complete(leased)
            (attempt,) = (await rig.engine.get(job_id)).attempts
            assert attempt.outcome is AttemptOutcome.CANCELLED, "no lease expired"
            assert (await rig.engine.release(Release(leased.ref, "cancelled"))).phase is Phase.FAILED


async def test_a_paused_job_keeps_its_place_and_waits_for_its_resume() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        first, second = await rig.submit(), await rig.submit()
        await rig.engine.pause(first)
        await rig.engine.pause(first)
        assert (await rig.engine.stats()).paused == 1
        assert (await rig.take("a")).job_id == second
        parked = rig.park("a")
        third = await rig.submit(priority=-1)
        await rig.settle()
        assert taken(parked) == third
        later = await rig.submit()
        await rig.engine.resume(first)
        assert [(await rig.take("a")).job_id for _ in range(2)] == [first, later]
        assert rig.facts(first)[:3] == ["queued", "paused", "resumed"]


async def test_resuming_wakes_a_parked_slot_and_a_delay_outlives_a_pause() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit(not_before=rig.clock.now() + 30)
        await rig.engine.pause(job_id)
        parked = rig.park("a")
        await rig.clock.advance(10)
        await rig.engine.resume(job_id)
        assert (await rig.engine.get(job_id)).dispatch.standing is Readiness.DELAYED
        await rig.clock.advance(20)
        assert taken(parked) == job_id


async def test_a_paused_queue_gives_nothing_and_wakes_every_slot_when_it_goes_on() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        first, second = await rig.submit(), await rig.submit()
        await rig.engine.pause_queue()
        parked = [rig.park("a"), rig.park("a")]
        await rig.clock.advance(5)
        assert not any(each.done() for each in parked)
        await rig.engine.pause_queue(False)
        await rig.settle()
        assert {taken(each) for each in parked} == {first, second}


async def test_the_priority_of_a_waiting_job_can_be_changed_and_its_urgency_still_counts() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        first = await rig.submit()
        second = await rig.submit(urgency="high")
        await rig.engine.set_priority(second, -5)
        assert (await rig.engine.get(second)).dispatch.priority == 5
        await rig.engine.set_priority(first, 6)
        assert (await rig.take("a")).job_id == first
        for job_id, priority, code in (
            (first, 1, RefusalCode.WRONG_PHASE),
            (second, 1001, RefusalCode.INVALID_REQUEST),
        ):
            with pytest.raises(Refusal) as refused:
                await rig.engine.set_priority(job_id, priority)
            assert refused.value.code is code


async def test_a_live_preferred_worker_is_waited_for_and_then_no_longer() -> None:
    async with Rig(affinity_wait_s=3) as rig:
        await rig.worker("a")
        await rig.worker("b")
        parked = rig.park("b")
        job_id = await rig.submit(preferences=rig.prefer("a"))
        await rig.clock.advance(2.9)
        assert not parked.done()
        await rig.clock.advance(0.1)
        assert taken(parked) == job_id


async def test_a_preferred_worker_that_frees_in_time_gets_the_job() -> None:
    async with Rig(affinity_wait_s=3) as rig:
        await rig.worker("a")
        await rig.worker("b")
        other = rig.park("b")
        job_id = await rig.submit(preferences=rig.prefer("a"))
        await rig.clock.advance(2)
        assert (await rig.take("a")).job_id == job_id
        await rig.clock.advance(5)
        assert not other.done()


async def test_a_preferred_worker_that_is_not_live_is_not_waited_for() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("b")
        await rig.engine.unregister(WorkerId("a"), "gone")
        parked = rig.park("b")
        job_id = await rig.submit(preferences=rig.prefer("a"))
        await rig.settle()
        assert taken(parked) == job_id


async def test_the_wait_for_a_preferred_worker_begins_when_the_job_may_start() -> None:
    async with Rig(affinity_wait_s=3) as rig:
        await rig.worker("a")
        await rig.worker("b")
        parked = rig.park("b")
        job_id = await rig.submit(preferences=rig.prefer("a"), not_before=rig.clock.now() + 20)
        await rig.clock.advance(22.9)
        assert not parked.done()
        await rig.clock.advance(0.1)
        assert taken(parked) == job_id


async def test_a_job_restricted_to_a_worker_waits_for_it_however_long() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("b")
        parked = rig.park("b")
        job_id = await rig.submit(requirements=Requirements(workers=(WorkerId("a"),)))
        await rig.clock.advance(1000)
        assert not parked.done()
        await rig.worker("a")
        assert (await rig.take("a")).job_id == job_id


async def test_a_worker_is_lost_after_sixty_seconds_without_a_poll_or_heartbeat() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("b")
        await rig.worker("c")
        parked = rig.park("b")
        await rig.clock.advance(30)
        await rig.engine.heartbeat(WorkerId("c"), [])
        await rig.clock.advance(29)
        assert rig.fleet_events("offline") == []
        await rig.clock.advance(3)
        assert [event.worker_id for event in rig.fleet_events("offline")] == ["a"]
        await rig.clock.advance(30)
        assert [event.worker_id for event in rig.fleet_events("offline")] == ["a", "c"]
        assert not parked.done(), "a parked poll is a sign of life"
        with pytest.raises(Refusal) as refused:
            await rig.poll("a")
        assert refused.value.code is RefusalCode.NOT_FOUND


async def test_a_worker_whose_long_poll_was_answered_is_not_lost_before_its_first_heartbeat() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        parked = rig.park("a")
        await rig.clock.advance(200)
        job_id = await rig.submit()
        await rig.settle()
        assert taken(parked) == job_id
        await rig.clock.advance(5)
        assert rig.fleet_events("offline") == []


async def test_a_drained_worker_takes_nothing_more_also_as_a_new_process_until_an_operator_says_so() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        parked = rig.park("a")
        await rig.settle()
        await rig.engine.drain_worker(WorkerId("a"))
        job_id = await rig.submit()
        await rig.clock.advance(5)
        assert not parked.done()
        await rig.engine.unregister(WorkerId("a"), "drained")
        await rig.settle()
        assert parked.result() is None
        await rig.worker("a")
        assert await rig.poll("a") is None
        await rig.engine.resume_worker(WorkerId("a"))
        assert (await rig.take("a")).job_id == job_id


async def test_a_paused_worker_takes_nothing_until_it_may_go_on() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.engine.pause_worker(WorkerId("a"))
        job_id = await rig.submit(graph())
        parked = rig.park("a")
        await rig.clock.advance(5)
        assert not parked.done()
        await rig.engine.pause_worker(WorkerId("a"), False)
        await rig.settle()
        assert taken(parked) == job_id


@pytest.mark.parametrize("cooldown_s", [0.25, 10.25])
async def test_a_cooldown_wakes_its_worker_at_its_own_end_and_not_at_the_next_look(cooldown_s: float) -> None:
    async with Rig(cooldown_s=cooldown_s) as rig:
        await rig.worker("a")
        job_id = await rig.submit(retry_delay_s=0)
        await rig.fail(await rig.take("a"))
        parked = rig.park("a")
        await rig.clock.advance(cooldown_s - 0.125)
        assert not parked.done()
        await rig.clock.advance(0.125)
        assert taken(parked) == job_id


async def test_a_wake_up_that_was_lost_costs_a_second_and_never_a_job() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        parked = rig.park("a")
        await rig.settle()
        await rig.engine.pause_queue()
        job_id = await rig.submit()
        await rig.settle()
        # Behind the engine's back: nobody tells the parked slot.
        await rig.store.pause_queue(False)
        await rig.clock.advance(1)
        assert taken(parked) == job_id
