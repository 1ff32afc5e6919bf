"""The reference store: everything in this process, gone at its end. Dispatches and records in one home.

It applies the values the engine hands it under their guards, keeps the lanes in step, and numbers the facts. Every
method runs without a pause between its first and last line, so each is atomic for whoever shares the event loop.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Callable, Collection, Sequence
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any

import msgspec

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.dispatch import (
    AtRevision,
    Attempt,
    AttemptEnd,
    AttemptOutcome,
    Candidate,
    Dispatch,
    HeldBy,
    Lease,
    LeaseOffer,
    LeaseRef,
    Phase,
    Standing,
    Write,
    Written,
)
from comfyfleet.model.fact import Fact, FactDraft, FactKind
from comfyfleet.model.ids import ClassKey, JobId, PollId, ProfileKey, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Job
from comfyfleet.model.lesson import Lesson
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.ports import Clock, Counts, LeaseState, Peek, Table
from comfyfleet.stores.entries import Entry, MemoryRecords
from comfyfleet.stores.index import LaneIndex
from comfyfleet.stores.shelf import BlockShelf, LessonShelf


class MemoryStore:
    def __init__(self, clock: Clock, epoch: int = 1) -> None:
        self.epoch = epoch
        self._clock = clock
        self._entries: dict[JobId, Entry] = {}
        self._references: dict[tuple[TenantId, str], JobId] = {}
        self.records = MemoryRecords(self._entries, self._references)
        self._index = LaneIndex()
        self._by_sequence: dict[int, JobId] = {}
        self._classes: dict[ClassKey, RequirementClass] = {}
        self._table_version = 0
        self._workers: dict[WorkerId, WorkerRecord] = {}
        self._leases_of: dict[WorkerId, dict[JobId, None]] = {}
        self._polls: dict[PollId, JobId] = {}
        self._blocks = BlockShelf()
        self._lessons = LessonShelf()
        self._due: list[tuple[float, JobId]] = []
        self._sequence = 0
        self._by_phase = dict.fromkeys(Phase, 0)
        self._by_standing = dict.fromkeys(Standing, 0)
        self._ended: dict[Phase, deque[tuple[float, JobId]]] = {
            phase: deque() for phase in Phase if phase.is_final
        }
        self._is_paused = False

    @property
    def is_shared(self) -> bool:
        return False

    async def open(self) -> None:
        """Nothing to connect to."""

    def listen(self, wake: Callable[[], None]) -> None:
        """Nobody else writes here."""

    async def now(self) -> float:
        return self._clock.now()

    async def close(self) -> None:
        """Nothing is held that outlives the object."""

    # the table profile × class

    async def table(self) -> Table:
        return Table(self._table_version, MappingProxyType(self._classes), frozenset(self._index.profiles()))

    async def put_class(self, cls: RequirementClass, fits: Collection[ProfileKey], *, version: int) -> bool:
        if version != self._table_version:
            return False
        self._table_version += 1
        self._classes[cls.key] = cls
        for dropped in self._index.add_class(cls.key, fits):
            del self._classes[dropped]
        return True

    async def put_profile(self, profile: ProfileKey, fits: Collection[ClassKey], *, version: int) -> bool:
        if version != self._table_version:
            return False
        self._table_version += 1
        self._index.add_profile(profile, fits)
        return True

    async def drop_profiles(self, unused: Collection[ProfileKey]) -> None:
        for profile in unused:
            self._index.drop_profile(profile)

    # workers

    async def put_worker(self, worker: WorkerRecord) -> None:
        self._workers[worker.worker_id] = worker

    async def get_worker(self, worker_id: WorkerId) -> WorkerRecord | None:
        return self._workers.get(worker_id)

    async def workers(self) -> list[WorkerRecord]:
        return list(self._workers.values())

    async def remove_worker(self, worker_id: WorkerId) -> None:
        self._workers.pop(worker_id, None)
        self._blocks.forget_worker(worker_id)

    # dispatches

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> Written | None:
        if not self._has_classes(dispatch):
            return None
        if job.reference is not None and (known := self._references.get((job.tenant, job.reference))):
            return Written(self._entries[known].dispatch, ())
        assert dispatch.job_id not in self._entries, "job ids are made by the engine and never repeat"
        self._sequence += 1
        dispatch = msgspec.structs.replace(dispatch, sequence=self._sequence)
        entry = self._entries[dispatch.job_id] = Entry(dispatch, job)
        if job.reference is not None:
            self._references[job.tenant, job.reference] = dispatch.job_id
        self._arrive(dispatch)
        return Written(dispatch, self._note(entry, facts))

    async def load(self, job_id: JobId) -> Dispatch | None:
        entry = self._entries.get(job_id)
        return None if entry is None else entry.dispatch

    async def peek(self, query: Peek) -> list[Candidate]:
        if self._is_paused:
            return []
        blocked = self._blocks.blocked_targets(query.worker_id, self._clock.now())
        found = self._index.window(
            query.profile,
            slots=query.slots,
            lanes=query.lanes,
            quantum_s=query.quantum_s,
            skip_hashes=blocked | query.skip if query.skip else blocked,
            skip_jobs=self._kept_off(blocked),
        )
        return [
            Candidate(
                job_id := self._by_sequence[sequence],
                lane,
                sequence,
                self._entries[job_id].dispatch.queued_at,
                virtual_time,
            )
            for lane, sequence, virtual_time in found
        ]

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> Written | None:
        entry = self._entries.get(job_id)
        if entry is None or not entry.dispatch.stands_in_lane or self._is_paused:
            return None
        if not self._index.may_take(offer.profile, entry.dispatch.class_key):
            return None
        blocked = self._blocks.blocked_targets(offer.worker_id, self._clock.now())
        if entry.dispatch.workflow_hash in blocked or job_id in blocked:
            return None
        return self._grant(entry, offer)

    async def lease_next(self, offer: LeaseOffer) -> Written | None:
        if self._is_paused:
            return None
        blocked = self._blocks.blocked_targets(offer.worker_id, self._clock.now())
        chosen = self._index.first(offer.profile, blocked, self._kept_off(blocked))
        if chosen is None:
            return None
        return self._grant(self._entries[self._by_sequence[chosen[1]]], offer)

    async def leased_by_poll(self, poll_id: PollId) -> Dispatch | None:
        job_id = self._polls.get(poll_id)
        return None if job_id is None else self._entries[job_id].dispatch

    async def write(self, write: Write) -> Written | None:
        entry = self._entries.get(write.job_id)
        if entry is None or not self._holds(entry.dispatch, write):
            return None
        before = entry.dispatch
        after = write.change.apply(before)
        if not self._has_classes(after):
            return None
        ended = None
        if before.lease is not None and after.lease is None:
            ended = write.attempt_end
            assert ended is not None, "whoever ends a lease says how its attempt ended"
        job = entry.job if write.job is None else msgspec.structs.replace(entry.job, **write.job)
        # From here on nothing can fail: all of the write happens, or nothing has.
        self._depart(before)
        if before.lease is not None and ended is not None:
            self._end_lease(entry, before.lease, ended)
        entry.dispatch, entry.job = after, job
        self._arrive(after)
        for block in write.blocks:
            self._blocks.put(block)
        for pair in write.lifted:
            self._blocks.lift(pair)
        return Written(after, self._note(entry, write.facts))

    async def finish_and_lease_next(
        self, write: Write, offer: LeaseOffer
    ) -> tuple[Written | None, Written | None]:
        finished = await self.write(write)
        return finished, None if finished is None else await self.lease_next(offer)

    async def heartbeat(self, refs: Sequence[LeaseRef], ttl_s: float) -> list[LeaseState]:
        answers = []
        expires_at = self._clock.now() + ttl_s
        for ref in refs:
            entry = self._entries.get(ref.job_id)
            if entry is None or not _is_held(entry.dispatch, ref):
                answers.append(LeaseState(ref, is_alive=False))
                continue
            dispatch = entry.dispatch
            assert dispatch.lease is not None
            # A heartbeat never shortens a lease: two of them can arrive in the wrong order.
            lease = msgspec.structs.replace(
                dispatch.lease,
                expires_at=max(dispatch.lease.expires_at, expires_at),
                is_acknowledged=True,
            )
            entry.dispatch = msgspec.structs.replace(dispatch, lease=lease, revision=dispatch.revision + 1)
            answers.append(LeaseState(ref, True, dispatch.cancel_requested_at is not None))
        return answers

    async def leases_of(self, worker_id: WorkerId) -> list[Dispatch]:
        return [self._entries[job_id].dispatch for job_id in self._leases_of.get(worker_id, ())]

    async def due(self, limit: int) -> list[Dispatch]:
        now = self._clock.now()
        found: dict[JobId, Dispatch] = {}
        while len(found) < limit and (at := self._next_due()) is not None and at <= now:
            _, job_id = heappop(self._due)
            found[job_id] = self._entries[job_id].dispatch
        # They stay due until somebody writes them: an engine that dies in between loses nothing.
        for dispatch in found.values():
            self._watch(dispatch)
        return list(found.values())

    async def next_due(self) -> float | None:
        return self._next_due()

    async def counts(self) -> Counts:
        return Counts(
            waiting=self._by_standing[Standing.IN_LANE],
            delayed=self._by_standing[Standing.DELAYED],
            paused=self._by_standing[Standing.PAUSED],
            by_phase=dict(self._by_phase),
        )

    async def position(self, job_id: JobId) -> int | None:
        entry = self._entries.get(job_id)
        if entry is None or not entry.dispatch.stands_in_lane:
            return None
        return self._index.position(entry.dispatch.lane, entry.dispatch.sequence)

    async def dead_letter(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        failed = sorted(job_id for _, job_id in self._ended[Phase.FAILED] if after is None or job_id > after)
        found = []
        for job_id in dict.fromkeys(failed):
            entry = self._entries.get(job_id)
            if entry is not None and entry.dispatch.phase is Phase.FAILED:
                found.append(entry.dispatch)
                if len(found) == limit:
                    break
        return found

    async def purge(self, phase: Phase, before: float, limit: int) -> int:
        ended, purged = self._ended[phase], 0
        while ended and purged < limit and ended[0][0] < before:
            at, job_id = ended.popleft()
            entry = self._entries.get(job_id)
            if entry is None or entry.dispatch.phase is not phase or entry.ended_at != at:
                continue
            del self._entries[job_id]
            self._by_phase[phase] -= 1
            if entry.job.reference is not None:
                self._references.pop((entry.job.tenant, entry.job.reference), None)
            purged += 1
        return purged

    async def pause_queue(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    async def is_queue_paused(self) -> bool:
        return self._is_paused

    async def charge_tenant(self, tenant: TenantId, seconds: float) -> None:
        self._index.charge(tenant, seconds)

    # what is kept with a job

    async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]:
        entry = self._entries.get(job_id)
        return [] if entry is None else list(entry.facts[after:])

    async def attempts(self, job_id: JobId) -> list[Attempt]:
        entry = self._entries.get(job_id)
        return [] if entry is None else list(entry.attempts)

    async def mark_late(self, ref: LeaseRef) -> None:
        entry = self._entries.get(ref.job_id)
        if entry is None:
            return
        entry.attempts = tuple(
            msgspec.structs.replace(attempt, reported_late=True)
            if attempt.attempt_id == ref.attempt_id and attempt.outcome is not AttemptOutcome.RUNNING
            else attempt
            for attempt in entry.attempts
        )

    # blocks and lessons

    async def get_block(self, pair: Pair) -> Block | None:
        return self._blocks.get(pair)

    async def blocks(self, worker_id: WorkerId | None = None) -> list[Block]:
        return self._blocks.listing(worker_id)

    async def put_block(self, block: Block) -> None:
        self._blocks.put(block)

    async def lift(self, pairs: Sequence[Pair]) -> list[Block]:
        return [block for pair in pairs if (block := self._blocks.lift(pair)) is not None]

    async def expired_blocks(self) -> list[Block]:
        return self._blocks.take_expired(self._clock.now())

    async def next_block_end(self) -> float | None:
        return self._blocks.next_end()

    async def get_lesson(self, workflow_hash: WorkflowHash) -> Lesson | None:
        return self._lessons.get(workflow_hash)

    async def put_lesson(self, lesson: Lesson) -> None:
        self._lessons.put(lesson)

    # keeping everything in step

    def _arrive(self, dispatch: Dispatch) -> None:
        self._by_phase[dispatch.phase] += 1
        if not dispatch.phase.is_final:
            self._index.pin(dispatch.class_key)
            if dispatch.relaxed_class is not None:
                self._index.pin(dispatch.relaxed_class)
        if dispatch.phase is Phase.QUEUED:
            self._by_standing[dispatch.standing] += 1
            if dispatch.standing is Standing.IN_LANE:
                self._by_sequence[dispatch.sequence] = dispatch.job_id
                self._index.add(dispatch.lane, dispatch.sequence)
        elif dispatch.phase.is_final:
            at = self._entries[dispatch.job_id].ended_at = self._clock.now()
            self._ended[dispatch.phase].append((at, dispatch.job_id))
        self._watch(dispatch)

    def _depart(self, dispatch: Dispatch) -> None:
        self._by_phase[dispatch.phase] -= 1
        if dispatch.phase is Phase.QUEUED:
            self._by_standing[dispatch.standing] -= 1
            if dispatch.standing is Standing.IN_LANE:
                self._index.remove(dispatch.lane, dispatch.sequence)
                del self._by_sequence[dispatch.sequence]
        if not dispatch.phase.is_final:
            self._index.unpin(dispatch.class_key)
            if dispatch.relaxed_class is not None:
                self._index.unpin(dispatch.relaxed_class)

    def _has_classes(self, dispatch: Dispatch) -> bool:
        if dispatch.phase.is_final:
            return True
        relaxed = dispatch.relaxed_class
        return self._index.has_class(dispatch.class_key) and (
            relaxed is None or self._index.has_class(relaxed)
        )

    def _watch(self, dispatch: Dispatch) -> None:
        if (at := dispatch.due_at) is not None:
            heappush(self._due, (at, dispatch.job_id))

    def _next_due(self) -> float | None:
        """Entries are hints: what a dispatch says of itself now is the truth."""
        while self._due:
            at, job_id = self._due[0]
            entry = self._entries.get(job_id)
            true_at = None if entry is None else entry.dispatch.due_at
            if true_at == at:
                return at
            heappop(self._due)
            if true_at is not None and true_at > at:
                heappush(self._due, (true_at, job_id))
        return None

    def _note(self, entry: Entry, drafts: Sequence[FactDraft]) -> tuple[Fact, ...]:
        now, number = self._clock.now(), len(entry.facts)
        dispatch = entry.dispatch
        facts = tuple(
            Fact(dispatch.job_id, number + place, draft.kind, now, dispatch.round, draft.data)
            for place, draft in enumerate(drafts, start=1)
        )
        entry.facts += facts
        return facts

    def _grant(self, entry: Entry, offer: LeaseOffer) -> Written:
        now, before = self._clock.now(), entry.dispatch
        lease = Lease(
            worker_id=offer.worker_id,
            number=before.lease_number + 1,
            epoch=self.epoch,
            token=offer.token,
            poll_id=offer.poll_id,
            leased_at=now,
            expires_at=now + offer.acknowledge_s,
        )
        after = msgspec.structs.replace(
            before,
            phase=Phase.LEASED,
            lease=lease,
            lease_number=lease.number,
            attempts=before.attempts + 1,
            revision=before.revision + 1,
        )
        self._depart(before)
        entry.dispatch = after
        entry.job = msgspec.structs.replace(entry.job, phase=Phase.LEASED)
        self._arrive(after)
        self._leases_of.setdefault(offer.worker_id, {})[after.job_id] = None
        self._polls[offer.poll_id] = after.job_id
        attempt_id = after.lease_ref().attempt_id
        entry.attempts += (Attempt(attempt_id, offer.worker_id, lease.number, after.round, started_at=now),)
        data: dict[str, Any] = {
            "worker_id": offer.worker_id,
            "lease": lease.number,
            "attempt": after.attempts,
        }
        return Written(after, self._note(entry, (FactDraft(FactKind.LEASED, data),)))

    def _end_lease(self, entry: Entry, lease: Lease, end: AttemptEnd) -> None:
        mine = self._leases_of.get(lease.worker_id, {})
        mine.pop(entry.dispatch.job_id, None)
        if not mine:
            self._leases_of.pop(lease.worker_id, None)
        if self._polls.get(lease.poll_id) == entry.dispatch.job_id:
            del self._polls[lease.poll_id]
        *earlier, last = entry.attempts
        ended = msgspec.structs.replace(
            last,
            outcome=end.outcome,
            ended_at=self._clock.now(),
            charged_to=end.charged_to,
            failure=end.failure,
        )
        entry.attempts = (*earlier, ended)

    def _holds(self, dispatch: Dispatch, write: Write) -> bool:
        match write.guard:
            case HeldBy(ref):
                return _is_held(dispatch, ref)
            case AtRevision(revision):
                return dispatch.revision == revision

    def _kept_off(self, blocked: frozenset[str]) -> frozenset[int]:
        """The sequence numbers of the jobs among the blocked targets that stand in a lane."""
        return frozenset(
            entry.dispatch.sequence
            for target in blocked
            if (entry := self._entries.get(JobId(target))) is not None and entry.dispatch.stands_in_lane
        )


def _is_held(dispatch: Dispatch, ref: LeaseRef) -> bool:
    lease = dispatch.lease
    return (
        lease is not None
        and dispatch.round == ref.round
        and lease.number == ref.number
        and lease.epoch == ref.epoch
        # As bytes: the comparison takes no text beyond ASCII, and what a stranger sends may be anything.
        and hmac.compare_digest(lease.token.encode(), ref.token.encode(errors="replace"))
    )
