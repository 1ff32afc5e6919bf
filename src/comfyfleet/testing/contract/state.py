"""The store contract for facts, attempts, counts, records, workers, blocks and workflow statistics."""

from __future__ import annotations

from typing import Any

import msgspec

from comfyfleet.model.block import EVERY_WORKER, Block, BlockReason, Pair, tenant_target
from comfyfleet.model.dispatch import Change, HeldBy, Phase, Readiness, Write
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import JobId, WorkflowHash
from comfyfleet.model.job import Attachment, Job, JobResult, Submission
from comfyfleet.model.worker import Capabilities, Service, WorkerDelta, WorkerRecord
from comfyfleet.model.workflow_stats import MeanDuration, WorkflowStats
from comfyfleet.ports import RecordQuery
from comfyfleet.testing.contract.store_bench import (
    FAST,
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
)

ANN, BOB = tenant("ann"), tenant("bob")


class StateContract:
    keeps_digests = True
    """Whether a dispatch stores the digest of its payload. Stores that encrypt payloads do not."""

    # facts, attempts, counts

    async def test_facts_are_numbered_from_one_without_a_gap_in_the_write_that_makes_them(
        self, bench: StoreBench
    ) -> None:
        dispatch, ref = await bench.leased()
        several = (FactDraft(FactKind.LATE), FactDraft(FactKind.PRIORITY_CHANGED, {"priority": 3}))
        assert await bench.change(dispatch, Change(), facts=several) is not None
        assert await bench.store.write(completion(ref)) is not None
        facts = await bench.store.facts(ref.job_id)
        assert [fact.number for fact in facts] == [1, 2, 3, 4, 5]
        assert [fact.kind.value for fact in facts] == [
            "queued",
            "leased",
            "late",
            "priority_changed",
            "completed",
        ]
        assert await bench.store.facts(ref.job_id, after=3) == facts[3:]
        assert await bench.store.facts(ref.job_id, after=5) == []
        assert await bench.store.facts(JobId("nobody")) == []

    async def test_the_ceiling_of_a_priority_is_kept_and_changed(self, bench: StoreBench) -> None:
        dispatch = await bench.enqueue(priority_ceiling=-7)
        for ceiling in (None, 0, 12):
            assert await bench.store.load(dispatch.job_id) == dispatch
            written = await bench.change(dispatch, Change(priority_ceiling=ceiling))
            assert written is not None and written.dispatch.priority_ceiling == ceiling
            dispatch = written.dispatch

    async def test_a_late_report_is_noted_on_its_own_attempt_and_nowhere_else(
        self, bench: StoreBench
    ) -> None:
        _, ref = await bench.leased()
        await bench.store.mark_late(ref)
        (running,) = await bench.store.attempts(ref.job_id)
        assert not running.reported_late, "an attempt that still runs cannot be late"
        assert await bench.store.write(release(ref)) is not None
        assert await bench.lease_next() is not None
        await bench.store.mark_late(ref)
        assert [each.reported_late for each in await bench.store.attempts(ref.job_id)] == [True, False]

    async def test_counts_follow_every_move(self, bench: StoreBench) -> None:
        await bench.enqueue(standing=Readiness.PAUSED)
        await bench.enqueue(standing=Readiness.DELAYED)
        await bench.enqueue()
        _, finished = await bench.leased()
        assert await bench.store.write(completion(finished)) is not None
        _, broken = await bench.leased()
        assert await bench.store.write(failure(broken)) is not None
        dispatch, _ = await bench.leased()
        assert await bench.cancel(await bench.enqueue()) is not None
        counts = await bench.store.counts()
        assert (counts.waiting, counts.delayed, counts.paused) == (1, 1, 1)
        assert counts.by_phase == {
            Phase.QUEUED: 3,
            Phase.LEASED: 1,
            Phase.COMPLETED: 1,
            Phase.FAILED: 1,
            Phase.CANCELLED: 1,
        }
        assert await bench.cancel(dispatch) is not None
        assert (await bench.store.counts()).by_phase[Phase.LEASED] == 0

    async def test_the_digest_of_a_payload_stays_with_its_dispatch_until_it_is_changed(
        self, bench: StoreBench
    ) -> None:
        first: bytes | None = bytes(range(32))
        second: bytes | None = bytes(range(224, 256))
        dispatch, ref = await bench.leased(payload_sha256=first)
        if not self.keeps_digests:
            first = second = None
        assert dispatch.payload_sha256 == first
        assert await bench.store.write(release(ref)) is not None
        again = await bench.lease_next()
        assert again is not None and again.payload_sha256 == first
        assert await bench.store.write(release(again.lease_ref())) is not None
        for written, kept in ((bytes(range(224, 256)), second), (None, None)):
            waiting = await bench.store.load(dispatch.job_id)
            assert waiting is not None
            changed = await bench.change(waiting, Change(payload_sha256=written))
            assert changed is not None and changed.dispatch.payload_sha256 == kept
            loaded = await bench.store.load(dispatch.job_id)
            assert loaded is not None and loaded.payload_sha256 == kept

    async def test_the_payloads_of_open_jobs_are_weighed_together(self, bench: StoreBench) -> None:
        async def weight() -> int:
            return (await bench.store.counts()).payload_bytes

        dispatch, ref = await bench.leased(payload_bytes=1)
        await bench.enqueue(payload_bytes=20, standing=Readiness.PAUSED)
        await bench.enqueue(payload_bytes=300, standing=Readiness.DELAYED)
        waiting = await bench.enqueue(payload_bytes=5_000_000_000)
        assert await weight() == 5_000_000_321
        assert await bench.store.write(completion(ref)) is not None
        assert await weight() == 5_000_000_320
        gone = await bench.cancel(waiting)
        assert gone is not None
        assert await weight() == 320
        assert await bench.cancel(dispatch) is None
        _, broken = await bench.leased(payload_bytes=4000)
        assert await weight() == 4320
        assert await bench.store.write(release(broken)) is not None
        taken = await bench.lease_next()
        assert taken is not None
        failed = await bench.store.write(failure(taken.lease_ref()))
        assert failed is not None
        assert await weight() == 320
        again = Change(phase=Phase.QUEUED, round=2, standing=Readiness.IN_LANE)
        assert await bench.change(failed.dispatch, again, job={"phase": Phase.QUEUED}) is not None
        assert await weight() == 4320
        await bench.clock.advance(60)
        assert await bench.store.purge(Phase.COMPLETED, bench.clock.now(), 10) == 1
        assert await weight() == 4320

    async def test_the_dead_letter_lists_the_failed_in_pages_until_they_are_retried(
        self, bench: StoreBench
    ) -> None:
        failed = []
        for _ in range(3):
            _, ref = await bench.leased()
            written = await bench.store.write(failure(ref))
            assert written is not None
            failed.append(written.dispatch)
        assert await bench.store.dead_letter(2) == failed[:2]
        assert await bench.store.dead_letter(2, after=failed[1].job_id) == failed[2:]
        assert await bench.change(failed[0], Change(phase=Phase.QUEUED, round=2)) is not None
        assert await bench.store.dead_letter(10) == failed[1:]

    async def test_purging_forgets_what_ended_before_and_nothing_else(self, bench: StoreBench) -> None:
        old, ref = await bench.leased(reference="mine")
        assert await bench.store.write(completion(ref)) is not None
        retried = await bench.enqueue()
        cancelled = await bench.cancel(retried)
        assert cancelled is not None
        await bench.clock.advance(10)
        assert await bench.change(cancelled.dispatch, Change(phase=Phase.QUEUED)) is not None
        _, young = await bench.leased()
        assert await bench.store.write(completion(young)) is not None
        border = bench.clock.now()
        assert await bench.store.purge(Phase.CANCELLED, border, 10) == 0
        assert await bench.store.purge(Phase.COMPLETED, border, 10) == 1
        assert await bench.store.load(old.job_id) is None
        assert await bench.store.records.get(old.job_id) is None
        assert await bench.store.records.by_reference(old.tenant, "mine") is None
        assert await bench.store.facts(old.job_id) == []
        assert await bench.store.load(young.job_id) is not None
        assert await bench.peek() == [retried.job_id]
        assert (await bench.store.counts()).by_phase[Phase.COMPLETED] == 1

    async def test_a_purge_has_a_bound(self, bench: StoreBench) -> None:
        for _ in range(3):
            _, ref = await bench.leased()
            assert await bench.store.write(completion(ref)) is not None
        await bench.clock.advance(1)
        assert await bench.store.purge(Phase.COMPLETED, bench.clock.now(), 2) == 2
        assert await bench.store.purge(Phase.COMPLETED, bench.clock.now(), 2) == 1

    # records

    async def test_records_are_listed_in_pages_by_submission_phase_and_tenant(
        self, bench: StoreBench
    ) -> None:
        jobs = [await bench.enqueue(tenant=tenant(name)) for name in ("ann", "bob", "ann")]
        records = bench.store.records

        async def listed(**filters: Any) -> list[JobId]:
            asked = {"tenant": None, "phase": None, "limit": 10, "after": None, **filters}
            return [job.job_id for job in await records.listing(RecordQuery(**asked))]

        ids = [job.job_id for job in jobs]
        assert await listed() == ids
        assert await listed(limit=2) == ids[:2]
        assert await listed(after=ids[1]) == ids[2:]
        assert await listed(tenant=tenant("ann")) == [ids[0], ids[2]]
        assert await bench.lease_next() is not None
        assert await listed(phase=Phase.LEASED) == ids[:1]

    async def test_pages_go_back_from_the_newest_as_they_go_forth(self, bench: StoreBench) -> None:
        jobs = [await bench.enqueue(tenant=tenant(name)) for name in ("ann", "bob", "ann", "bob")]
        records = bench.store.records

        async def listed(**filters: Any) -> list[JobId]:
            asked = {
                "tenant": None,
                "phase": None,
                "limit": 10,
                "after": None,
                "newest_first": True,
                **filters,
            }
            return [job.job_id for job in await records.listing(RecordQuery(**asked))]

        first, second, third, fourth = (job.job_id for job in jobs)
        assert await listed() == [fourth, third, second, first]
        assert await listed(limit=2) == [fourth, third]
        assert await listed(after=third) == [second, first]
        assert await listed(after=first) == []
        assert await listed(tenant=tenant("ann"), after=fourth) == [third, first]
        assert await bench.lease_next() is not None
        assert await listed(phase=Phase.LEASED) == [first]
        assert await listed(phase=Phase.QUEUED, after=third) == [second]
        between = JobId(second + "!")
        for phase in (None, Phase.QUEUED):
            assert await listed(phase=phase, after=between, limit=1) == [second], "an id that is not there"
        assert await listed(after=JobId("zzzzzzzz-zzzz")) == await listed()

    async def test_pages_lose_nobody_whose_id_sorts_before_an_older_one(self, bench: StoreBench) -> None:
        template = await bench.enqueue()
        for name in ("z-first", "a-second"):
            dispatch = msgspec.structs.replace(template, job_id=JobId(name))
            job = Job(dispatch.job_id, dispatch.tenant, HASH, 0.0, Submission({}))
            assert await bench.store.enqueue(dispatch, job, QUEUED) is not None
        page = await bench.store.records.listing(RecordQuery(limit=9, after=JobId("z-first")))
        assert [job.job_id for job in page] == ["a-second"]

    async def test_a_page_may_begin_at_an_id_that_is_not_there(self, bench: StoreBench) -> None:
        first, second = [await bench.enqueue() for _ in range(2)]
        between = JobId(first.job_id + "!")
        assert first.job_id < between < second.job_id, "ids grow with time"
        records = bench.store.records
        for phase in (None, Phase.QUEUED):
            page = await records.listing(RecordQuery(phase=phase, limit=9, after=between))
            assert [job.job_id for job in page] == [second.job_id]
            whole = await records.listing(RecordQuery(phase=phase, limit=9, after=JobId("00000000-0000")))
            assert [job.job_id for job in whole] == [first.job_id, second.job_id]

    async def test_a_reference_is_its_tenants_own(self, bench: StoreBench) -> None:
        job = await bench.enqueue(tenant=tenant("ann"), reference="mine")
        found = await bench.store.records.by_reference(tenant("ann"), "mine")
        assert found is not None
        assert found.job_id == job.job_id
        assert await bench.store.records.by_reference(tenant("bob"), "mine") is None

    async def test_a_priority_changed_in_the_record_stays_there_and_moves_the_job(
        self, bench: StoreBench
    ) -> None:
        first, second = await bench.enqueue(), await bench.enqueue()
        raised = await bench.change(second, Change(priority=5), job={"priority": 5})
        assert raised is not None
        assert await bench.peek() == [second.job_id, first.job_id]

        async def kept() -> int | None:
            record = await bench.store.records.get(second.job_id)
            assert record is not None
            return record.priority

        assert await kept() == 5
        leased = await bench.lease_next()
        assert leased is not None and leased.job_id == second.job_id
        under_lease = HeldBy(leased.lease_ref())
        changed = Write(second.job_id, under_lease, Change(priority=0), job={"priority": 0})
        assert await bench.store.write(changed) is not None
        assert await kept() == 0
        assert await bench.store.write(completion(leased.lease_ref())) is not None
        assert await kept() == 0, "the end of the job does not forget it"

    async def test_what_a_worker_calls_its_run_is_kept_however_long(self, bench: StoreBench) -> None:
        _, ref = await bench.leased()
        name = "p" * 70_000
        assert (
            await bench.store.write(Write(ref.job_id, HeldBy(ref), Change(), job={"prompt_id": name}))
            is not None
        )
        finished = await bench.store.write(completion(ref))
        assert finished is not None
        assert await bench.store.load(ref.job_id) == finished.dispatch
        record = await bench.store.records.get(ref.job_id)
        assert record is not None and record.prompt_id == name

    async def test_a_payload_replaced_at_the_end_is_the_one_that_is_kept(self, bench: StoreBench) -> None:
        attached = Attachment("cat.png", b"\0\xff" * 100, "1", "image")
        submission = Submission(
            {"1": {"class_type": "Load"}}, attachments=(attached,), metadata={"user": "é"}
        )
        template = await bench.enqueue()
        dispatch = msgspec.structs.replace(template, job_id=JobId("with-a-file"))
        job = Job(dispatch.job_id, dispatch.tenant, HASH, 0.0, submission, seeds={"1": 7})
        assert await bench.store.enqueue(dispatch, job, QUEUED) is not None
        leased = await bench.store.lease(dispatch.job_id, bench.offer())
        assert leased is not None
        dropped = msgspec.structs.replace(submission, attachments=())
        end = completion(leased.dispatch.lease_ref())
        end = msgspec.structs.replace(end, job={**(end.job or {}), "payload": dropped, "completed_at": 2.0})
        finished = await bench.store.write(end)
        assert finished is not None and finished.dispatch.phase is Phase.COMPLETED
        expected = msgspec.structs.replace(
            job, payload=dropped, phase=Phase.COMPLETED, result=JobResult(), completed_at=2.0
        )
        assert await bench.store.records.get(dispatch.job_id) == expected

    # workers, blocks, workflow statistics

    async def test_a_worker_is_kept_replaced_and_removed_with_its_blocks(self, bench: StoreBench) -> None:
        worker = WorkerRecord(A, Capabilities((Service("comfyui"),)), FAST, 1, 0.0, 0.0)
        await bench.store.put_worker(worker)
        busier = msgspec.structs.replace(worker, slots=2)
        await bench.store.put_worker(busier)
        assert await bench.store.workers() == [busier]
        assert await bench.store.get_worker(A) == busier
        assert await bench.store.add_worker(worker) is False
        assert await bench.store.get_worker(A) == busier, "of two who bring it in at once, one does"
        assert await bench.store.replace_worker(worker) is True
        first = msgspec.structs.replace(worker, revision=1)
        assert await bench.store.workers() == [first]
        assert await bench.store.replace_worker(busier) is False, "what was written since is not undone"
        paused = msgspec.structs.replace(first, is_paused=True, profile=SLOW)
        assert await bench.store.replace_worker(paused) is True
        assert await bench.store.replace_worker(paused) is False
        assert await bench.store.workers() == [msgspec.structs.replace(paused, revision=2)]
        await bench.store.put_block(Block(A, HASH, BlockReason.FAILURES, 1, 1e12))
        await bench.store.remove_worker(A)
        assert await bench.store.get_worker(A) is None
        assert await bench.store.replace_worker(busier) is False
        assert await bench.store.workers() == [], "what was removed is not put back by whoever read it before"
        assert await bench.store.blocks() == []
        assert await bench.store.next_block_end() is None
        assert await bench.store.apply_worker_delta(A, WorkerDelta(completed=1)) is None
        assert await bench.store.workers() == []
        assert await bench.store.add_worker(worker) is True
        assert await bench.store.workers() == [worker]

    async def test_a_blocked_pair_is_not_leased_and_its_worker_takes_what_comes_next(
        self, bench: StoreBench
    ) -> None:
        blocked = await bench.enqueue()
        kept_off = await bench.enqueue(workflow_hash=WorkflowHash("other"))
        free = await bench.enqueue(workflow_hash=WorkflowHash("other"))
        await bench.store.put_block(Block(A, HASH, BlockReason.FAILURES, 1, 1e12))
        await bench.store.put_block(Block(A, kept_off.job_id, BlockReason.JOB, 1, 1e12))
        assert await bench.peek(A) == [free.job_id]
        assert await bench.peek(B) == [blocked.job_id, kept_off.job_id, free.job_id]
        assert await bench.store.lease(blocked.job_id, bench.offer(A)) is None
        assert await bench.store.lease(kept_off.job_id, bench.offer(A)) is None
        taken = await bench.lease_next(A)
        assert taken is not None
        assert taken.job_id == free.job_id
        assert await bench.lease_next(A) is None

    async def test_a_tenants_block_leaves_out_its_own_jobs_and_nobody_elses(self, bench: StoreBench) -> None:
        # Ahead of all others, so that a lease must skip it.
        blocked = await bench.enqueue(tenant=ANN, priority=1)
        of_bob = await bench.enqueue(tenant=BOB)
        of_ann = await bench.enqueue(tenant=ANN, workflow_hash=WorkflowHash("other"))
        target = tenant_target(HASH, ANN)
        block = Block(A, target, BlockReason.FAILURES, 1, 1e12)
        await bench.store.put_block(block)
        assert await bench.store.get_block(Pair(A, target)) == block
        assert await bench.store.get_block(Pair(A, HASH)) is None
        assert await bench.peek(A) == [of_bob.job_id, of_ann.job_id]
        assert await bench.peek(B) == [blocked.job_id, of_bob.job_id, of_ann.job_id]
        assert await bench.store.lease(blocked.job_id, bench.offer(A)) is None
        first = await bench.lease_next(A)
        assert first is not None and first.job_id == of_bob.job_id
        assert await bench.store.lease(of_ann.job_id, bench.offer(A)) is not None
        assert await bench.lease_next(A) is None
        assert await bench.store.lift([Pair(A, HASH)]) == []
        assert await bench.store.lift([Pair(A, target)]) == [block]
        last = await bench.lease_next(A)
        assert last is not None and last.job_id == blocked.job_id

    async def test_what_is_blocked_for_every_worker_no_worker_gets(self, bench: StoreBench) -> None:
        refused = await bench.enqueue(tenant=ANN, priority=1)
        of_bob = await bench.enqueue(tenant=BOB)
        target = tenant_target(HASH, ANN)
        await bench.store.put_block(Block(EVERY_WORKER, target, BlockReason.OPERATOR, 1, 1e12))
        # A worker's own block must not hide it, and the reverse.
        await bench.store.put_block(Block(B, tenant_target(HASH, BOB), BlockReason.FAILURES, 1, 1e12))
        assert await bench.peek(A) == [of_bob.job_id]
        assert await bench.peek(B) == []
        assert await bench.store.lease(refused.job_id, bench.offer(A)) is None
        assert await bench.lease_next(B) is None
        taken = await bench.lease_next(A)
        assert taken is not None and taken.job_id == of_bob.job_id
        assert await bench.lease_next(A) is None
        await bench.store.lift([Pair(EVERY_WORKER, target)])
        assert await bench.peek(A) == await bench.peek(B) == [refused.job_id]

    async def test_a_count_below_the_threshold_blocks_nobody_and_survives_being_read(
        self, bench: StoreBench
    ) -> None:
        job = await bench.enqueue()
        counting = Block(A, HASH, BlockReason.FAILURES, 2)
        await bench.store.put_block(counting)
        for _ in range(3):
            assert await bench.store.get_block(Pair(A, HASH)) == counting
            assert await bench.store.blocks(A) == [counting]
            assert await bench.store.expired_blocks() == []
            assert await bench.peek() == [job.job_id]
        assert await bench.store.next_block_end() is None

    async def test_a_block_ends_at_exactly_its_time_and_is_answered_once(self, bench: StoreBench) -> None:
        job = await bench.enqueue()
        end = bench.clock.now() + 8
        short = Block(A, HASH, BlockReason.FAILURES, 1, end)
        long = Block(B, HASH, BlockReason.FAILURES, 1, end + 8)
        for block in (long, short):
            await bench.store.put_block(block)
        assert await bench.store.next_block_end() == end
        await bench.clock.advance(7.5)
        assert await bench.peek(A) == []
        assert await bench.store.expired_blocks() == []
        await bench.clock.advance(0.5)
        assert await bench.peek(A) == [job.job_id], "available again though nobody has swept"
        assert await bench.store.expired_blocks() == [short]
        assert await bench.store.expired_blocks() == []
        assert await bench.store.blocks() == [long]
        assert await bench.store.next_block_end() == end + 8

    async def test_a_block_put_again_ends_at_its_new_time(self, bench: StoreBench) -> None:
        now = bench.clock.now()
        for end in (now + 5, now + 50):
            await bench.store.put_block(Block(A, HASH, BlockReason.FAILURES, 1, end))
        await bench.clock.advance(5)
        assert await bench.store.expired_blocks() == []
        assert await bench.store.next_block_end() == now + 50

    async def test_lifting_answers_what_was_there(self, bench: StoreBench) -> None:
        job = await bench.enqueue()
        block = Block(A, HASH, BlockReason.INVENTORY, 1, 1e12, ("x",))
        await bench.store.put_block(block)
        assert await bench.store.lift([Pair(B, HASH), Pair(A, HASH)]) == [block]
        assert await bench.store.lift([Pair(A, HASH)]) == []
        assert await bench.peek() == [job.job_id]

    async def test_workflow_stats_are_remembered(self, bench: StoreBench) -> None:
        assert await bench.store.get_workflow_stats(HASH) is None
        stats = WorkflowStats(HASH, {"card": MeanDuration(3.0, 1)}, 24.0, {ANN: 48.0})
        await bench.store.put_workflow_stats(stats)
        assert await bench.store.get_workflow_stats(HASH) == stats

    async def test_an_empty_change_under_a_lease_keeps_the_lease(self, bench: StoreBench) -> None:
        dispatch, ref = await bench.leased()
        written = await bench.store.write(Write(ref.job_id, HeldBy(ref), Change(), job={"prompt_id": "p"}))
        assert written is not None
        assert written.dispatch.lease == dispatch.lease
        assert written.dispatch.revision == dispatch.revision + 1
        assert await bench.store.next_due() == bench.clock.now() + 10
