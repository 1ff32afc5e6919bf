"""The reference store: it keeps everything in this process and loses it at the end.

`stores/inprocess/queue_state.py` owns open jobs; this module adds records, facts and ended jobs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Sequence

import msgspec

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import Attempt, Dispatch, LeaseOffer, LeaseRef, Phase, Write, WriteResult
from comfyfleet.model.fact import Fact, FactDraft
from comfyfleet.model.ids import ClassKey, JobId, PollId, ProfileKey, TenantId, WorkerId
from comfyfleet.model.job import Job
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.ports import Clock, LeaseState, RecordQuery
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.stores.guards import may_purge
from comfyfleet.stores.inprocess.fair_share import MemoryFairShare
from comfyfleet.stores.inprocess.queue_state import JobEnd, QueueEntry, QueueState
from comfyfleet.stores.inprocess.store import InProcessStore, is_as_read, place


class MemoryEntry(QueueEntry, kw_only=True, eq=False, gc=False):
    job: Job
    facts: tuple[Fact, ...] = ()

    @property
    def reference(self) -> str | None:
        return self.job.reference


class MemoryStore(InProcessStore[MemoryEntry]):
    def __init__(self, clock: Clock, epoch: int = 1) -> None:
        super().__init__(clock, epoch)
        self.records = MemoryRecords(self._state)
        self.documents = MemoryDocumentStore()
        self.fair_share = MemoryFairShare(
            self._state.fair_share,
            clock.now,
            lambda: [entry.dispatch for entry in self._state.entries.values()],
        )
        self._ended: dict[Phase, deque[tuple[JobEnd, JobId]]] = {
            phase: deque() for phase in Phase if phase.is_final
        }
        self._unsettled: list[JobId] = []
        """Sorted."""
        self.job_transfer = MemoryJobTransfer(self)

    async def open(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to release."""

    # eligibility matrix

    async def put_class(self, cls: RequirementClass, fits: Collection[ProfileKey], *, version: int) -> bool:
        return self._state.put_class(cls, fits, version=version) is not None

    async def put_profile(self, profile: ProfileKey, fits: Collection[ClassKey], *, version: int) -> bool:
        return self._state.put_profile(profile, fits, version=version)

    async def drop_profiles(self, unused: Collection[ProfileKey]) -> None:
        for profile in unused:
            self._state.index.drop_profile(profile)

    # workers

    async def _save_worker(self, worker: WorkerRecord) -> None:
        self._state.workers[worker.worker_id] = worker

    async def remove_worker(self, worker_id: WorkerId) -> None:
        self._state.workers.pop(worker_id, None)
        self._state.blocks.forget_worker(worker_id)

    # dispatches

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        found = self._state.entries.get(dispatch.job_id)
        if found is None and job.reference is not None and self._state.has_classes(dispatch):
            known = self._state.references.get((job.tenant, job.reference))
            found = None if known is None else self._state.entries[known]
        if found is not None:
            return WriteResult(found.dispatch, ())
        entry = MemoryEntry(dispatch=dispatch, job=job)
        written = self._with_facts(self._state.enqueue(entry, facts))
        if written is not None:
            self._note_end(entry)
        return written

    async def load(self, job_id: JobId) -> Dispatch | None:
        entry = self._state.entries.get(job_id)
        return None if entry is None else entry.dispatch

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        return self._granted(self._state.lease(job_id, offer))

    async def leased_by_poll(self, poll_id: PollId) -> Dispatch | None:
        return self._state.leased_by_poll(poll_id)

    async def write(self, write: Write) -> WriteResult | None:
        job = None
        if write.job is not None and (entry := self._state.entries.get(write.job_id)) is not None:
            job = msgspec.structs.replace(entry.job, **write.job)
        written = self._with_facts(self._state.write(write))
        if written is None:
            return None
        entry = self._state.entries[write.job_id]
        if job is not None:
            entry.job = job
        self._note_end(entry)
        return written

    def _note_end(self, entry: MemoryEntry) -> None:
        dispatch = entry.dispatch
        is_unsettled = dispatch.is_unsettled
        if dispatch.has_tenant_database:
            self._note_unsettled(dispatch.job_id, is_unsettled)
        # The order for purging. An unsettled job joins once it is settled, so that it delays no other job.
        if entry.ending is not None and not is_unsettled:
            self._ended[dispatch.phase].append((entry.ending, dispatch.job_id))

    def _note_unsettled(self, job_id: JobId, is_unsettled: bool) -> None:
        place = bisect_left(self._unsettled, job_id)
        is_noted = self._unsettled[place : place + 1] == [job_id]
        if is_unsettled and not is_noted:
            self._unsettled.insert(place, job_id)
        elif is_noted and not is_unsettled:
            del self._unsettled[place]

    def _forget(self, entry: MemoryEntry) -> None:
        self._note_unsettled(entry.dispatch.job_id, False)
        self._state.forget(entry)

    async def heartbeat(self, refs: Sequence[LeaseRef], ttl_s: float) -> list[LeaseState]:
        return [self._state.heartbeat(ref, ttl_s) for ref in refs]

    async def leases_of(self, *worker_ids: WorkerId) -> list[Dispatch]:
        return self._state.leases_of(worker_ids)

    async def due(self, limit: int, after: Dispatch | None = None) -> list[Dispatch]:
        return self._state.due(limit, after)

    async def dead_letter(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        ended = {job_id for _, job_id in self._ended[Phase.FAILED]}.union(self._unsettled)
        found = []
        for job_id in sorted(job_id for job_id in ended if after is None or job_id > after):
            entry = self._state.entries.get(job_id)
            if entry is not None and entry.dispatch.phase is Phase.FAILED:
                found.append(entry.dispatch)
                if len(found) == limit:
                    break
        return found

    async def unsettled(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        first = 0 if after is None else bisect_right(self._unsettled, after)
        return [self._state.entries[job_id].dispatch for job_id in self._unsettled[first : first + limit]]

    async def purge(self, phase: Phase, before: float, limit: int) -> int:
        ended, purged, now = self._ended[phase], 0, self._clock.now()
        young = []
        while ended and purged < limit and ended[0][0].at < before:
            ending, job_id = ended.popleft()
            entry = self._state.entries.get(job_id)
            if entry is None or entry.ending != ending:
                continue
            if may_purge(entry.dispatch, ending.at, before, now):
                self._forget(entry)
                purged += 1
            else:
                young.append((ending, job_id))
        ended.extendleft(reversed(young))
        return purged

    async def pause_queue(self, is_paused: bool) -> None:
        self._state.is_paused = is_paused

    # facts and attempts

    async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]:
        entry = self._state.entries.get(job_id)
        return [] if entry is None else list(entry.facts[after:])

    async def attempts(self, job_id: JobId) -> list[Attempt]:
        entry = self._state.entries.get(job_id)
        return [] if entry is None else list(entry.attempts)

    async def mark_late(self, ref: LeaseRef) -> None:
        self._state.mark_late(ref)

    # blocks and workflow statistics

    async def put_block(self, block: Block) -> None:
        self._state.blocks.put(block)

    async def lift(self, pairs: Sequence[Pair]) -> list[Block]:
        return [block for pair in pairs if (block := self._state.blocks.lift(pair)) is not None]

    async def expired_blocks(self) -> list[Block]:
        return self._state.blocks.take_expired(self._clock.now())

    async def _save_workflow_stats(self, stats: WorkflowStats) -> None:
        self._state.workflow_stats.put(stats)

    # private

    def _granted(self, written: WriteResult | None) -> WriteResult | None:
        if written is not None:
            entry = self._state.entries[written.dispatch.job_id]
            entry.job = msgspec.structs.replace(entry.job, phase=Phase.LEASED)
        return self._with_facts(written)

    def _with_facts(self, written: WriteResult | None) -> WriteResult | None:
        if written is not None:
            self._state.entries[written.dispatch.job_id].facts += written.facts
        return written


class MemoryRecords:
    def __init__(self, queue: QueueState[MemoryEntry]) -> None:
        self._entries = queue.entries
        self._references = queue.references

    async def get(self, job_id: JobId) -> Job | None:
        entry = self._entries.get(job_id)
        return None if entry is None else entry.job

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        job_id = self._references.get((tenant, reference))
        return None if job_id is None else self._entries[job_id].job

    async def listing(self, query: RecordQuery) -> list[Job]:
        """Two ids of one millisecond may be out of order, so a page continues by sequence."""
        after, newest_first = query.after, query.newest_first
        last = None if after is None else self._entries.get(after)
        page = []
        for job_id, entry in reversed(self._entries.items()) if newest_first else self._entries.items():
            if last is not None:
                here, there = entry.dispatch.sequence, last.dispatch.sequence
                if here >= there if newest_first else here <= there:
                    continue
            elif after is not None and (job_id >= after if newest_first else job_id <= after):
                # The last job of the previous page is gone; its id still gives its time.
                continue
            if query.tenant not in (None, entry.job.tenant) or query.phase not in (
                None,
                entry.dispatch.phase,
            ):
                continue
            page.append(entry.job)
            if len(page) == query.limit:
                break
        return page


class MemoryJobTransfer:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._state = store._state

    async def import_jobs(self, jobs: Sequence[JobSnapshot]) -> list[Dispatch] | None:
        if not all(self._state.has_classes(each.dispatch) for each in jobs):
            return None
        return [self._import_jobs(each).dispatch for each in jobs]

    def _import_jobs(self, snapshot: JobSnapshot) -> MemoryEntry:
        job = snapshot.job
        known: JobId | None = job.job_id
        if job.job_id not in self._state.entries and job.reference is not None:
            known = self._state.references.get((job.tenant, job.reference))
        if known is not None and (found := self._state.entries.get(known)) is not None:
            return found
        entry = place(
            self._state, MemoryEntry(dispatch=snapshot.dispatch, job=job), snapshot, self._store._clock.now()
        )
        entry.facts = snapshot.facts
        self._store._note_end(entry)
        return entry

    async def discard(self, jobs: Sequence[Dispatch]) -> list[bool]:
        answers = []
        for read in jobs:
            entry = self._state.entries.get(read.job_id)
            answers.append(is_as_read(None if entry is None else entry.dispatch, read))
            if entry is not None and answers[-1]:
                self._store._forget(entry)
        return answers

    async def workflow_stats(self) -> list[WorkflowStats]:
        return self._state.workflow_stats.listing()
