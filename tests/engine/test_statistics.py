"""What several engines count and learn at the same time is all kept, and undoes nothing that an operator says."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from tests.engine._rig import graph, offers
from tests.engine.test_several_engines import Engines, SharedStore

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, FailureReport, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import JobResult, Submission

A = WorkerId("a")


class SlowStore(SharedStore):
    """Each call takes a turn of the loop before it is done and one before it is answered."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not inspect.iscoroutinefunction(found):
            return found

        async def slowly(*args: Any, **named: Any) -> Any:
            await asyncio.sleep(0)
            answer = await found(*args, **named)
            await asyncio.sleep(0)
            return answer

        return slowly


async def begun(it: Engines, engine: Engine, number: int, **options: Any) -> LeasedJob:
    await it.first.submit(Submission(graph(), **options))
    leased = await engine.poll(Poll(A, PollId(f"poll-{number}"), 0))
    assert leased is not None
    await engine.heartbeat(A, [leased.ref])
    return leased


async def after(turns: int, work: Any) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    await work


@pytest.mark.parametrize("ends", ["completes", "fails", "registers"])
async def test_no_report_undoes_a_pause_or_a_drain_that_is_made_at_another_engine_meanwhile(
    ends: str,
) -> None:
    async with Engines(SlowStore, cooldown_s=1.0) as it:
        await it.first.register(RegisterWorker(A, offers("KSampler"), 100))
        await it.second.sweep()
        for turns in range(0, 40, 2):
            await it.second.pause_worker(A, False)
            await it.clock.advance(5)
            leased = await begun(it, it.first, turns, max_attempts=1)
            if ends == "completes":
                work: Any = it.first.complete(Completion(leased.ref, JobResult(), 1.0))
            elif ends == "fails":
                work = it.first.fail(FailureReport(leased.ref, Failure(FailureKind.NODE_ERROR, "it broke")))
            else:
                await it.first.complete(Completion(leased.ref, JobResult(), 1.0))
                work = it.first.register(RegisterWorker(A, offers("KSampler", "Other"), 100))
            await asyncio.gather(work, after(turns, it.second.pause_worker(A)))
            (worker,) = await it.store.workers()
            assert worker.is_paused, f"a pause {turns} turns later"


async def test_runs_that_end_at_two_engines_are_all_counted() -> None:
    async with Engines(SlowStore) as it:
        await it.first.register(RegisterWorker(A, offers("KSampler"), 100))
        await it.second.sweep()
        for number in range(5):
            leases = [await begun(it, it.first, 2 * number), await begun(it, it.first, 2 * number + 1)]
            await asyncio.gather(
                *(
                    engine.complete(Completion(leased.ref, JobResult(), 2.0))
                    for engine, leased in zip((it.first, it.second), leases, strict=True)
                )
            )
        (worker,) = await it.store.workers()
        assert (worker.completed, worker.busy_s) == (10, 20.0)
        stats = await it.store.get_workflow_stats(leases[0].workflow_hash)
        assert stats is not None
        assert [(each.mean_s, each.runs) for each in stats.durations.values()] == [(2.0, 10)]


async def test_a_card_that_was_too_small_at_one_engine_is_soon_known_at_the_other() -> None:
    async with Engines(SlowStore) as it:
        await it.first.register(RegisterWorker(A, offers("KSampler", vram_gb=8), 100))
        big = WorkerId("big")
        await it.first.register(RegisterWorker(big, offers("KSampler", vram_gb=24), 100))
        await it.second.sweep()
        leased = await begun(it, it.second, 1)
        await it.second.complete(Completion(leased.ref, JobResult(), 2.0))
        leased = await begun(it, it.first, 2)
        failure = Failure(FailureKind.OUT_OF_MEMORY, "too small", vram_gb=8.0)
        await it.first.fail(FailureReport(leased.ref, failure))
        await it.clock.advance(15)
        submitted = await it.second.submit(Submission(graph()))
        dispatch = await it.store.load(submitted.job_id)
        assert dispatch is not None and dispatch.relaxed_class is not None, "it asks for more than 8 GB"
