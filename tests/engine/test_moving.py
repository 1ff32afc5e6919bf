"""A move between two stores: nothing is lost, nothing runs twice, and what cannot move is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from comfyfleet.engine.store_move import MoveProgress, SkipReason, StoreMove
from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.dispatch import AttemptOutcome, Change, Dispatch, Phase, Readiness
from comfyfleet.model.errors import Refusal
from comfyfleet.model.ids import JobId, WorkflowHash
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.ports import RecordQuery, TransferableStore
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.contract.job_transfer import whole
from comfyfleet.testing.contract.store_bench import (
    FAST,
    FOR_BOTH,
    FOR_FAST,
    HASH,
    SLOW,
    A,
    B,
    StoreBench,
    completion,
    failure,
    tenant,
)


class Two:
    """A source and a target on the memory store. Job ids of the two differ, as those of two fleets do."""

    def __init__(self) -> None:
        self.source, self.target = StoreBench(MemoryStore), StoreBench(MemoryStore)
        for _ in range(1000):
            self.target.new_number()

    def move(self, tell: Callable[[MoveProgress], None] = lambda _: None) -> StoreMove:
        return StoreMove(self.from_store, self.to_store, token="t0", on_progress=tell)

    @property
    def from_store(self) -> TransferableStore:
        assert isinstance(self.source.store, MemoryStore)
        return self.source.store

    @property
    def to_store(self) -> TransferableStore:
        assert isinstance(self.target.store, MemoryStore)
        return self.target.store

    async def left(self) -> list[JobId]:
        listed = await self.from_store.records.listing(RecordQuery(limit=1000))
        return [job.job_id for job in listed]


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    two = Two()
    await two.source.open()
    await two.target.open()
    yield two


async def test_everything_moves_in_its_order_behind_what_is_there(two: Two) -> None:
    there = await two.target.enqueue()
    jobs = [await two.source.enqueue(FOR_FAST if number % 3 else FOR_BOTH) for number in range(50)]
    histories = [await whole(two.source, job.job_id) for job in jobs]
    told: list[int] = []
    moved = await two.move(lambda moved: told.append(moved.jobs)).run()
    assert (moved.jobs, moved.by_phase, moved.stayed) == (50, {Phase.QUEUED: 50}, [])
    assert told == [20, 40, 50]
    assert await two.left() == []
    assert await two.from_store.is_queue_paused()
    assert not await two.to_store.is_queue_paused()
    order = [each.job_id for _ in range(51) if (each := await two.target.lease_next()) is not None]
    assert order == [there.job_id, *(job.job_id for job in jobs)]
    for history in histories:
        facts = await two.to_store.facts(history.job.job_id)
        assert tuple(facts[:-1]) == history.facts
        assert facts[-1].number == len(history.facts) + 1


async def test_what_was_learned_blocked_and_served_moves_along(two: Two) -> None:
    for name, seconds in (("ann", 40.0), ("bob", 5.0)):
        await two.source.enqueue(tenant=tenant(name))
        await two.from_store.fair_share.charge(tenant(name), seconds)
    await two.to_store.fair_share.charge(tenant("bob"), 1.0)
    ann, own_bob = TenantTerms(tenant("ann"), 2.0, 7), TenantTerms(tenant("bob"), 3.0)
    for terms in (ann, TenantTerms(tenant("bob"), 5.0)):
        await two.from_store.fair_share.put_terms(terms)
    await two.to_store.fair_share.put_terms(own_bob)
    workflow_stats = [WorkflowStats(HASH, {}, 8.0), WorkflowStats(WorkflowHash("new"), {}, 4.0)]
    for stats in workflow_stats:
        await two.from_store.put_workflow_stats(stats)
    own = WorkflowStats(HASH, {}, 24.0)
    await two.to_store.put_workflow_stats(own)
    block = Block(A, HASH, BlockReason.FAILURES, 1, 1e12)
    await two.from_store.put_block(block)
    moved = await two.move().run()
    assert (moved.workflow_stats, moved.blocks) == (1, 1)
    assert await two.to_store.get_workflow_stats(HASH) == own, "what the target has learned itself is newer"
    assert await two.to_store.get_workflow_stats(WorkflowHash("new")) == workflow_stats[1]
    assert await two.to_store.blocks() == [block]
    served = [(await two.to_store.fair_share.get(tenant(name))).virtual_time for name in ("ann", "bob")]
    assert served == [40.0, 5.0]
    assert await two.to_store.fair_share.terms() == [ann, own_bob]
    first = await two.target.lease_next(B)
    assert first is not None and first.tenant == "bob", "who was served less comes first, as before"
    again = await two.move().run()
    assert (again.jobs, again.workflow_stats, again.blocks) == (0, 0, 0)


async def test_documents_move_along_and_what_the_target_has_under_their_name_stays(two: Two) -> None:
    source, target = two.from_store.documents, two.to_store.documents
    names = [f"key-{number:02d}" for number in range(45)]
    for name in names:
        assert await source.put("keys", name, b"moved", version=None)
    assert await source.put("audit", "entry", bytes(range(256)), version=0)
    assert await target.put("keys", "key-00", b"own", version=0)
    assert (await two.move().dry_run()).documents == 45
    assert await target.collections() == ["keys"], "a rehearsal changes nothing"
    assert (await two.move().run()).documents == 45
    kept = {each.name: each.body for each in await target.listing("keys")}
    assert kept == dict.fromkeys(names, b"moved") | {"key-00": b"own"}
    entry = await target.get("audit", "entry")
    assert entry is not None and entry.body == bytes(range(256))
    assert (await two.move().run()).documents == 0


async def test_a_target_that_has_never_heard_of_a_class_can_take_its_jobs(two: Two) -> None:
    job = await two.source.enqueue(FOR_FAST)
    fresh = StoreBench(MemoryStore)
    assert isinstance(fresh.store, MemoryStore)
    moved = await StoreMove(two.from_store, fresh.store, token="t").run()
    assert (moved.jobs, moved.classes) == (1, 1)
    table = await fresh.store.table()
    assert table.classes == {FOR_FAST.key: FOR_FAST}
    assert await fresh.store.put_profile(FAST, [FOR_FAST.key], version=table.version)
    assert await fresh.peek() == [job.job_id]


async def test_jobs_that_have_ended_and_jobs_that_stand_aside_move_too(two: Two) -> None:
    _, done = await two.source.leased(reference="done")
    assert await two.from_store.write(completion(done)) is not None
    _, broken = await two.source.leased()
    assert await two.from_store.write(failure(broken)) is not None
    await two.source.enqueue(standing=Readiness.PAUSED)
    before = await two.from_store.counts()
    moved = await two.move().run()
    assert moved.by_phase == {Phase.COMPLETED: 1, Phase.FAILED: 1, Phase.QUEUED: 1}
    assert await two.to_store.counts() == before
    found = await two.to_store.records.by_reference(tenant("default"), "done")
    assert found is not None and found.result is not None


async def test_a_reference_that_is_taken_is_told_and_its_job_stays(two: Two) -> None:
    other = await two.target.enqueue(reference="mine")
    jobs = [await two.source.enqueue(reference=name) for name in ("first", "mine", "third")]
    moved = await two.move().run()
    assert moved.jobs == 2
    (stayed,) = moved.stayed
    assert (stayed.job_id, stayed.why, stayed.reference, stayed.other_job_id) == (
        jobs[1].job_id,
        SkipReason.REFERENCE,
        "mine",
        other.job_id,
    )
    assert await two.left() == [jobs[1].job_id]
    assert await two.to_store.load(jobs[1].job_id) is None


async def test_many_that_stay_do_not_keep_the_others_back(two: Two) -> None:
    for number in range(90):
        if number % 2:
            await two.target.enqueue(reference=str(number))
        await two.source.enqueue(reference=str(number))
    moved = await two.move().run()
    assert (moved.jobs, len(moved.stayed)) == (45, 45)
    assert len(await two.left()) == 45


async def test_running_jobs_are_waited_for_or_the_move_is_refused_with_the_queue_as_it_was(two: Two) -> None:
    await two.source.enqueue()
    _, ref = await two.source.leased()
    with pytest.raises(Refusal, match=r"1 jobs of the source are running \(on a\).*expires in 10 s"):
        await two.move().run()
    assert not await two.from_store.is_queue_paused()
    assert (await two.to_store.counts()).by_phase[Phase.QUEUED] == 0
    assert await two.from_store.write(completion(ref)) is not None
    assert (await two.move().run(wait_s=1)).jobs == 2


async def test_a_lease_that_has_run_out_is_given_back_and_its_job_moves(two: Two) -> None:
    _, ref = await two.source.leased()
    doomed, _ = await two.source.leased()
    assert await two.source.change(doomed, Change(cancel_requested_at=1.0)) is not None
    await two.source.clock.advance(11)
    moved = await two.move().run()
    assert (moved.released, moved.by_phase) == (2, {Phase.QUEUED: 1, Phase.CANCELLED: 1})
    (attempt,) = await two.to_store.attempts(ref.job_id)
    assert (attempt.outcome, attempt.charged_to) == (AttemptOutcome.RELEASED, None)
    assert await two.to_store.write(completion(ref)) is None, "the old lease is good for nothing"


async def test_one_store_under_two_names_is_refused_and_keeps_its_jobs(two: Two) -> None:
    job = await two.source.enqueue()
    with pytest.raises(Refusal, match="the same store"):
        await StoreMove(two.from_store, two.from_store, token="t").run()
    assert await two.left() == [job.job_id]
    assert await two.from_store.blocks() == []
    assert not await two.from_store.is_queue_paused()


async def test_a_trial_tells_what_would_be_and_changes_nothing(two: Two) -> None:
    await two.target.enqueue(reference="mine")
    await two.source.enqueue(reference="mine")
    await two.source.enqueue()
    await two.source.leased()
    before = (await two.source.state(), await two.target.state())
    moved = await two.move().dry_run()
    assert (moved.jobs, [each.why for each in moved.stayed]) == (1, [SkipReason.REFERENCE, SkipReason.LEASED])
    assert (await two.source.state(), await two.target.state()) == before


# interruptions and others


class Interrupted(Exception):
    pass


def fails_once(original: Callable[..., Coroutine[Any, Any, Any]], *, after: int, is_done: bool) -> Any:
    calls = 0

    async def call(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            if is_done:
                await original(*arguments)
            raise Interrupted
        return await original(*arguments)

    return call


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(("side", "name"), [("target", "import_jobs"), ("source", "discard")])
async def test_a_move_that_was_cut_off_at_any_step_goes_on_when_it_is_begun_again(
    two: Two, monkeypatch: pytest.MonkeyPatch, side: str, name: str, is_done: bool
) -> None:
    jobs = [await two.source.enqueue() for _ in range(70)]
    moving = two.from_store.job_transfer if side == "source" else two.to_store.job_transfer
    with monkeypatch.context() as patch:
        patch.setattr(moving, name, fails_once(getattr(moving, name), after=2, is_done=is_done))
        with pytest.raises(Interrupted):
            await two.move().run()
    assert await two.from_store.is_queue_paused()
    moved = await two.move().run()
    assert moved.stayed == []
    assert await two.left() == []
    order = [each.job_id for _ in range(71) if (each := await two.target.lease_next()) is not None]
    assert order == [job.job_id for job in jobs]


def before_discard(
    two: Two, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Coroutine[Any, Any, Any]]
) -> None:
    """Between the moment the target has a job and the moment the source lets it go."""
    original, is_first = two.from_store.job_transfer.discard, True

    async def discard(jobs: list[Dispatch]) -> list[bool]:
        nonlocal is_first
        if is_first:
            is_first = False
            await act()
        return await original(jobs)

    monkeypatch.setattr(two.from_store.job_transfer, "discard", discard)


async def test_a_job_changed_at_the_source_in_between_moves_as_it_is_then(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [await two.source.enqueue() for _ in range(3)]
    before_discard(two, monkeypatch, lambda: two.source.cancel(jobs[1]))
    moved = await two.move().run()
    assert (moved.jobs, moved.stayed) == (3, [])
    found = await two.to_store.load(jobs[1].job_id)
    assert found is not None and found.phase is Phase.CANCELLED


async def test_a_job_that_stays_is_told_once_though_its_page_is_read_again(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.target.enqueue(reference="mine")
    jobs = [await two.source.enqueue(reference=name) for name in ("first", "mine", "third")]
    before_discard(two, monkeypatch, lambda: two.source.cancel(jobs[0]))
    moved = await two.move().run()
    assert moved.jobs == 2
    assert [(each.job_id, each.why) for each in moved.stayed] == [(jobs[1].job_id, SkipReason.REFERENCE)]


async def test_a_job_changed_without_a_fact_after_a_move_that_was_cut_off_moves_as_it_is_then(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await two.source.enqueue()
    with monkeypatch.context() as patch:
        discard = two.from_store.job_transfer.discard
        patch.setattr(two.from_store.job_transfer, "discard", fails_once(discard, after=1, is_done=False))
        with pytest.raises(Interrupted):
            await two.move().run()
    assert await two.source.change(job, Change(priority=9, is_awaited=True)) is not None
    moved = await two.move().run()
    assert (moved.jobs, moved.stayed) == (1, [])
    found = await two.to_store.load(job.job_id)
    assert found is not None and (found.priority, found.is_awaited) == (9, True)


async def test_a_job_both_sides_went_on_with_stays_and_is_told(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await two.source.enqueue()

    async def both() -> None:
        assert await two.source.cancel(job) is not None
        assert await two.target.lease_next() is not None

    before_discard(two, monkeypatch, both)
    moved = await two.move().run()
    assert [(each.job_id, each.why) for each in moved.stayed] == [(job.job_id, SkipReason.CHANGED)]
    assert await two.left() == [job.job_id]
    again = await two.move().run()
    assert [each.why for each in again.stayed] == [SkipReason.CHANGED], "and every time it is asked for"


async def test_a_job_that_ended_at_the_target_before_the_move_went_on_is_let_go_at_the_source(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.source.enqueue()
    with monkeypatch.context() as patch:
        patch.setattr(
            two.from_store.job_transfer,
            "discard",
            fails_once(two.from_store.job_transfer.discard, after=1, is_done=False),
        )
        with pytest.raises(Interrupted):
            await two.move().run()
    taken = await two.target.lease_next(B, SLOW)
    assert taken is not None
    assert await two.to_store.write(completion(taken.lease_ref())) is not None
    moved = await two.move().run()
    assert (moved.jobs, moved.stayed) == (1, [])
    assert await two.left() == []
    found = await two.to_store.load(taken.job_id)
    assert found is not None and found.phase is Phase.COMPLETED
