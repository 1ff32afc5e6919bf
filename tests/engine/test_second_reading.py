"""What a second reader found could go wrong, and must not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.engine._rig import Rig, graph

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.dispatch import Phase, Write, WriteResult
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.fact import Fact
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import Attachment, Submission, Timeouts
from comfyfleet.model.requirement import Preferences, Requirements
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.sqlite.store import SqliteStore


async def test_a_limit_on_processing_time_keeps_a_job_from_workers_known_to_be_slower() -> None:
    async with Rig() as rig:
        await rig.worker("slow", vram_gb=8)
        await rig.submit()
        await rig.complete(await rig.take("slow"), seconds=100)
        limited = await rig.submit(requirements=Requirements(max_processing_s=5))
        assert await rig.poll("slow") is None
        why = await rig.engine.explain(limited)
        assert "takes longer for this workflow than the 5 s" in why.summary
        await rig.worker("unknown", vram_gb=24)
        assert (await rig.take("unknown")).job_id == limited


async def test_a_job_that_needs_a_bigger_card_goes_back_to_the_small_one_when_the_big_one_leaves() -> None:
    async with Rig(cooldown_s=5, bigger_card_wait_s=60, worker_lost_s=1e9) as rig:
        await rig.worker("small", vram_gb=8)
        await rig.worker("big", vram_gb=48)
        job_id = await rig.submit(preferences=Preferences(workers=(WorkerId("small"),)))
        await rig.fail(await rig.take("small"), FailureKind.OUT_OF_MEMORY)
        # While the bigger card is there the job waits for it, however long it is busy.
        await rig.clock.advance(270)
        assert await rig.poll("small") is None
        await rig.engine.remove_worker(WorkerId("big"))
        parked = rig.park("small")
        await rig.clock.advance(61)
        leased = parked.result()
        assert leased is not None
        assert leased.job_id == job_id


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline": math.nan},
        {"not_before": math.inf},
        {"timeouts": Timeouts(total_s=math.nan)},
        {"timeouts": Timeouts(stall_s=-1.0)},
        {"retry_delay_s": math.inf},
        {"requirements": Requirements(max_processing_s=math.nan)},
    ],
)
async def test_a_time_that_is_no_time_is_refused(wrong: dict[str, Any]) -> None:
    async with Rig() as rig:
        with pytest.raises(Refusal, match="must be a number of seconds"):
            await rig.submit(**wrong)


async def test_a_failure_says_on_which_worker_even_before_the_job_was_accepted_there() -> None:
    async with Rig(max_failures_before_block=1, retry_base_s=0.0) as rig:
        await rig.worker("a")
        await rig.worker("b")
        job_id = await rig.submit(max_attempts=2)
        for name in ("a", "b"):
            await rig.fail(await rig.take(name), FailureKind.ACCEPT_TIMEOUT)
        told = [event.data for event in rig.events if isinstance(event, Fact) and event.data]
        assert [(data["worker_id"], data["lease"]) for data in told if "kind" in data] == [("a", 1), ("b", 2)]
        assert (await rig.engine.get(job_id)).job.worker_id == "b"


async def test_what_was_attached_to_a_completed_job_is_not_kept_and_its_id_still_names_it() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        submission = Submission(
            graph(), reference="mine", attachments=(Attachment("x.png", b"x" * 1000, "1", "image"),)
        )
        job_id = (await rig.engine.submit(submission)).job_id
        leased = await rig.take("a")
        assert leased.attachments == submission.attachments
        await rig.complete(leased)
        assert (await rig.engine.get(job_id)).job.payload.attachments == ()
        again = await rig.engine.submit(submission)
        assert (again.job_id, again.is_repeat) == (job_id, True)


class Refusing(MemoryStore):
    """A store whose disk is full."""

    is_full = False
    writes = 0

    async def write(self, write: Write) -> WriteResult | None:
        self.writes += 1
        if self.is_full:
            raise Fault("the disk is full")
        return await super().write(write)


async def test_a_duty_that_cannot_be_done_is_tried_again_at_the_next_sweep_and_not_in_a_storm() -> None:
    async with Rig(store=Refusing) as rig:
        assert isinstance(rig.store, Refusing)
        job_id = await rig.submit(timeouts=Timeouts(total_s=5))
        rig.store.is_full = True
        await rig.clock.advance(15)
        assert 3 <= rig.store.writes <= 10
        rig.store.is_full = False
        await rig.clock.advance(3)
        assert (await rig.engine.get(job_id)).dispatch.phase is Phase.FAILED


async def test_whoever_watches_a_job_is_let_go_when_the_engine_closes() -> None:
    rig = Rig()
    async with rig:
        job_id = await rig.submit()
        watched = rig.engine.watch(job_id)
        first = await anext(watched)
        assert isinstance(first, Fact)
        await rig.engine.close()
        assert [event async for event in watched] == []


async def test_more_jobs_than_one_purge_takes_do_not_pile_up() -> None:
    async with Rig(keep_completed_s=10, sweep_s=1) as rig:
        await rig.worker("a")
        for _ in range(50):
            await rig.submit()
            await rig.complete(await rig.take("a"))
        await rig.clock.advance(120)
        assert (await rig.engine.stats()).completed == 0


async def test_a_changed_priority_does_not_make_the_same_job_another() -> None:
    async with Rig() as rig:
        submission = Submission(graph(), reference="mine", priority=1)
        job_id = (await rig.engine.submit(submission)).job_id
        await rig.engine.set_priority(job_id, 7)
        assert (await rig.engine.submit(submission)).is_repeat
        assert (await rig.engine.get(job_id)).job.priority == 7


async def test_an_engine_that_cannot_start_lets_go_of_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: SqliteStore) -> list[WorkerRecord]:
        raise Fault("the disk is away")

    with monkeypatch.context() as patch:
        patch.setattr(SqliteStore, "workers", fail)
        with pytest.raises(Fault, match="the disk is away"):
            await Engine(SqliteStore(tmp_path / "fleet.db", SystemClock())).__aenter__()
    async with Engine(SqliteStore(tmp_path / "fleet.db", SystemClock())) as engine:
        assert await engine.workers() == []
