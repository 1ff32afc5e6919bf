"""The ranks of one moment in a matching pass: which jobs are due, which slots leave a job to others, and what to lease.

Policy decides (`policy/scheduling.py`, `policy/assignment.py`); the outlook and the estimates know the fleet. Jobs of a
lane differ only in age, and slots of a kind are equal for all times, so both are looked at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping
from functools import partial
from math import inf
from typing import NamedTuple

from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.start_times import start_times
from comfyfleet.model.block import Pair, tenant_target
from comfyfleet.model.dispatch import Candidate, Dispatch, LaneKey, LeaseOffer
from comfyfleet.model.ids import JobId, PollId, ProfileKey, WorkerId
from comfyfleet.model.job import Job
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.assignment import RankKey, SlotKey, WaitingJob, assign, rank_key, score, slot_key
from comfyfleet.policy.demand import ModelSet
from comfyfleet.policy.fair_share import TenantTurn, charge_s, tenant_turns
from comfyfleet.policy.scheduling import (
    EPSILON_S,
    Backlog,
    BusySlot,
    Offer,
    Rival,
    SlotKind,
    WaitReason,
    cost_step,
    faster,
    is_left_to_others,
    look_again_at,
    missing,
    offer_of,
    rivals_of,
    wait_reason,
)
from comfyfleet.policy.workflow_stats import expected_s

_COLD_SHARE = 64
"""Of one set of models, a pass loads at most one copy for so many idle slots, because each changes the figures."""


class LeaseGrant(NamedTuple):
    """A lease, with the job's record if it was read together with the lease."""

    dispatch: Dispatch
    record: Job | None


class ParkedPoll:
    __slots__ = ("alike", "answer", "load", "offer", "poll_id", "worker_id")

    def __init__(self, worker_id: WorkerId, poll_id: PollId, load: int | None = None) -> None:
        self.worker_id, self.poll_id, self.load = worker_id, poll_id, load
        self.offer: LeaseOffer | None = None  # with which a job was last asked for
        self.alike: tuple[WorkerRecord, int] | None = None  # the same number for equal slots (`SlotSample`)
        self.answer: asyncio.Future[LeaseGrant | None] = asyncio.get_running_loop().create_future()


class Plan(NamedTuple):
    """What a pass wants to lease."""

    chosen: dict[str, JobId]
    seen: dict[JobId, Candidate]
    is_partial: bool
    """After these leases there may be more for the same slots."""
    left: dict[PollId, dict[LaneKey, WaitReason]]
    """What each slot leaves to others."""
    look_at: float
    """When to look again at those slots."""

    def turns(self, context: EngineContext) -> dict[JobId, TenantTurn]:
        return _turns(self.seen, context)


class Seen:
    """The candidates so far, and which groups of slots may take each of them. Slots of a group see the same."""

    def __init__(self, groups: list[list[ParkedPoll]]) -> None:
        self.groups = groups
        """What is ranked. Where many slots are equal, not all of them (`SlotSample`)."""
        self.jobs: dict[JobId, Candidate] = {}
        self.takers: dict[JobId, tuple[int, ...]] = {}
        self.targets: list[set[str]] = [set() for _ in groups]
        """By group: block targets of the workflows it has seen."""

    def add(self, number: int, found: list[Candidate]) -> None:
        for candidate in found:
            self.jobs[candidate.job_id] = candidate
            takers = self.takers.get(candidate.job_id, ())
            if number not in takers:
                self.takers[candidate.job_id] = (*takers, number)
            self.targets[number].add(tenant_target(candidate.lane.workflow_hash, candidate.lane.tenant))


class _Lane(NamedTuple):
    """The slots for the jobs of one lane, best first."""

    slots: tuple[str, ...]
    warm: tuple[str, ...]
    """Those that have the models loaded."""
    is_preferred: bool


class _Group(NamedTuple):
    """A backlog with the lane of its oldest job and the slots that others have for it."""

    backlog: Backlog
    warm: list[Rival]
    loose: list[Rival]


_Key = tuple[int, ModelSet]
_Ways = dict[tuple[LaneKey, tuple[int, ...]], _Lane]


