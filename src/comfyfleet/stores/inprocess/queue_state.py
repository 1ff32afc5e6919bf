"""The state of an in-process store and the effect of each call: open jobs, eligibility, workers, blocks,
statistics.

The memory and the SQLite store share it. No method awaits, so each is atomic within its event loop. The
stores keep job records, facts and ended jobs themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import msgspec

from comfyfleet.model.block import Pair
from comfyfleet.model.dispatch import (
    Attempt,
    AttemptEnd,
    AttemptOutcome,
    Candidate,
    Dispatch,
    LaneKey,
    Lease,
    LeaseOffer,
    LeaseRef,
    Phase,
    Readiness,
    Write,
    WriteResult,
)
from comfyfleet.model.fact import Fact, FactDraft
from comfyfleet.model.ids import ClassKey, JobId, PollId, ProfileKey, TenantId, WorkerId
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.ports import Clock, Counts, EligibilityMatrix, LaneBacklog, LeaseState, Peek, QueuePlace
from comfyfleet.stores.guards import extended, granted, holds, is_leased_as
from comfyfleet.stores.inprocess.blocks import BlockTable, WorkflowStatsTable
from comfyfleet.stores.inprocess.due_times import DueTimes
from comfyfleet.stores.inprocess.fair_share import FairShareState
from comfyfleet.stores.inprocess.lane_index import LaneIndex


class JobEnd(NamedTuple):
    number: int
    """Orders jobs that end at the same moment."""
    at: float


class QueueEntry(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """What in-process stores keep of a job; each adds its own fields. There are hundreds of thousands, so an
    entry is small and has no reference cycles.
    """

    dispatch: Dispatch
    attempts: tuple[Attempt, ...] = ()
    fact_count: int = 0
    ending: JobEnd | None = None

    @property
    def reference(self) -> str | None:
        raise NotImplementedError


E = TypeVar("E", bound=QueueEntry)

# Reading a module's name is several times faster than an enum lookup.
_QUEUED, _LEASED, _IN_LANE = Phase.QUEUED, Phase.LEASED, Readiness.IN_LANE
_NOTHING: frozenset[int] = frozenset()
_SET_S = 1.0
"""A smaller difference between the two clocks comes from reading them one after the other."""


class QueueState(Generic[E]):
    def __init__(self, clock: Clock, epoch: int) -> None:
        self.epoch = epoch
        self.entries: dict[JobId, E] = {}
        self.references: dict[tuple[TenantId, str], JobId] = {}
        self.classes: dict[ClassKey, RequirementClass] = {}
        self.table_version = 0
        self.workers: dict[WorkerId, WorkerRecord] = {}
        self.blocks = BlockTable()
        self.workflow_stats = WorkflowStatsTable()
        self.by_phase = dict.fromkeys(Phase, 0)
        self.payload_bytes = 0
        self.sequence = 0
        self.endings = 0
        self.highest_id = ""
        """The greatest id so far. Ids grow with time, so a greater one is certainly new."""
        self.is_paused = False
        self.forgotten: list[Pair] = []
        """Pairs evicted by the blocks of the latest write."""
        self.index = LaneIndex()
        self.fair_share = FairShareState(self.index)
        self._clock = clock
        self._began = clock.now() - clock.monotonic()
        """Wall time at monotonic time 0, as the clock is set now."""
        self.longest_ttl_s = 0.0
        """The longest lease ever given."""
        self.is_ttl_new = False
        self._by_sequence: dict[int, JobId] = {}
        self._leases_of: dict[WorkerId, dict[JobId, None]] = {}
        self._polls: dict[PollId, JobId] = {}
        self._due = DueTimes(self._due_at)
        self._by_readiness = dict.fromkeys(Readiness, 0)

    # eligibility matrix

    def table(self) -> EligibilityMatrix:
        return EligibilityMatrix(
            self.table_version, MappingProxyType(self.classes), frozenset(self.index.profiles())
        )

    def put_class(
        self, cls: RequirementClass, fits: Collection[ProfileKey], *, version: int
    ) -> list[ClassKey] | None:
        """The classes evicted for it; None if the version is outdated."""
        if version != self.table_version:
            return None
        self.table_version += 1
        self.classes[cls.key] = cls
        dropped = self.index.add_class(cls.key, fits)
        for class_key in dropped:
            del self.classes[class_key]
        return dropped

    def put_profile(self, profile: ProfileKey, fits: Collection[ClassKey], *, version: int) -> bool:
        if version != self.table_version:
            return False
        self.table_version += 1
        self.index.add_profile(profile, fits)
        return True

    # jobs

    def enqueue(self, entry: E, drafts: Sequence[FactDraft]) -> WriteResult | None:
        """Assigns the sequence number and the place. The caller has checked that id and reference are new."""
        dispatch = entry.dispatch
        if not self.has_classes(dispatch):
            return None
        assert dispatch.job_id not in self.entries, "the caller checks that the id is new"
        self.sequence += 1
        place = dispatch.place + self.index.waiting_from(dispatch.priority)
        entry.dispatch = dispatch = msgspec.structs.replace(dispatch, sequence=self.sequence, place=place)
        self._register(entry)
        self._note_end(entry)
        self._count_in(entry, is_newcomer=not self.fair_share.is_open(dispatch.tenant))
        return WriteResult(dispatch, self._note(entry, drafts))

    def has_classes(self, dispatch: Dispatch) -> bool:
        """Whether the table has all classes of the job."""
        if dispatch.phase is not _QUEUED and dispatch.phase is not _LEASED:
            return True
        relaxed = dispatch.relaxed_class
        return self.index.has_class(dispatch.class_key) and (relaxed is None or self.index.has_class(relaxed))

    def peek(self, query: Peek) -> list[Candidate]:
        if self.is_paused:
            return []
        now = self._now()
        self.fair_share.end_holds(now)
        blocked = self.blocks.blocked_targets(query.worker_id, now)
        found = self.index.window(
            query.profile,
            slots=query.slots,
            lanes=query.lanes,
            quantum_s=query.quantum_s,
            skip=blocked | query.skip if query.skip else blocked,
            skip_jobs=self._blocked_sequences(blocked),
            warm=query.warm,
        )
        return [
            Candidate(
                job_id := self._by_sequence[sequence],
                lane,
                sequence,
                (dispatch := self.entries[job_id].dispatch).queued_at,
                virtual_time,
                self.fair_share.weight(lane.tenant),
                waiting,
                dispatch.place,
            )
            for lane, sequence, virtual_time, waiting in found
        ]

    def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        entry = self.entries.get(job_id)
        if entry is None or not entry.dispatch.stands_in_lane or self.is_paused:
            return None
        if not self._is_as_matched(offer):
            return None
        if not self.index.may_take(offer.profile, entry.dispatch.class_key):
            return None
        now = self._now()
        self.fair_share.end_holds(now)
        if self.index.is_hidden(entry.dispatch.tenant):
            return None
        blocked = self.blocks.blocked_targets(offer.worker_id, now)
        if blocked and not blocked.isdisjoint(entry.dispatch.block_targets):
            return None
        return self._grant(entry, entry.dispatch.lane, offer)

    def _is_as_matched(self, offer: LeaseOffer) -> bool:
        """The worker may have registered anew since matching, perhaps with other tenants."""
        worker = self.workers.get(offer.worker_id)
        return worker is None or worker.profile == offer.profile

    def leased_by_poll(self, poll_id: PollId) -> Dispatch | None:
        job_id = self._polls.get(poll_id)
        return None if job_id is None else self.entries[job_id].dispatch

    def write(self, write: Write) -> WriteResult | None:
        """Applies all but the job's record, which the store owns."""
        entry = self.entries.get(write.job_id)
        if entry is None or not holds(entry.dispatch, write):
            return None
        before = entry.dispatch
        after = write.change.apply(before)
        if not self.has_classes(after):
            return None
        lease = before.lease if after.lease is None else None
        end = None if lease is None else write.attempt_end
        assert lease is None or end is not None, "a write that ends a lease has an attempt_end"
        # Nothing below can fail, so the write is atomic.
        was_open = self.fair_share.is_open(before.tenant)
        self._count_out(before)
        if lease is not None and end is not None:
            self._end_lease(entry, lease, end)
        entry.dispatch = after
        self._note_end(entry)
        self._count_in(entry, is_newcomer=not was_open)
        if write.blocks:
            self.forgotten = [gone for block in write.blocks if (gone := self.blocks.put(block)) is not None]
        for pair in write.lifted:
            self.blocks.lift(pair)
        return WriteResult(after, self._note(entry, write.facts))

    def heartbeat(self, ref: LeaseRef, ttl_s: float) -> LeaseState:
        entry = self.entries.get(ref.job_id)
        if entry is None or not is_leased_as(entry.dispatch, ref):
            return LeaseState(ref, is_alive=False)
        now = self._now()
        dispatch = entry.dispatch
        self._note_ttl(ttl_s)
        entry.dispatch = extended(dispatch, now, ttl_s)
        return LeaseState(ref, True, dispatch.stop is not None)

    def mark_late(self, ref: LeaseRef) -> bool:
        """Returns whether it changed anything."""
        entry = self.entries.get(ref.job_id)
        if entry is None:
            return False
        before = entry.attempts
        entry.attempts = tuple(
            msgspec.structs.replace(attempt, reported_late=True)
            if attempt.attempt_id == ref.attempt_id and attempt.outcome is not AttemptOutcome.RUNNING
            else attempt
            for attempt in before
        )
        return entry.attempts != before

    def leases_of(self, worker_ids: Iterable[WorkerId]) -> list[Dispatch]:
        held = (job_id for worker_id in worker_ids for job_id in self._leases_of.get(worker_id, ()))
        return [self.entries[job_id].dispatch for job_id in held]

    def due(self, limit: int, after: Dispatch | None = None) -> list[Dispatch]:
        last = (float("-inf"), "") if after is None else (after.due_at or 0.0, after.job_id)
        found = islice(self._due.until(self._now(), last), limit)
        return [self.entries[job_id].dispatch for job_id in found]

    def _due_at(self, job_id: JobId) -> float | None:
        entry = self.entries.get(job_id)
        return None if entry is None else entry.dispatch.due_at

    def next_due(self) -> float | None:
        return self._due.next()

    def counts(self) -> Counts:
        return Counts(
            waiting=self._by_readiness[Readiness.IN_LANE],
            delayed=self._by_readiness[Readiness.DELAYED],
            paused=self._by_readiness[Readiness.PAUSED],
            by_phase=dict(self.by_phase),
            payload_bytes=self.payload_bytes,
        )

    def position(self, job_id: JobId) -> int | None:
        entry = self.entries.get(job_id)
        if entry is None or not entry.dispatch.stands_in_lane:
            return None
        return self.index.position(entry.dispatch.lane, entry.dispatch.sequence)

    def waiting_lanes(self, limit: int) -> list[LaneBacklog]:
        return [
            LaneBacklog(lane, waiting, self._place_of(first), self._place_of(last))
            for lane, waiting, first, last in self.index.waiting_lanes(limit)
        ]

    def _place_of(self, sequence: int) -> QueuePlace:
        dispatch = self.entries[self._by_sequence[sequence]].dispatch
        return QueuePlace(sequence, dispatch.queued_at, dispatch.place)

    # loading and unloading

    def load(self, entry: E) -> None:
        """Loads a job that is not counted yet."""
        dispatch = entry.dispatch
        self._register(entry)
        if dispatch.lease is not None:
            self._begin_lease(dispatch, dispatch.lease)
        self._count_in(entry)

    def load_ended(self, entry: E) -> None:
        """Loads an ended job that is still counted."""
        self.by_phase[entry.dispatch.phase] -= 1
        self.load(entry)

    def unload_ended(self, entry: E) -> None:
        """Unloads an ended job; it stays counted."""
        del self.entries[entry.dispatch.job_id]
        if entry.reference is not None:
            self.references.pop((entry.dispatch.tenant, entry.reference), None)

    def forget(self, entry: E) -> None:
        """Removes a job from memory and counts."""
        dispatch = entry.dispatch
        self._count_out(dispatch)
        if dispatch.lease is not None:
            self._drop_lease(dispatch, dispatch.lease)
        self.unload_ended(entry)

    # private

    def _register(self, entry: E) -> None:
        job_id = entry.dispatch.job_id
        self.entries[job_id] = entry
        self.highest_id = max(self.highest_id, job_id)
        if entry.reference is not None:
            self.references[entry.dispatch.tenant, entry.reference] = job_id

    def _count_in(self, entry: E, *, is_newcomer: bool = False) -> None:
        """`is_newcomer`: its tenant had no open job before."""
        dispatch = entry.dispatch
        phase = dispatch.phase
        self.by_phase[phase] += 1
        is_queued = phase is _QUEUED
        if is_queued or phase is _LEASED:
            self.payload_bytes += dispatch.payload_bytes
            self.index.pin(dispatch.class_key)
            if dispatch.relaxed_class is not None:
                self.index.pin(dispatch.relaxed_class)
        if is_queued:
            self._by_readiness[dispatch.standing] += 1
            if dispatch.standing is _IN_LANE:
                self._by_sequence[dispatch.sequence] = dispatch.job_id
                if self.fair_share.is_fair:
                    if is_newcomer:
                        self.fair_share.begin_to_wait(dispatch.tenant)
                    self.fair_share.count_waiting(dispatch.tenant, 1)
                self.index.add(dispatch.lane, dispatch.sequence)
        self._watch(dispatch)

    def _count_out(self, dispatch: Dispatch) -> None:
        phase = dispatch.phase
        self.by_phase[phase] -= 1
        is_queued = phase is _QUEUED
        if is_queued:
            self._by_readiness[dispatch.standing] -= 1
            if dispatch.standing is _IN_LANE:
                self.index.remove(dispatch.lane, dispatch.sequence)
                del self._by_sequence[dispatch.sequence]
                if self.fair_share.is_fair:
                    self.fair_share.count_waiting(dispatch.tenant, -1)
        if is_queued or phase is _LEASED:
            self.payload_bytes -= dispatch.payload_bytes
            self.index.unpin(dispatch.class_key)
            if dispatch.relaxed_class is not None:
                self.index.unpin(dispatch.relaxed_class)

    def _note_end(self, entry: E) -> None:
        """A job that is written after its end gets a new end: retention starts again."""
        phase, entry.ending = entry.dispatch.phase, None
        if phase is not _QUEUED and phase is not _LEASED:
            self.endings += 1
            entry.ending = JobEnd(self.endings, self._now())

    def _now(self) -> float:
        """Corrects for a changed wall clock, so that a lease lasts as long as it was given for."""
        now = self._clock.now()
        began = now - self._clock.monotonic()
        if abs(began - self._began) > _SET_S:
            by, self._began = began - self._began, began
            for jobs in self._leases_of.values():
                for job_id in jobs:
                    self._move_lease(job_id, by=by)
        return now

    def _note_ttl(self, ttl_s: float) -> None:
        if ttl_s > self.longest_ttl_s:
            self.longest_ttl_s, self.is_ttl_new = ttl_s, True

    def end_leases_within(self, ttl_s: float) -> None:
        """Caps loaded leases at the longest duration: the clock may have been ahead when they were given."""
        latest = self._now() + ttl_s
        for jobs in self._leases_of.values():
            for job_id in jobs:
                lease = self.entries[job_id].dispatch.lease
                if lease is not None and lease.expires_at > latest:
                    self._move_lease(job_id, by=latest - lease.expires_at)

    def _move_lease(self, job_id: JobId, by: float) -> None:
        entry = self.entries[job_id]
        lease = entry.dispatch.lease
        assert lease is not None, "a worker's jobs are leased"
        moved = msgspec.structs.replace(
            lease, leased_at=lease.leased_at + by, expires_at=lease.expires_at + by
        )
        entry.dispatch = msgspec.structs.replace(entry.dispatch, lease=moved)
        self._watch(entry.dispatch)

    def _watch(self, dispatch: Dispatch) -> None:
        if (at := dispatch.due_at) is not None:
            self._due.add(dispatch.job_id, at)

    def _note(self, entry: E, drafts: Sequence[FactDraft]) -> tuple[Fact, ...]:
        now, number, dispatch = self._now(), entry.fact_count, entry.dispatch
        job_id, round_ = dispatch.job_id, dispatch.round
        facts = []
        for draft in drafts:
            number += 1
            facts.append(Fact(job_id, number, draft.kind, now, round_, draft.data))
        entry.fact_count = number
        return tuple(facts)

    def _grant(self, entry: E, lane: LaneKey, offer: LeaseOffer) -> WriteResult:
        now = self._now()
        before = entry.dispatch
        self._note_ttl(max(offer.ttl_s, offer.acknowledge_s))
        after, lease, attempt, fact = granted(before, offer, self.epoch, now, entry.fact_count)
        entry.dispatch = after
        # The job stays open, so its classes stay pinned.
        self.by_phase[_QUEUED] -= 1
        self.by_phase[_LEASED] += 1
        self._by_readiness[_IN_LANE] -= 1
        self.index.remove(lane, before.sequence)
        del self._by_sequence[before.sequence]
        self._watch(after)
        if self.fair_share.is_fair:
            self.fair_share.count_waiting(after.tenant, -1)
            self.fair_share.charge(after.job_id, after.tenant, offer.charge_s)
        self._begin_lease(after, lease)
        entry.attempts += (attempt,)
        entry.fact_count += 1
        return WriteResult(after, (fact,))

    def _begin_lease(self, dispatch: Dispatch, lease: Lease) -> None:
        self._leases_of.setdefault(lease.worker_id, {})[dispatch.job_id] = None
        self._polls[lease.poll_id] = dispatch.job_id
        if self.fair_share.is_fair:
            self.fair_share.count_leased(dispatch.tenant, 1, self._now())

    def _drop_lease(self, dispatch: Dispatch, lease: Lease) -> None:
        job_id = dispatch.job_id
        mine = self._leases_of.get(lease.worker_id, {})
        mine.pop(job_id, None)
        if not mine:
            self._leases_of.pop(lease.worker_id, None)
        if self._polls.get(lease.poll_id) == job_id:
            del self._polls[lease.poll_id]
        if self.fair_share.is_fair:
            self.fair_share.count_leased(dispatch.tenant, -1, self._now())

    def _end_lease(self, entry: E, lease: Lease, end: AttemptEnd) -> None:
        if self.fair_share.is_fair:
            self.fair_share.settle(entry.dispatch.job_id, entry.dispatch.tenant, end.used_s)
        self._drop_lease(entry.dispatch, lease)
        ended = msgspec.structs.replace(
            entry.attempts[-1],
            outcome=end.outcome,
            ended_at=self._now(),
            charged_to=end.charged_to,
            failure=end.failure,
        )
        entry.attempts = (*entry.attempts[:-1], ended)

    def _blocked_sequences(self, blocked: frozenset[str]) -> frozenset[int]:
        """Sequence numbers of blocked jobs that wait in a lane."""
        if not blocked:
            return _NOTHING
        return frozenset(
            entry.dispatch.sequence
            for target in blocked
            if (entry := self.entries.get(JobId(target))) is not None and entry.dispatch.stands_in_lane
        )
