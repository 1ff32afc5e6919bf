"""The store contract for transfers: a job is removed under a guard and imported whole."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import TOMBSTONE_S, Change, Dispatch, Phase, Readiness
from comfyfleet.model.ids import JobId, WorkflowHash
from comfyfleet.model.job import JobResult
from comfyfleet.model.workflow_stats import MeanDuration, WorkflowStats
from comfyfleet.ports import JobTransfer, RecordQuery, TransferableStore
from comfyfleet.testing.contract.store_bench import (
    B,
    StoreBench,
    UsesBench,
    completion,
    failure,
    release,
    tenant,
    unknown_class,
)


async def whole(bench: StoreBench, job_id: JobId) -> JobSnapshot:
    store = bench.store
    dispatch, job = await store.load(job_id), await store.records.get(job_id)
    assert dispatch is not None and job is not None
    return JobSnapshot(dispatch, job, tuple(await store.facts(job_id)), tuple(await store.attempts(job_id)))


def moving(bench: StoreBench) -> JobTransfer:
    return cast("TransferableStore", bench.store).job_transfer


def renamed(kept: JobSnapshot, name: str, **changes: Any) -> JobSnapshot:
    """The same history under another id."""
    job_id = JobId(name)
    return JobSnapshot(
        msgspec.structs.replace(kept.dispatch, job_id=job_id, **changes),
        msgspec.structs.replace(kept.job, job_id=job_id, reference=None),
        tuple(msgspec.structs.replace(fact, job_id=job_id) for fact in kept.facts),
        tuple(
            msgspec.structs.replace(each, attempt_id=each.attempt_id.replace(kept.job.job_id, name, 1))
            for each in kept.attempts
        ),
    )


class JobTransferContract(UsesBench):
    async def _tried(self, bench: StoreBench, **fields: Any) -> JobSnapshot:
        """A job that waits for its second attempt."""
        _, ref = await bench.leased(**fields)
        assert await bench.store.write(release(ref)) is not None
        return await whole(bench, ref.job_id)

    async def test_a_job_that_is_let_go_and_taken_in_again_is_whole_and_stands_at_the_end(
        self, bench: StoreBench
    ) -> None:
        kept = await self._tried(bench, reference="mine", priority=3, tenant=tenant("ann"), payload_bytes=700)
        before = await bench.state()
        assert await moving(bench).discard([kept.dispatch]) == [True]
        assert await bench.store.load(kept.job.job_id) is None
        assert await bench.store.records.by_reference(tenant("ann"), "mine") is None
        assert await bench.store.facts(kept.job.job_id) == []
        assert await bench.store.attempts(kept.job.job_id) == []
        counts = await bench.store.counts()
        assert counts.by_phase == dict.fromkeys(Phase, 0)
        assert counts.payload_bytes == 0
        assert await bench.peek() == []
        imported = await moving(bench).import_jobs([kept])
        assert imported is not None
        assert imported == [msgspec.structs.replace(kept.dispatch, sequence=kept.dispatch.sequence + 1)]
        again = await whole(bench, kept.job.job_id)
        assert again == msgspec.structs.replace(kept, dispatch=imported[0])
        after = await bench.state()
        # The job has a new place in the queue.
        without = {"jobs": None, "lanes": None}
        assert {**after, **without} == {**before, **without}

    async def test_jobs_taken_in_stand_in_their_order_behind_what_is_here(self, bench: StoreBench) -> None:
        template = await self._tried(bench)
        jobs = [renamed(template, name) for name in ("z", "a", "m")]
        assert await moving(bench).import_jobs(jobs) is not None
        assert await bench.peek() == [template.job.job_id, "z", "a", "m"]
        later = await bench.enqueue()
        leased = [await bench.lease_next(B) for _ in range(5)]
        assert [each.job_id for each in leased if each] == [template.job.job_id, "z", "a", "m", later.job_id]
        listed = await bench.store.records.listing(RecordQuery(limit=10))
        assert [job.job_id for job in listed][1:4] == ["z", "a", "m"]

    async def test_a_job_taken_in_goes_on_where_it_stopped(self, bench: StoreBench) -> None:
        kept = renamed(await self._tried(bench), "moved")
        assert await bench.lease_next() is not None
        assert await moving(bench).import_jobs([kept]) is not None
        taken = await bench.lease_next(B)
        assert taken is not None
        assert (taken.job_id, taken.lease_number, taken.attempts) == ("moved", 2, 2)
        first = kept.attempts[0]
        ref = msgspec.structs.replace(taken.lease_ref(), number=first.lease_number)
        await bench.store.mark_late(ref)
        late, running = await bench.store.attempts(taken.job_id)
        assert late == msgspec.structs.replace(first, reported_late=True)
        assert running.lease_number == 2
        assert await bench.store.write(completion(taken.lease_ref())) is not None
        numbers = [fact.number for fact in await bench.store.facts(taken.job_id)]
        assert numbers == list(range(1, len(kept.facts) + 3))

    async def test_jobs_that_have_ended_come_with_what_came_of_them(self, bench: StoreBench) -> None:
        _, done = await bench.leased(reference="done")
        result = JobResult(outputs={"9": {"images": [{"filename": "ü.png"}]}})
        end = completion(done)
        assert await bench.store.write(
            msgspec.structs.replace(end, job={**(end.job or {}), "result": result, "completed_at": 5.0})
        )
        _, broken = await bench.leased()
        assert await bench.store.write(failure(broken)) is not None
        kept = [await whole(bench, ref.job_id) for ref in (done, broken)]
        assert kept[0].job.result == result
        before = await bench.store.counts()
        assert await moving(bench).discard([each.dispatch for each in kept]) == [True, True]
        assert await bench.store.dead_letter(10) == []
        await bench.clock.advance(10)
        border = bench.clock.now()
        imported = await moving(bench).import_jobs(kept)
        assert imported is not None
        assert [await whole(bench, each.job.job_id) for each in kept] == [
            msgspec.structs.replace(each, dispatch=dispatch)
            for each, dispatch in zip(kept, imported, strict=True)
        ]
        assert await bench.store.counts() == before
        assert await bench.store.dead_letter(10) == imported[1:]
        assert await bench.store.purge(Phase.COMPLETED, border, 10) == 0, "kept from when it came"
        await bench.clock.advance(10)
        assert await bench.store.purge(Phase.COMPLETED, bench.clock.now(), 10) == 1
        retry = Change(phase=Phase.QUEUED, round=2)
        assert await bench.change(imported[1], retry) is not None
        assert await bench.peek() == [broken.job_id]

    async def test_an_unsettled_job_moves_with_its_settlement_pending(self, bench: StoreBench) -> None:
        waiting = await bench.enqueue(has_tenant_database=True)
        _, done = await bench.leased(has_tenant_database=True)
        ended = await bench.store.write(completion(done))
        assert ended is not None
        _, broken = await bench.leased(has_tenant_database=True)
        failed = await bench.store.write(failure(broken))
        assert failed is not None
        settled = await bench.change(failed.dispatch, Change(settled_at=bench.clock.now()))
        assert settled is not None
        kept = [await whole(bench, each.job_id) for each in (waiting, ended.dispatch, settled.dispatch)]
        before = await bench.store.counts()
        assert await moving(bench).discard([each.dispatch for each in kept]) == [True] * 3
        assert await bench.store.unsettled(10) == []
        imported = await moving(bench).import_jobs(kept)
        assert imported is not None
        assert [each.has_tenant_database for each in imported] == [True] * 3
        assert imported[2].settled_at == settled.dispatch.settled_at
        assert await bench.store.unsettled(10) == [imported[1]]
        assert await bench.store.counts() == before
        await bench.clock.advance(TOMBSTONE_S + 1)
        now = bench.clock.now()
        assert await bench.store.purge(Phase.COMPLETED, now, 10) == 0
        assert await bench.store.purge(Phase.FAILED, now, 10) == 1

    async def test_what_stands_aside_still_does_and_falls_due_at_its_time(self, bench: StoreBench) -> None:
        at = bench.clock.now() + 50
        delayed = await bench.enqueue(standing=Readiness.DELAYED, not_before=at, wake_at=at)
        paused = await bench.enqueue(standing=Readiness.PAUSED)
        kept = [await whole(bench, each.job_id) for each in (delayed, paused)]
        before = await bench.store.counts()
        assert await moving(bench).discard([delayed, paused]) == [True, True]
        assert await bench.store.next_due() is None
        assert await moving(bench).import_jobs(kept) is not None
        assert await bench.store.counts() == before
        assert await bench.store.next_due() == at
        assert await bench.peek() == []

    async def test_a_job_that_is_known_here_is_answered_and_not_taken_in_again(
        self, bench: StoreBench
    ) -> None:
        kept = await self._tried(bench, reference="mine")
        stranger = renamed(kept, "stranger")
        twin = msgspec.structs.replace(stranger, job=msgspec.structs.replace(stranger.job, reference="mine"))
        new = renamed(kept, "new")
        moved = await bench.change(kept.dispatch, Change(priority=9))
        assert moved is not None
        answer = await moving(bench).import_jobs([kept, twin, new])
        assert answer is not None
        assert answer[:2] == [moved.dispatch, moved.dispatch]
        assert answer[2].job_id == "new"
        assert await bench.store.load(JobId("stranger")) is None
        assert await moving(bench).import_jobs([new]) == answer[2:]
        assert (await bench.store.counts()).waiting == 2

    async def test_an_unknown_class_keeps_the_whole_page_out(self, bench: StoreBench) -> None:
        kept = await self._tried(bench)
        before = await bench.state()
        page = [renamed(kept, "good"), renamed(kept, "bad", class_key=unknown_class())]
        assert await moving(bench).import_jobs(page) is None
        assert await bench.store.load(JobId("good")) is None
        assert await bench.state() == before
        ended = renamed(kept, "ended", class_key=unknown_class(), phase=Phase.CANCELLED)
        assert await moving(bench).import_jobs([ended]) is not None, "what has ended needs no class"

    async def test_a_job_that_changed_or_is_leased_is_not_let_go(self, bench: StoreBench) -> None:
        read = await bench.enqueue()
        assert await bench.change(read, Change(priority=1)) is not None
        leased, ref = await bench.leased()
        ended, over = await bench.leased()
        assert await bench.store.write(failure(over)) is not None
        before = await bench.state()
        nobody = msgspec.structs.replace(read, job_id=JobId("nobody"))
        assert await moving(bench).discard([read, leased, ended, nobody]) == [False] * 4
        assert await bench.state() == before
        assert await bench.store.write(completion(ref)) is not None

    async def test_an_emptied_store_is_as_good_as_a_new_one(self, bench: StoreBench) -> None:
        jobs: list[Dispatch] = [await bench.enqueue(workflow_hash=WorkflowHash(name)) for name in "abca"]
        assert await moving(bench).discard(jobs) == [True] * 4
        assert await bench.lease_next() is None
        assert await bench.store.records.listing(RecordQuery(limit=9)) == []
        fresh = await bench.enqueue(workflow_hash=WorkflowHash("a"))
        assert await bench.peek() == [fresh.job_id]
        assert await bench.store.position(fresh.job_id) == 0

    async def test_workflow_stats_and_virtual_times_can_be_read(self, bench: StoreBench) -> None:
        assert await moving(bench).workflow_stats() == []
        workflow_stats = [
            WorkflowStats(WorkflowHash(name), {"card": MeanDuration(3.0, 1)}, 24.0)
            for name in ("x", "b", "x")
        ]
        for stats in workflow_stats:
            await bench.store.put_workflow_stats(stats)
        assert await moving(bench).workflow_stats() == workflow_stats[1:]
        assert (await bench.store.fair_share.get(tenant("ann"))).virtual_time == 0.0
        for seconds in (2.0, 0.5):
            await bench.store.fair_share.charge(tenant("ann"), seconds)
        assert (await bench.store.fair_share.get(tenant("ann"))).virtual_time == 2.5