class PassRanks:
    """The ranks of one moment. Each lease changes them."""

    def __init__(
        self,
        context: EngineContext,
        seen: Seen,
        slots: int,
        now: float,
        has_models: bool,
        parked: Mapping[WorkerId, int],
        blocked: frozenset[Pair] = frozenset(),
    ) -> None:
        self._context = context
        self._seen = seen
        self._slots = slots
        self._now = now
        self._has_models = has_models
        self._parked = parked
        self._blocked = blocked
        self._turns = _turns(seen.jobs, context)
        self._start_by = start_times(context, seen.jobs, self._turns, now, has_models=has_models)
        self._ways: _Ways = {}
        self._left: dict[PollId, dict[LaneKey, WaitReason]] = {}
        self._usable: set[PollId] = set()
        """Slots that some job may take now."""
        self._left_backlogs: dict[_Key, Backlog] = {}
        self._offers: dict[tuple[_Key, LaneKey, SlotKind], tuple[Offer, WaitReason | None]] = {}
        self._heads: dict[_Key, Candidate] = {}
        self._lengths: Counter[_Key] = Counter()
        self._groups: dict[_Key, _Group] = {}
        self._busy: dict[SlotKind, list[BusySlot]] | None = None
        self._counted_on: set[int] = set()
        self._loaded: Mapping[ModelSet, int] | None = None
        self._copies: dict[ModelSet, int] = {}
        if has_models:
            self._count_waiting()

    def plan(self) -> Plan:
        if self._has_models and self._slots == 1:
            return self._plan_one()
        jobs, withheld, cold_for = self._ranked()
        chosen = assign(jobs)
        is_partial = False
        if self._has_models:
            dropped = self._one_copy_each(chosen, cold_for, {job.job_id: job.rank for job in jobs})
            for poll_id in dropped:
                del chosen[poll_id]
            is_partial = bool(dropped) or bool(withheld.difference(chosen.values()))
        return Plan(chosen, self._seen.jobs, is_partial, self._left, self._look_at())

    def _plan_one(self) -> Plan:
        """For a single slot: the first job in the order of ranks that is not left to others. The rest need no look."""
        slot = next(each for group in self._seen.groups for each in group)
        loaded, poll_id = self._kind(slot).loaded, slot.poll_id
        ranks: list[tuple[int, RankKey, Candidate, bool]] = []
        for each in self._seen.jobs.values():
            models = self._context.outlook.models_of(each.lane.class_key)
            is_cold = bool(models and missing(models, loaded))
            is_preferred = slot.worker_id in self._preferred(each.lane)
            rank = self._rank(each, is_preferred, is_cold)
            ranks.append((-each.lane.priority, rank, each, is_cold and not is_preferred))
        ranks.sort(key=lambda found: found[:2])
        chosen: dict[str, JobId] = {}
        for _, _, each, may_leave in ranks:
            if may_leave and self._leaves(slot, each.lane):
                continue
            chosen[poll_id] = each.job_id
            self._usable.add(poll_id)
            self._left.clear()
            break
        return Plan(chosen, self._seen.jobs, False, self._left, self._look_at())

    def _leaves(self, slot: ParkedPoll, lane: LaneKey) -> bool:
        """Whether the slot leaves the lane to others."""
        models = self._context.outlook.models_of(lane.class_key)
        _, why = self._offered(lane, models, self._kind(slot))
        if why is None:
            return False
        self._left.setdefault(slot.poll_id, {})[lane] = why
        key = (lane.priority, models)
        self._left_backlogs[key] = self._group(key).backlog
        return True

    def _look_at(self) -> float:
        if not self._left_backlogs:
            return inf
        return look_again_at(self._left_backlogs.values(), self._now, self._context.rules.round_s)

    def hungry(self) -> frozenset[int]:
        """Groups with a slot that leaves to others whatever it has seen."""
        return frozenset(
            number
            for number, group in enumerate(self._seen.groups)
            if any(slot.poll_id in self._left and slot.poll_id not in self._usable for slot in group)
        )

    def _is_due(self, job_id: JobId) -> bool:
        return self._start_by.get(job_id, inf) <= self._now + EPSILON_S

    # what is left to others

    def _group(self, key: _Key) -> _Group:
        """The jobs that need the same models count as one, and so do their lanes."""
        known = self._groups.get(key)
        if known is not None:
            return known
        context, head = self._context, self._heads[key]
        if self._busy is None:
            self._busy = context.outlook.busy(self._parked)
        lane = head.lane
        backlog = Backlog(key[1], lane.workflow_hash, self._lengths[key], self._start_by[head.job_id])
        may_take = partial(self._may_take, lane, frozenset(context.fleet.profiles_for(lane.class_key)))
        wanted = [models for priority, models in self._heads if priority == key[0]]
        warm, loose = rivals_of(backlog, self._busy, may_take, wanted, context.estimates)
        # A better card is good for one job.
        loose = [each for each in loose if id(each.slot) not in self._counted_on]
        group = self._groups[key] = _Group(backlog, warm, loose)
        if loose:
            self._counted_on |= self._better_cards(group, lane)
        return group

    def _count_waiting(self) -> None:
        """The oldest job of each backlog, and how many wait."""
        models_of = self._context.outlook.models_of
        for lane, count in lane_lengths(self._seen.jobs.values()).items():
            if models := models_of(lane.class_key):
                self._lengths[lane.priority, models] += count
        for each in self._seen.jobs.values():
            if models := models_of(each.lane.class_key):
                head = self._heads.setdefault((each.lane.priority, models), each)
                if each.sequence < head.sequence:
                    self._heads[each.lane.priority, models] = each

    def _better_cards(self, group: _Group, lane: LaneKey) -> set[int]:
        """The better cards that a backlog is left to."""
        found: set[int] = set()
        for kind in {self._kind(slot) for slots in self._seen.groups for slot in slots}:
            offer = self._offer(group.backlog, lane, kind)
            if is_left_to_others(offer, group.backlog, group.warm, group.loose, self._now):
                found |= {id(each.slot) for each in faster(offer, group.loose)}
        return found

    def _may_take(self, lane: LaneKey, profiles: frozenset[ProfileKey], slot: BusySlot) -> bool:
        worker = self._context.fleet.workers.get(slot.worker_id)
        if worker is None or worker.profile not in profiles:
            return False
        target = tenant_target(lane.workflow_hash, lane.tenant)
        return not self._blocked or (
            Pair(slot.worker_id, lane.workflow_hash) not in self._blocked
            and Pair(slot.worker_id, target) not in self._blocked
        )

    def _offer(self, backlog: Backlog, lane: LaneKey, kind: SlotKind) -> Offer:
        copies = self._copies_of(kind.in_danger)
        return offer_of(backlog.models, lane.workflow_hash, kind, copies, self._context.estimates)

    def _copies_of(self, models: ModelSet) -> int:
        """How many live workers have them loaded."""
        known = self._copies.get(models)
        if known is None:
            if self._loaded is None:
                self._loaded = self._context.outlook.loaded_sets()
            counts = (count for loaded, count in self._loaded.items() if not missing(models, loaded))
            known = self._copies[models] = sum(counts)
        return known

    def _kind(self, slot: ParkedPoll) -> SlotKind:
        return self._context.outlook.kind_of(self._context.fleet.workers[slot.worker_id])

    def _offered(self, lane: LaneKey, models: ModelSet, kind: SlotKind) -> tuple[Offer, WaitReason | None]:
        """What the lane costs on slots of this kind, and the reason to leave it to others."""
        key = (lane.priority, models)
        known = self._offers.get((key, lane, kind))
        if known is None:
            group = self._group(key)
            offer = self._offer(group.backlog, lane, kind)
            why = wait_reason(offer, *group, self._now)
            known = self._offers[key, lane, kind] = (offer, why)
        return known

    # ranks

    def _ranked(self) -> tuple[list[WaitingJob], set[JobId], dict[JobId, tuple[_Key, frozenset[str]]]]:
        """The jobs with their slots. Also those that get only warm slots in this pass; and for jobs that need models,
        on which slots they are warm."""
        context, jobs = self._context, self._seen.jobs
        found: list[WaitingJob] = []
        withheld: set[JobId] = set()
        cold_for: dict[JobId, tuple[_Key, frozenset[str]]] = {}
        if not self._has_models:
            for job_id, each in jobs.items():
                way = self._way(each, self._seen.takers[job_id])
                if way.slots:
                    found.append(
                        WaitingJob(
                            job_id, each.lane.priority, self._rank(each, way.is_preferred, False), way.slots
                        )
                    )
            return found, withheld, cold_for
        served: Counter[_Key] = Counter()
        for job_id, each in sorted(jobs.items(), key=lambda item: item[1].sequence):
            lane = each.lane
            way = self._way(each, self._seen.takers[job_id])
            if not way.slots:
                continue
            key = (lane.priority, context.outlook.models_of(lane.class_key))
            slots, is_cold = way.slots, False
            if key[1]:
                cold_for[job_id] = (key, frozenset(way.warm))
                # A job goes to a slot that has its models, as long as there is one. Others are looked at after that.
                if served[key] < len(way.warm):
                    served[key] += 1
                    if len(way.slots) > len(way.warm):
                        withheld.add(job_id)
                    slots = way.warm
                else:
                    is_cold = len(way.slots) > len(way.warm)
            self._usable.update(map(PollId, slots))
            found.append(
                WaitingJob(job_id, lane.priority, self._rank(each, way.is_preferred, is_cold), slots)
            )
        return found, withheld, cold_for

    def _rank(self, candidate: Candidate, is_preferred: bool, is_cold: bool) -> RankKey:
        lane, job_id = candidate.lane, candidate.job_id
        copies = 0
        if is_cold:
            copies = self._copies_of(self._context.outlook.models_of(lane.class_key))
        return rank_key(
            is_due=self._is_due(job_id),
            is_preferred=is_preferred,
            is_cold=is_cold,
            copies=copies,
            selectivity=self._context.fleet.selectivity(lane.class_key),
            virtual_time=self._turns[job_id].start if self._turns else 0.0,
            sequence=candidate.sequence,
        )

    def _preferred(self, lane: LaneKey) -> tuple[WorkerId, ...]:
        if self._context.rules.affinity_wait_s <= 0:
            return ()
        return self._context.fleet.classes[lane.class_key].preferences.workers

    def _way(self, candidate: Candidate, takers: tuple[int, ...]) -> _Lane:
        """Jobs of a lane share it."""
        lane = candidate.lane
        known = self._ways.get((lane, takers))
        if known is None:
            known = self._ways[lane, takers] = self._look(lane, takers)
        return known

    def _look(self, lane: LaneKey, takers: tuple[int, ...]) -> _Lane:
        context = self._context
        fleet, models = context.fleet, context.outlook.models_of(lane.class_key)
        preferred = self._preferred(lane)
        slots = [
            slot for number in takers for slot in self._seen.groups[number] if slot.worker_id in fleet.workers
        ]
        if models and not preferred:
            warm_slots = [slot for slot in slots if not missing(models, self._kind(slot).loaded)]
            if len(warm_slots) >= len(self._seen.jobs):
                # Whatever the other jobs take, one of these is left, so no load has to be considered.
                slots = warm_slots
        if not models and len(slots) == 1:
            # There is no choice, so nothing has to be compared.
            return _Lane((str(slots[0].poll_id),), (), slots[0].worker_id in preferred)
        keys: dict[str, SlotKey] = {}
        warm: set[str] = set()
        for slot in slots:
            poll_id, is_preferred = slot.poll_id, slot.worker_id in preferred
            offer = None
            if models:
                offer, _ = self._offered(lane, models, self._kind(slot))
                if offer.is_warm:
                    warm.add(poll_id)
                elif not is_preferred and self._leaves(slot, lane):
                    continue
            keys[poll_id] = self._slot_key(lane, slot, is_preferred, offer)
        order = tuple(sorted(keys, key=keys.__getitem__))
        is_preferred = bool(order) and bool(preferred) and not keys[order[0]][0]
        return _Lane(order, tuple(each for each in order if each in warm), is_preferred)

    def _slot_key(self, lane: LaneKey, slot: ParkedPoll, is_preferred: bool, offer: Offer | None) -> SlotKey:
        context = self._context
        cls, worker = context.fleet.classes[lane.class_key], context.fleet.workers[slot.worker_id]
        stats = context.known_workflow_stats(lane.workflow_hash)
        known = expected_s(stats, worker.capabilities.worker_class)
        busy = worker.slots - self._parked[worker.worker_id] if slot.load is None else slot.load
        preferences = cls.preferences
        return slot_key(
            is_preferred=is_preferred,
            is_cold=offer is not None and not offer.is_warm,
            cost=cost_step((known or 0.0) if offer is None else offer.cost_s),
            ran_it_last=worker.live.last_workflow == lane.workflow_hash,
            score=score(cls, worker, busy / max(1, worker.slots), context.rules.weights, known),
            wants_score=bool(preferences.quality or preferences.region or preferences.cost_tier),
        )

    def _one_copy_each(
        self,
        chosen: Mapping[str, JobId],
        cold_for: Mapping[JobId, tuple[_Key, frozenset[str]]],
        ranks: Mapping[JobId, RankKey],
    ) -> list[str]:
        """The slots to leave for the next look, because another job of the same backlog goes first: it changes what
        the models cost here."""
        taken: Counter[_Key] = Counter()
        most = max(1, self._slots // _COLD_SHARE)
        dropped = []
        for poll_id, job_id in sorted(chosen.items(), key=lambda each: ranks[each[1]]):
            if (found := cold_for.get(job_id)) is None:
                continue
            key, warm = found
            if poll_id in warm:
                taken[key] = most
            elif taken[key] >= most:
                dropped.append(poll_id)
            else:
                taken[key] += 1
        return dropped


def lane_lengths(candidates: Collection[Candidate]) -> dict[LaneKey, int]:
    """How many jobs wait in each lane."""
    seen = Counter(each.lane for each in candidates)
    lengths: dict[LaneKey, int] = dict(seen)
    for each in candidates:
        lengths[each.lane] = max(lengths[each.lane], each.waiting)
    return lengths


def _turns(seen: Mapping[JobId, Candidate], context: EngineContext) -> dict[JobId, TenantTurn]:
    """Empty where no tenant has a fair share, which is the usual case."""
    if not any(each.weight for each in seen.values()):
        return {}

    def seconds_of(candidate: Candidate) -> float:
        stats = context.known_workflow_stats(candidate.lane.workflow_hash)
        return charge_s(expected_s(stats, ""), context.rules)

    return tenant_turns(seen.values(), seconds_of)
