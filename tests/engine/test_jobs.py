"""The callers' door: references, what is unworkable, a retry by hand, why a job waits, and watching one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.engine._rig import Rig, graph

from comfyfleet.model.calls import ProgressReport
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import Fact, ProgressEvent, ProgressKind
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import JobId, TenantId, WorkerId
from comfyfleet.model.job import Attachment, Submission
from comfyfleet.model.requirement import Requirements
from comfyfleet.stores.memory import MemoryStore


async def test_the_same_reference_and_body_is_the_same_job_and_another_body_is_refused() -> None:
    async with Rig() as rig:
        first = await rig.engine.submit(Submission(graph(seed=1), reference="mine"))
        again = await rig.engine.submit(Submission(graph(seed=1), reference="mine"))
        assert (again.job_id, again.is_repeat) == (first.job_id, True)
        assert (await rig.engine.stats()).waiting == 1
        with pytest.raises(Refusal) as refused:
            await rig.engine.submit(Submission(graph(seed=2), reference="mine"))
        assert refused.value.code is RefusalCode.DUPLICATE_DIFFERS
        other = await rig.engine.submit(Submission(graph(seed=2), reference="mine", tenant=TenantId("bob")))
        assert other.job_id != first.job_id
        assert await rig.engine.by_reference("mine") == first.job_id
        assert await rig.engine.by_reference("nobody's") is None


async def test_a_repeat_is_answered_with_what_has_become_of_the_job() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        for expected in (Phase.QUEUED, Phase.LEASED, Phase.COMPLETED):
            answer = await rig.engine.submit(Submission(graph(), reference="mine"))
            assert answer.phase is expected
            if expected is Phase.QUEUED:
                leased = await rig.take("a")
            elif expected is Phase.LEASED:
                await rig.complete(leased)


async def test_of_a_job_that_does_not_wait_it_is_told_what_became_of_it() -> None:
    async with Rig(max_attempts=1) as rig:
        await rig.worker("a")

        async def told(job_id: JobId) -> str:
            return (await rig.engine.explain(job_id)).summary

        job_id = await rig.submit()
        leased = await rig.take("a")
        assert await told(job_id) == "the job is leased on a"
        await rig.fail(leased)
        assert await told(job_id) == (
            "the job failed (node_error; 1 attempt(s)): it broke. A retry starts a new round"
        )
        await rig.worker("b")
        await rig.engine.retry(job_id)
        leased = await rig.take("b")
        await rig.engine.cancel(job_id)
        assert await told(job_id) == "the job is leased on b and is asked to stop"
        await rig.complete(leased)
        assert await told(job_id) == "the job has completed on b"
        waiting = await rig.submit()
        await rig.engine.cancel(waiting)
        assert await told(waiting) == "the job was cancelled; a retry starts a new round"


async def test_what_no_live_worker_has_is_named_at_submit_and_the_job_waits_for_it() -> None:
    async with Rig() as rig:
        assert (await rig.engine.submit(Submission(graph()))).unworkable == ("no worker is connected",)
        await rig.worker("a", "KSampler", models=("y.safetensors",))
        await rig.worker("b", "Other", models=("y.safetensors",))
        answer = await rig.engine.submit(Submission(graph("KSampler", "x.safetensors")))
        assert len(answer.unworkable) == 1
        assert "x.safetensors" in answer.unworkable[0]
        await rig.worker("c", "KSampler", models=("x.safetensors",))
        assert (await rig.engine.submit(Submission(graph("KSampler", "x.safetensors")))).unworkable == ()
        assert (await rig.take("c")).job_id is not None


async def test_a_caller_who_asks_for_it_is_refused_what_nobody_can_run() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        with pytest.raises(Refusal) as refused:
            await rig.submit(graph("Rare"), require_workable=True)
        assert refused.value.code is RefusalCode.UNWORKABLE
        assert "Rare" in refused.value.message
        assert (await rig.engine.stats()).waiting == 0
        await rig.submit(graph(), require_workable=True)


@pytest.mark.parametrize("wrong", [{"priority": 1001}, {"max_attempts": 0}, {"urgency": "panic"}], ids=str)
async def test_a_submission_outside_the_bounds_is_refused(wrong: dict[str, Any]) -> None:
    async with Rig() as rig:
        with pytest.raises(Refusal) as refused:
            await rig.submit(**wrong)
        assert refused.value.code is RefusalCode.INVALID_REQUEST


async def test_a_retry_by_hand_opens_a_round_with_fresh_counters_and_the_old_place() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.worker("b")
        job_id = await rig.submit(max_attempts=1, deadline=rig.clock.now() + 5000)
        old = await rig.take("a")
        await rig.fail(old)
        later = await rig.submit()
        answer = await rig.engine.retry(job_id)
        assert answer.phase is Phase.QUEUED
        view = await rig.engine.get(job_id)
        dispatch = view.dispatch
        assert (dispatch.round, view.job.round) == (2, 2)
        assert (dispatch.charged, dispatch.worker_faults, dispatch.releases, dispatch.failed_on) == (
            0,
            0,
            0,
            (),
        )
        assert view.job.failure is None
        new = await rig.take("b")
        assert (new.job_id, new.ref.round, new.ref.number) == (job_id, 2, 2)
        before = await rig.engine.get(job_id)
        with pytest.raises(Refusal):
            await rig.complete(old)
        await rig.fail(old)
        after = await rig.engine.get(job_id)
        assert (after.job, after.dispatch) == (before.job, before.dispatch)
        assert (await rig.complete(new)).phase is Phase.COMPLETED
        assert (await rig.take("b")).job_id == later


async def test_a_job_that_waits_or_has_completed_is_not_retried() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        for step in ("queued", "completed"):
            with pytest.raises(Refusal) as refused:
                await rig.engine.retry(job_id)
            assert refused.value.code is RefusalCode.WRONG_PHASE
            if step == "queued":
                await rig.complete(await rig.take("a"))
        cancelled = await rig.submit()
        await rig.engine.cancel(cancelled)
        await rig.engine.retry(cancelled)
        assert (await rig.take("a")).job_id == cancelled


async def test_stats_count_jobs_workers_and_idle_slots() -> None:
    async with Rig() as rig:
        await rig.worker("a", slots=3)
        await rig.worker("b", "Other")
        await rig.engine.unregister(WorkerId("b"), "gone")
        done, broken, running = [await rig.submit(max_attempts=1) for _ in range(3)]
        await rig.complete(await rig.take("a"))
        await rig.fail(await rig.take("a"), FailureKind.INVALID_WORKFLOW)
        assert (await rig.take("a")).job_id == running
        rig.park("a")
        await rig.submit(graph("Other"))
        await rig.submit(not_before=rig.clock.now() + 9)
        await rig.engine.cancel(await rig.submit(graph("Other")))
        await rig.settle()
        stats = await rig.engine.stats()
        assert (stats.waiting, stats.delayed, stats.paused, stats.leased) == (1, 1, 0, 1)
        assert (stats.completed, stats.failed, stats.cancelled) == (1, 1, 1)
        assert (stats.workers, stats.idle_slots) == (1, 1)
        assert [dead.job_id for dead in await rig.engine.dead_letter()] == [broken]
        assert (await rig.engine.get(done)).job.phase is Phase.COMPLETED


async def test_stats_weigh_the_payloads_of_jobs_that_are_open() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        small, large = graph(text="x"), graph("Other", text="x" * 1000)
        picture = Attachment("a.png", b"\xff" * 5000, "1", "image")
        await rig.submit(small)
        light = (await rig.engine.stats()).payload_bytes
        assert len(json.dumps(small)) / 2 < light < 2 * len(json.dumps(small))
        await rig.complete(await rig.take("a"))
        assert (await rig.engine.stats()).payload_bytes == 0
        await rig.submit(large)
        heavy = (await rig.engine.stats()).payload_bytes
        assert light + 950 < heavy < light + 1050
        await rig.submit(large, attachments=(picture,))
        assert (await rig.engine.stats()).payload_bytes == 2 * heavy + 5000, "an attachment as it is"


# why is my job not running?


async def test_an_explanation_says_for_each_worker_what_is_in_the_way_and_names_the_nearest() -> None:
    async with Rig() as rig:
        await rig.worker("lacks both", "Other")
        await rig.worker("lacks one", "KSampler")
        job_id = await rig.submit(graph(model="x.safetensors"))
        told = await rig.engine.explain(job_id)
        reasons = {miss.worker_id: miss for miss in told.workers}
        assert "KSampler" in reasons[WorkerId("lacks both")].reason
        assert len(reasons[WorkerId("lacks both")].reasons) == 2
        assert "x.safetensors" in reasons[WorkerId("lacks one")].reason
        assert told.nearest == "lacks one"
        assert "lacks one" in told.summary
        assert told.able == ()


async def test_of_workers_that_are_gone_an_explanation_names_the_one_seen_last() -> None:
    async with Rig() as rig:
        for name, why in (("left long ago", "drain"), ("unreachable now", "connection refused")):
            await rig.worker(name, "KSampler")
            await rig.engine.unregister(WorkerId(name), why)
            await rig.clock.advance(900)
        told = await rig.engine.explain(await rig.submit())
        assert told.nearest == "unreachable now"
        assert "connection refused" in told.summary


async def test_an_explanation_tells_of_every_state_a_worker_can_be_in() -> None:
    async with Rig(max_failures_before_block=1) as rig:
        for name in ("blocked", "offline", "draining", "paused", "able"):
            await rig.worker(name)
        await rig.submit(max_attempts=1)
        await rig.fail(await rig.take("blocked"))
        await rig.engine.unregister(WorkerId("offline"), "gone")
        await rig.engine.drain_worker(WorkerId("draining"))
        await rig.engine.pause_worker(WorkerId("paused"))
        first, second = await rig.submit(), await rig.submit()
        told = await rig.engine.explain(second)
        reasons = {miss.worker_id: miss.reason for miss in told.workers}
        assert set(reasons) == {"blocked", "offline", "draining", "paused"}
        assert "blocked for this workflow for another 60 s" in reasons[WorkerId("blocked")]
        for name in ("offline", "draining", "paused"):
            assert name in reasons[WorkerId(name)]
        assert (told.able, told.position) == (("able",), 1)
        assert told.estimate is not None and told.estimate.is_rough, "the workflow never ran"
        await rig.complete(await rig.take("able"), seconds=8)
        assert (await rig.engine.explain(second)).position == 0
        third = await rig.submit()
        await rig.clock.advance(1)
        assert (await rig.engine.explain(third)).estimated_start_s == 8
        assert "completed" in (await rig.engine.explain(first)).summary


async def test_an_explanation_tells_what_the_job_itself_waits_for() -> None:
    async with Rig() as rig:
        job_id = await rig.submit()
        assert (await rig.engine.explain(job_id)).summary == "no worker is connected"
        await rig.worker("a")
        await rig.worker("b")
        await rig.engine.pause(job_id)
        assert "paused" in (await rig.engine.explain(job_id)).summary
        delayed = await rig.submit(not_before=rig.clock.now() + 12)
        assert "12.0 s" in (await rig.engine.explain(delayed)).summary
        held = await rig.submit(preferences=rig.prefer("a"))
        assert "it waits for a preferred worker" in (await rig.engine.explain(held)).summary
        await rig.engine.pause_queue()
        assert (await rig.engine.explain(held)).summary == "the queue is paused"
        await rig.engine.pause_queue(False)
        leased = await rig.take("a")
        assert "leased on a" in (await rig.engine.explain(leased.job_id)).summary
        kept = await rig.submit(requirements=Requirements(workers=(WorkerId("b"),)))
        assert (await rig.engine.explain(kept)).able == ("b",)


# watching


async def watched(rig: Rig, job_id: JobId, after: int = 0) -> list[Fact | ProgressEvent]:
    return [event async for event in rig.engine.watch(job_id, after)]


async def test_a_watcher_sees_every_fact_once_in_order_and_ends_with_the_last() -> None:
    async with Rig(max_failures_before_block=9) as rig:
        await rig.worker("a")
        job_id = await rig.submit(retry_delay_s=0)
        early = asyncio.ensure_future(watched(rig, job_id))
        await rig.settle()
        await rig.fail(await rig.take("a"))
        middle = asyncio.ensure_future(watched(rig, job_id, after=2))
        await rig.settle()
        leased = await rig.take("a")
        await rig.engine.progress([ProgressReport(leased.ref, ProgressKind.PROGRESS, {"value": 1})])
        await rig.settle()
        await rig.complete(leased)
        await rig.settle()
        expected = [(1, "queued"), (2, "leased"), (3, "retrying"), (4, "leased"), (5, "completed")]
        for seen, start in ((early.result(), 0), (middle.result(), 2), (await watched(rig, job_id, 3), 3)):
            facts = [(event.number, event.kind.value) for event in seen if isinstance(event, Fact)]
            assert facts == expected[start:]
        assert len([event for event in early.result() if isinstance(event, ProgressEvent)]) == 1


async def test_watching_an_unknown_job_is_refused() -> None:
    async with Rig() as rig:
        with pytest.raises(Refusal) as refused:
            await watched(rig, JobId("nobody"))
        assert refused.value.code is RefusalCode.NOT_FOUND


async def test_a_watcher_ends_even_if_the_job_ends_between_its_two_first_looks() -> None:
    class Slow(MemoryStore):
        admission_control: asyncio.Event | None = None

        async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]:
            if self.admission_control is not None:
                await self.admission_control.wait()
            return await super().facts(job_id, after)

    async with Rig(Slow) as rig:
        assert isinstance(rig.store, Slow)
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        rig.store.admission_control = asyncio.Event()
        watcher = asyncio.ensure_future(watched(rig, job_id))
        await rig.settle()
        await rig.complete(leased)
        rig.store.admission_control.set()
        await rig.settle()
        assert watcher.done()
        assert [event.kind.value for event in watcher.result()] == ["queued", "leased", "completed"]


async def test_a_cancel_that_arrives_while_a_failure_is_being_judged_is_not_forgotten() -> None:
    class Slow(MemoryStore):
        admission_control: asyncio.Event | None = None

        async def now(self) -> float:
            admission_control, self.admission_control = self.admission_control, None
            if admission_control is not None:
                await admission_control.wait()
            return await super().now()

    async with Rig(Slow, max_failures_before_block=9) as rig:
        assert isinstance(rig.store, Slow)
        await rig.worker("a")
        job_id = await rig.submit()
        leased = await rig.take("a")
        admission_control = rig.store.admission_control = asyncio.Event()
        failing = asyncio.ensure_future(rig.fail(leased))
        await rig.settle()
        await rig.engine.cancel(job_id)
        admission_control.set()
        assert (await failing).phase is Phase.CANCELLED
        assert (await rig.engine.get(job_id)).job.phase is Phase.CANCELLED
