"""The store contract for the eligibility matrix, the choice of jobs, leases and due times."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from comfyfleet.model.block import Block, BlockReason, Pair
from comfyfleet.model.dispatch import (
    AtRevision,
    AttemptOutcome,
    Change,
    Dispatch,
    LeaseRef,
    Phase,
    Readiness,
    Stop,
    Write,
)
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import JobId, LeaseToken, ProfileKey, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.testing.contract.store_bench import (
    FAST,
    FOR_BOTH,
    FOR_FAST,
    HASH,
    QUEUED,
    SLOW,
    A,
    B,
    StoreBench,
    completion,
    failure,
    release,
    tenant,
    unknown_class,
)
from comfyfleet.testing.leases import lease_next

RAISED = RequirementClass(Requirements(models=("other",)))


class LeaseContract:
    # eligibility matrix

    async def test_a_class_or_profile_that_saw_an_old_version_of_the_table_is_refused(
        self, bench: StoreBench
    ) -> None:
        old = (await bench.store.table()).version
        assert await bench.store.put_class(RAISED, [FAST], version=old)
        before = await bench.state()
        assert not await bench.store.put_profile(ProfileKey("new"), [], version=old)
        assert not await bench.store.put_class(RequirementClass(Requirements(models=("x",))), [], version=old)
        assert await bench.state() == before
        assert await bench.store.put_profile(
            ProfileKey("new"), [RAISED.key], version=(await bench.store.table()).version
        )

    async def test_a_profile_that_comes_later_sees_what_already_waits(self, bench: StoreBench) -> None:
        job = await bench.enqueue(FOR_FAST)
        table = await bench.store.table()
        late = ProfileKey("late")
        assert await bench.store.put_profile(late, [FOR_FAST.key], version=table.version)
        assert await bench.peek(B, late) == [job.job_id]
        await bench.store.drop_profiles([late])
        assert await bench.peek(B, late) == []
        assert late not in (await bench.store.table()).profiles

    async def test_a_job_of_an_unknown_class_is_not_taken_in(self, bench: StoreBench) -> None:
        known = await bench.enqueue()
        before = await bench.state()
        stranger = msgspec.structs.replace(known, job_id=JobId("stranger"), class_key=unknown_class())
        job = Job(stranger.job_id, stranger.tenant, HASH, 0.0, Submission({}), reference="r")
        assert await bench.store.enqueue(stranger, job, QUEUED) is None
        relaxing = msgspec.structs.replace(known, job_id=JobId("stranger"), relaxed_class=unknown_class())
        assert await bench.store.enqueue(relaxing, job, QUEUED) is None
        assert await bench.store.load(JobId("stranger")) is None
        assert await bench.store.records.by_reference(stranger.tenant, "r") is None
        assert await bench.state() == before

    async def test_a_second_job_under_one_reference_is_answered_with_the_first(
        self, bench: StoreBench
    ) -> None:
        first = await bench.enqueue()
        named = msgspec.structs.replace(first, job_id=JobId("named"))
        job = Job(named.job_id, named.tenant, HASH, 0.0, Submission({}), reference="r")
        assert await bench.store.enqueue(named, job, QUEUED) is not None
        before = await bench.state()
        again = msgspec.structs.replace(first, job_id=JobId("again"))
        answer = await bench.store.enqueue(again, msgspec.structs.replace(job, job_id=again.job_id), QUEUED)
        assert answer is not None
        assert (answer.dispatch.job_id, answer.facts) == ("named", ())
        assert await bench.store.load(JobId("again")) is None
        assert await bench.state() == before

    # choosing

    async def test_a_profile_sees_only_the_classes_that_fit_it(self, bench: StoreBench) -> None:
        picky, easy = await bench.enqueue(FOR_FAST), await bench.enqueue(FOR_BOTH)
        assert await bench.peek(A, FAST) == [picky.job_id, easy.job_id]
        assert await bench.peek(B, SLOW) == [easy.job_id]
        taken = await bench.lease_next(B, SLOW)
        assert taken is not None
        assert taken.job_id == easy.job_id
        assert await bench.lease_next(B, SLOW) is None

    async def test_a_lease_by_name_is_refused_to_a_profile_that_may_not_take_the_class(
        self, bench: StoreBench
    ) -> None:
        """The job may have moved to another class since it was read."""
        picky = await bench.enqueue(FOR_FAST)
        offer = bench.offer(B, SLOW)
        before = await bench.state()
        assert await bench.store.lease(picky.job_id, offer) is None
        assert await bench.state() == before

    async def test_the_order_is_priority_then_the_tenants_time_then_age(self, bench: StoreBench) -> None:
        first = await bench.enqueue(tenant=tenant("ann"))
        second = await bench.enqueue(tenant=tenant("bob"))
        urgent = await bench.enqueue(priority=1, tenant=tenant("ann"))
        low = await bench.enqueue(priority=-1)
        assert await bench.peek() == [each.job_id for each in (urgent, first, second, low)]
        await bench.store.fair_share.charge(tenant("ann"), 10.0)
        assert await bench.peek() == [each.job_id for each in (urgent, second, first, low)]
        leased = [await bench.lease_next() for _ in range(4)]
        assert [each and each.job_id for each in leased] == [
            each.job_id for each in (urgent, second, first, low)
        ]

    async def test_peek_takes_nothing_and_leaves_out_what_it_is_told_to(self, bench: StoreBench) -> None:
        await bench.enqueue(workflow_hash=WorkflowHash("x"))
        other = await bench.enqueue(workflow_hash=WorkflowHash("y"))
        before = await bench.state()
        assert await bench.peek(skip=frozenset({"x"})) == [other.job_id]
        assert await bench.state() == before

    async def test_positions_count_those_of_higher_priority_and_the_older_of_the_same(
        self, bench: StoreBench
    ) -> None:
        first, second = await bench.enqueue(), await bench.enqueue(FOR_FAST)
        urgent = await bench.enqueue(priority=5)
        positions = [await bench.store.position(each.job_id) for each in (urgent, first, second)]
        assert positions == [0, 1, 2]
        assert await bench.lease_next() is not None
        assert await bench.store.position(urgent.job_id) is None
        assert await bench.store.position(second.job_id) == 1
        assert await bench.store.position(JobId("nobody")) is None

    async def test_a_paused_queue_gives_nothing_and_keeps_everything(self, bench: StoreBench) -> None:
        job = await bench.enqueue()
        await bench.store.pause_queue(True)
        assert await bench.store.is_queue_paused()
        assert await bench.peek() == []
        assert await bench.lease_next() is None
        assert await bench.store.lease(job.job_id, bench.offer()) is None
        await bench.store.pause_queue(False)
        assert await bench.peek() == [job.job_id]

    @pytest.mark.parametrize("standing", [Readiness.DELAYED, Readiness.PAUSED])
    async def test_what_stands_aside_is_not_leased_until_it_stands_in_its_lane(
        self, bench: StoreBench, standing: Readiness
    ) -> None:
        aside = await bench.enqueue(standing=standing)
        later = await bench.enqueue()
        assert await bench.peek() == [later.job_id]
        assert await bench.store.lease(aside.job_id, bench.offer()) is None
        assert await bench.store.position(aside.job_id) is None
        assert await bench.change(aside, Change(standing=Readiness.IN_LANE)) is not None
        assert await bench.peek() == [aside.job_id, later.job_id]

    # leases

    async def test_a_lease_is_numbered_short_until_acknowledged_and_recorded_as_an_attempt(
        self, bench: StoreBench
    ) -> None:
        dispatch, ref = await bench.leased()
        now = bench.clock.now()
        assert dispatch.phase is Phase.LEASED
        assert dispatch.lease is not None
        assert (dispatch.lease.number, dispatch.lease_number, dispatch.attempts) == (1, 1, 1)
        assert dispatch.lease.epoch == bench.store.epoch
        assert dispatch.lease.expires_at == now + 10
        assert not dispatch.lease.is_acknowledged
        job = await bench.store.records.get(ref.job_id)
        assert job is not None
        assert job.phase is Phase.LEASED
        (attempt,) = await bench.store.attempts(ref.job_id)
        assert (attempt.attempt_id, attempt.outcome) == (ref.attempt_id, AttemptOutcome.RUNNING)
        assert await bench.store.leases_of(A) == [dispatch]
        assert await bench.store.leases_of(B) == []
        other = await bench.enqueue()
        assert await bench.store.lease(other.job_id, bench.offer(B)) is not None
        both = await bench.store.leases_of(A, B, WorkerId("nobody"))
        assert {lease.job_id for lease in both} == {dispatch.job_id, other.job_id}
        assert await bench.store.leases_of() == []

    async def test_a_leased_job_is_not_leased_again_and_a_returned_one_gets_the_next_number(
        self, bench: StoreBench
    ) -> None:
        _, ref = await bench.leased()
        later = await bench.enqueue()
        assert await bench.store.lease(ref.job_id, bench.offer(B)) is None
        assert await bench.store.write(release(ref)) is not None
        assert await bench.peek() == [ref.job_id, later.job_id], "it keeps its place"
        again = await bench.lease_next(B)
        assert again is not None
        assert (again.job_id, again.lease_number) == (ref.job_id, 2)
        outcomes = [attempt.outcome for attempt in await bench.store.attempts(ref.job_id)]
        assert outcomes == [AttemptOutcome.RELEASED, AttemptOutcome.RUNNING]

    async def test_a_poll_asked_again_finds_its_lease_for_as_long_as_it_lives(
        self, bench: StoreBench
    ) -> None:
        job = await bench.enqueue()
        offer = bench.offer(poll="mine")
        assert await bench.store.leased_by_poll(offer.poll_id) is None
        written = await lease_next(bench.store, offer)
        assert written is not None
        assert await bench.store.leased_by_poll(offer.poll_id) == written.dispatch
        ref = written.dispatch.lease_ref()
        await bench.store.heartbeat([ref], 60)
        found = await bench.store.leased_by_poll(offer.poll_id)
        assert found is not None
        assert found.lease_ref() == ref
        assert await bench.store.write(release(ref)) is not None
        assert await bench.store.leased_by_poll(offer.poll_id) is None
        assert await bench.peek() == [job.job_id]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"token": LeaseToken("other")},
            {"token": LeaseToken("tökén ☃")},
            {"number": 2},
            {"epoch": 2},
            {"round": 2},
        ],
        ids=str,
    )
    async def test_a_lease_with_any_part_wrong_guards_nothing_and_changes_nothing(
        self, bench: StoreBench, wrong: dict[str, Any]
    ) -> None:
        _, ref = await bench.leased()
        forged: LeaseRef = msgspec.structs.replace(ref, **wrong)
        before = await bench.state()
        block = Block(A, HASH, BlockReason.FAILURES, 1, 1e12)
        assert await bench.store.write(completion(forged, blocks=(block,))) is None
        (state,) = await bench.store.heartbeat([forged], 60)
        assert not state.is_alive
        assert await bench.state() == before
        assert await bench.store.write(completion(ref)) is not None

    async def test_a_write_over_an_old_revision_or_an_unknown_class_changes_nothing(
        self, bench: StoreBench
    ) -> None:
        job = await bench.enqueue()
        moved = await bench.change(job, Change(priority=3))
        assert moved is not None
        before = await bench.state()
        drafts = (FactDraft(FactKind.PRIORITY_CHANGED),)
        lifted = (Pair(A, HASH),)
        assert await bench.change(job, Change(priority=9), facts=drafts, lifted=lifted) is None
        unknown = Change(class_key=unknown_class())
        assert await bench.change(moved.dispatch, unknown, facts=drafts, job={"is_late": True}) is None
        assert await bench.store.write(Write(JobId("nobody"), AtRevision(0), Change())) is None
        assert await bench.state() == before

    async def test_a_write_is_all_of_it_at_once(self, bench: StoreBench) -> None:
        dispatch, ref = await bench.leased()
        await bench.store.put_block(Block(A, dispatch.job_id, BlockReason.JOB, 1, 1e12))
        block = Block(A, HASH, BlockReason.FAILURES, 1, 1e12)
        written = await bench.store.write(failure(ref, blocks=(block,), lifted=(Pair(A, dispatch.job_id),)))
        assert written is not None
        assert written.dispatch.lease is None
        assert [fact.kind for fact in written.facts] == [FactKind.FAILED]
        assert await bench.store.blocks() == [block]
        assert await bench.store.leases_of(A) == []
        job = await bench.store.records.get(ref.job_id)
        assert job is not None
        assert job.phase is Phase.FAILED

    async def test_a_change_of_priority_or_class_moves_a_waiting_job_and_keeps_its_age(
        self, bench: StoreBench
    ) -> None:
        first, second = await bench.enqueue(), await bench.enqueue()
        moved = await bench.change(second, Change(priority=1))
        assert moved is not None
        assert await bench.peek() == [second.job_id, first.job_id]
        back = await bench.change(moved.dispatch, Change(priority=0, class_key=FOR_FAST.key))
        assert back is not None
        assert await bench.peek() == [first.job_id, second.job_id]
        assert await bench.peek(B, SLOW) == [first.job_id]

    # heartbeats and due times

    async def test_a_heartbeat_extends_and_never_shortens(self, bench: StoreBench) -> None:
        _, ref = await bench.leased()
        now = bench.clock.now()
        for ttl_s, end in ((60.0, now + 60), (5.0, now + 60)):
            (state,) = await bench.store.heartbeat([ref], ttl_s)
            assert state.is_alive
            found = await bench.store.load(ref.job_id)
            assert found is not None
            assert found.lease is not None
            assert found.lease.is_acknowledged
            assert found.lease.expires_at == end
            assert await bench.store.next_due() == end

    @pytest.mark.parametrize(
        ("asked", "taken_back"),
        [
            (
                Change(cancel_requested_at=1.0, cancel_reason="by hand"),
                Change(cancel_requested_at=None, cancel_reason=""),
            ),
            (Change(pause_requested_at=1.0), Change(pause_requested_at=None)),
            (Change(retry_requested_at=1.0), Change(retry_requested_at=None)),
        ],
    )
    async def test_a_heartbeat_answers_each_lease_and_tells_that_a_job_is_to_be_stopped(
        self, bench: StoreBench, asked: Change, taken_back: Change
    ) -> None:
        dispatch, ref = await bench.leased()
        _, other = await bench.leased()
        assert await bench.change(dispatch, asked) is not None
        assert await bench.store.write(completion(other)) is not None
        states = await bench.store.heartbeat([ref, other], 60)
        assert [(state.is_alive, state.is_to_stop) for state in states] == [(True, True), (False, False)]
        found = await bench.store.load(ref.job_id)
        assert found is not None
        assert found.stop_requested_at == 1.0
        assert found.cancel_reason == ("by hand" if found.stop is Stop.CANCEL else "")
        assert await bench.change(found, taken_back) is not None
        (state,) = await bench.store.heartbeat([ref], 60)
        assert (state.is_alive, state.is_to_stop) == (True, False)

    async def test_what_is_due_is_found_at_exactly_its_time_and_stays_due_until_written(
        self, bench: StoreBench
    ) -> None:
        now = bench.clock.now()
        late = await bench.enqueue(wake_at=now + 20)
        early = await bench.enqueue(wake_at=now + 5)
        await bench.enqueue()
        assert await bench.store.next_due() == now + 5
        await bench.clock.advance(4.999)
        assert await bench.store.due(10) == []
        await bench.clock.advance(0.001 + 1e-6)
        assert await bench.store.due(10) == [early]
        assert await bench.store.due(10) == [early]
        assert await bench.change(early, Change(wake_at=now + 30)) is not None
        assert await bench.store.next_due() == now + 20
        await bench.clock.advance(100)
        assert {each.job_id for each in await bench.store.due(10)} == {early.job_id, late.job_id}
        assert len(await bench.store.due(1)) == 1

    async def test_what_is_due_comes_in_pages_each_of_which_begins_behind_the_last(
        self, bench: StoreBench
    ) -> None:
        """Several are due at the same time, and none is written meanwhile."""
        now = bench.clock.now()
        due = [await bench.enqueue(wake_at=now + at) for at in (3, 1, 1, 1, 2, 1, 1)]
        leased, _ = await bench.leased(wake_at=now + 0.5)
        await bench.enqueue(wake_at=now + 5)
        await bench.clock.advance(4)
        in_order = [leased, *sorted(due, key=lambda each: (each.wake_at, each.job_id))]
        for size in (1, 2, 3, 8, 9):
            found: list[Dispatch] = []
            while page := await bench.store.due(size, found[-1] if found else None):
                assert len(page) <= size
                found += page
            assert found == in_order
        # The last job of a page may have been written since.
        assert await bench.change(in_order[1], Change(wake_at=None)) is not None
        assert await bench.store.due(10, in_order[1]) == in_order[2:]

    async def test_a_lease_falls_due_at_its_end_and_a_finished_job_never(self, bench: StoreBench) -> None:
        dispatch, ref = await bench.leased(wake_at=bench.clock.now() + 50)
        assert await bench.store.next_due() == bench.clock.now() + 10
        await bench.clock.advance(10)
        assert await bench.store.due(10) == [dispatch]
        assert await bench.store.write(completion(ref)) is not None
        assert await bench.store.next_due() is None
        assert await bench.store.due(10) == []

    async def test_a_moment_that_comes_earlier_is_noticed(self, bench: StoreBench) -> None:
        now = bench.clock.now()
        job = await bench.enqueue(wake_at=now + 50)
        assert await bench.change(job, Change(wake_at=now + 1)) is not None
        assert await bench.store.next_due() == now + 1

    async def test_a_worker_is_leased_to_under_the_profile_it_has_and_no_other(
        self, bench: StoreBench
    ) -> None:
        """The engine that matched it may not know yet that it registered again."""
        store, job = bench.store, await bench.enqueue()
        await store.put_worker(_worker(SLOW))
        assert await store.lease(job.job_id, bench.offer(A, FAST)) is None
        assert await bench.lease_next(A, FAST) is None
        assert await bench.peek(A, FAST) == [job.job_id], "a look grants nothing"
        assert await store.load(job.job_id) == job
        taken = await store.lease(job.job_id, bench.offer(A, SLOW))
        assert taken is not None
        await bench.enqueue()
        await store.put_worker(_worker(FAST))
        end = completion(taken.dispatch.lease_ref())
        assert await store.write(end) is not None
        assert await bench.lease_next(A, SLOW) is None
        assert await bench.lease_next(A, FAST) is not None
        await bench.enqueue()
        await store.remove_worker(A)
        assert await bench.lease_next(A, SLOW) is not None, "of one that is not known nothing is known"

    async def test_of_workers_that_are_offered_together_each_has_its_own_profile(
        self, bench: StoreBench
    ) -> None:
        jobs = {(await bench.enqueue()).job_id for _ in range(3)}
        await bench.store.put_worker(_worker(SLOW))
        offers = [bench.offer(worker, FAST) for worker in (B, A, B, A)]
        written = await asyncio.gather(*(lease_next(bench.store, offer) for offer in offers))
        assert [each is not None for each in written] == [True, False, True, False]
        assert len(jobs - {each.dispatch.job_id for each in written if each is not None}) == 1


def _worker(profile: ProfileKey) -> WorkerRecord:
    return WorkerRecord(A, Capabilities((Service("comfyui"),)), profile, 1, 1.0, 2.0)
