"""When waiting jobs are expected to start: plays the policy forward on the slots and lanes of one moment. Pure.

The play starts a bounded number of jobs and then goes on at the pace that it reached. It knows of each lane only the
oldest and the newest job and how many wait, so the jobs between count as evenly spread. It expects no further jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import floor, inf
from typing import NamedTuple

from comfyfleet.model.ids import TenantId, WorkerId, WorkflowHash
from comfyfleet.policy.demand import ModelSet
from comfyfleet.policy.scheduling import EPSILON_S, Estimates, displaced, missing, reload_chance

MAX_STARTS = 512
"""The play starts at most so many jobs."""
MAX_LANES = 64
"""The play has the first so many lanes; the jobs of others are reckoned from the pace."""
MAX_LOOKS = 4 * MAX_STARTS
"""A slot that leaves everything to others looks again, and all looks together are bounded."""


class Place(NamedTuple):
    """Where a job stands in the queue."""

    sequence: float
    fifo_start: float
    """When first come, first served would start it (`scheduling.fifo_starts`)."""


class LaneAhead(NamedTuple):
    """Waiting jobs that differ only by age."""

    priority: int
    tenant: TenantId
    models: ModelSet
    workflow_hash: WorkflowHash
    waiting: int
    oldest: Place
    newest: Place
    selectivity: int = 0
    """How many workers may take its jobs."""
    slowest_load_s: float = 0.0

    def index_of(self, sequence: float) -> float:
        """How many of its jobs are before this one, as far as the two ends tell. Behind the newest: all of them."""
        if sequence > self.newest.sequence:
            return float(self.waiting)
        return self.waiting - 1 if self.waiting < 2 else (self.waiting - 1) * self._share_of(sequence)

    def fifo_start(self, index: int) -> float:
        if self.waiting < 2:
            return self.oldest.fifo_start
        share = index / (self.waiting - 1)
        return self.oldest.fifo_start + share * (self.newest.fifo_start - self.oldest.fifo_start)

    def sequence(self, index: float) -> float:
        if self.waiting < 2:
            return self.oldest.sequence
        step = (self.newest.sequence - self.oldest.sequence) / (self.waiting - 1)
        return self.oldest.sequence + index * step

    def _share_of(self, sequence: float) -> float:
        width = self.newest.sequence - self.oldest.sequence
        return min(1.0, max(0.0, (sequence - self.oldest.sequence) / width)) if width > 0 else 1.0


class SlotAhead(NamedTuple):
    worker_id: WorkerId
    worker_class: str
    loaded: ModelSet
    takes: frozenset[int]
    """The lanes whose jobs it may take, by their number in the sequence. Equal slots should share the set."""
    free_at: float
    """When it is expected to be free. Now or before: it is idle."""


class Situation(NamedTuple):
    """What is known at one moment."""

    now: float
    lanes: Sequence[LaneAhead]
    """In the order of their first jobs, by priority and age."""
    slots: Sequence[SlotAhead]
    patience: float
    quantum_s: float = inf
    virtual_times: Mapping[TenantId, tuple[float, float]] = {}
    """Virtual time and weight of each tenant that has a fair share. Empty: age alone decides."""
    round_s: float = 1.0


class ExpectedRun(NamedTuple):
    starts_at: float
    load_s: float
    run_s: float
    worker_id: WorkerId
    worker_class: str
    is_extrapolated: bool = False

    @property
    def ends_at(self) -> float:
        return self.starts_at + self.load_s + self.run_s


class QueueForecast:
    """The expected starts, by lane and index in the lane."""

    def __init__(
        self,
        situation: Situation,
        estimates: Estimates,
        runs: Sequence[Sequence[ExpectedRun]],
        played_until: float,
        pace_s: float,
    ) -> None:
        self._situation = situation
        self._estimates = estimates
        self._lanes = situation.lanes
        self._runs = runs
        self._played_until = played_until
        self._pace_s = pace_s

    def run_at(self, lane: int, index: float) -> ExpectedRun | None:
        """The run of the job before which so many jobs of its lane wait. None: no slot takes jobs of the lane."""
        played = self._runs[lane]
        if index < len(played):
            return played[floor(index + EPSILON_S)]
        slot = next((slot for slot in self._situation.slots if lane in slot.takes), None)
        if slot is None or self._pace_s == inf:
            return None
        starts_at = self._played_until + (self._ahead(lane, index) + 1) * self._pace_s
        if played:
            last = played[-1]
            return last._replace(starts_at=max(starts_at, last.starts_at), is_extrapolated=True)
        workflow_hash = self._lanes[lane].workflow_hash
        run_s = self._estimates.run_s(workflow_hash, slot.worker_class)
        return ExpectedRun(starts_at, 0.0, run_s, slot.worker_id, slot.worker_class, True)

    def _ahead(self, number: int, index: float) -> float:
        """How many of the jobs that were not played go before it, by priority and age."""
        lane = self._lanes[number]
        sequence, ahead = lane.sequence(index), max(0.0, index - len(self._runs[number]))
        for other_number, other in enumerate(self._lanes):
            if other_number == number or other.priority < lane.priority:
                continue
            begun = len(self._runs[other_number])
            if other.priority > lane.priority:
                ahead += other.waiting - begun
            elif other.oldest.sequence < sequence:
                ahead += max(0.0, min(other.waiting, other.index_of(sequence)) - begun)
        return ahead


class _Offer(NamedTuple):
    """The times of a lane on one kind of slot."""

    load_s: float
    run_s: float
    reload_s: float
    """The load of what it displaces, as far as that is likely to be needed again."""
    displaces: bool


class _Slot:
    __slots__ = ("loaded", "number", "takes", "worker_class", "worker_id")

    def __init__(self, number: int, slot: SlotAhead, loaded: int, takes: _Takes) -> None:
        self.number, self.loaded, self.takes = number, loaded, takes
        self.worker_id, self.worker_class = slot.worker_id, slot.worker_class


class _Takes:
    """The lanes that equal slots may take, and of each priority those that still have jobs."""

    __slots__ = ("_emptied", "_levels", "_warm")

    def __init__(self, lanes: Sequence[LaneAhead], takes: frozenset[int]) -> None:
        levels: dict[int, list[int]] = {}
        for number in sorted(each for each in takes if each < MAX_LANES):
            levels.setdefault(lanes[number].priority, []).append(number)
        self._levels = [levels[each] for each in sorted(levels, reverse=True)]
        self._warm: dict[tuple[int, int], list[int]] = {}
        self._emptied = -1

    def levels(self, left: Sequence[int], emptied: int) -> list[list[int]]:
        """`emptied`: how many lanes have become empty."""
        if emptied != self._emptied:
            self._emptied = emptied
            found = ([each for each in level if left[each]] for level in self._levels)
            self._levels = [level for level in found if level]
            self._warm.clear()
        return self._levels

    def warm(self, number: int, level: list[int], loaded: int, is_warm: Sequence[bool]) -> list[int]:
        """The lanes of a level whose models are loaded."""
        known = self._warm.get((number, loaded))
        if known is None:
            known = self._warm[number, loaded] = [each for each in level if is_warm[each]]
        return known


def forecast(situation: Situation, estimates: Estimates) -> QueueForecast:
    return _Play(situation, estimates).played(MAX_STARTS)


class _Play:
    def __init__(self, situation: Situation, estimates: Estimates) -> None:
        self._situation = situation
        self._estimates = estimates
        self._lanes = lanes = situation.lanes[:MAX_LANES]
        self._left = [lane.waiting for lane in lanes]
        self._emptied = 0
        self._ranks = [(lane.selectivity, lane.oldest.sequence) for lane in lanes]
        """The order of the lanes by their first jobs, where no tenant has a fair share."""
        self._due = [self._due_at(lane, 0) for lane in lanes]
        self._next_due = min(self._due, default=inf)
        self._runs: list[list[ExpectedRun]] = [[] for _ in situation.lanes]
        self._times = {tenant: time for tenant, (time, _) in situation.virtual_times.items()}
        self._sets: list[ModelSet] = []
        numbers: dict[ModelSet, int] = {}
        for models in (*(slot.loaded for slot in situation.slots), *(lane.models for lane in lanes)):
            if models not in numbers:
                numbers[models] = len(self._sets)
                self._sets.append(models)
        self._set_numbers = numbers
        self._lane_sets = [numbers[lane.models] for lane in lanes]
        self._warm = [[not missing(lane.models, loaded) for lane in lanes] for loaded in self._sets]
        """By set of loaded models: which lanes have their models in it."""
        self._warm_sets = [
            [number for number, warm in enumerate(self._warm) if warm[lane]] for lane in range(len(lanes))
        ]
        self._slots_with = [0] * len(self._sets)
        self._copies = [0] * len(lanes)
        """By lane: how many slots have its models loaded."""
        self._busy: list[dict[int, float]] = [{} for _ in self._sets]
        """By set of loaded models: the slots that run something, and until when."""
        groups: dict[tuple[int, ModelSet], int] = {}
        self._group_of = [groups.setdefault((lane.priority, lane.models), len(groups)) for lane in lanes]
        self._group_left = [0] * len(groups)
        """Lanes that need the same models count as one."""
        for group, lane in zip(self._group_of, lanes, strict=True):
            self._group_left[group] += lane.waiting
        self._offers: dict[tuple[int, int, str], _Offer] = {}

    def _due_at(self, lane: LaneAhead, index: int) -> float:
        return lane.fifo_start(index) + self._situation.patience * lane.slowest_load_s

    def played(self, most: int) -> QueueForecast:
        now, begun = self._situation.now, list[float]()
        heap = self._slots()
        parked: dict[tuple[str, int, _Takes], list[_Slot]] = {}
        left, looks = min(most, sum(self._left)), MAX_LOOKS
        while heap and left and looks:
            at, phase, number, slot = heappop(heap)
            looks -= 1
            kind = (slot.worker_class, slot.loaded, slot.takes)
            self._busy[slot.loaded].pop(number, None)
            if phase < 2 and (alike := parked.get(kind)) is not None:
                # One of a kind looks for all of them.
                alike.append(slot)
                continue
            found, again_at = self._choose(at, slot, is_cold=bool(phase))
            if found is not None:
                for other in parked.pop(kind, ()):
                    heappush(heap, (at, 0, other.number, other))
                heappush(heap, (self._start(found, at, slot), 0, number, slot))
                begun.append(at)
                left -= 1
            elif not phase and again_at < inf:
                # Slots that have the models go first.
                heappush(heap, (at, 1, number, slot))
            elif again_at < inf:
                parked.setdefault(kind, [])
                heappush(heap, (again_at, 2, number, slot))
        until, pace_s = max(begun, default=now), self._pace(begun)
        return QueueForecast(self._situation, self._estimates, self._runs, until, pace_s)

    def _slots(self) -> list[tuple[float, int, int, _Slot]]:
        now, heap, alike = self._situation.now, [], dict[frozenset[int], _Takes]()
        for number, each in enumerate(self._situation.slots):
            if (takes := alike.get(each.takes)) is None:
                takes = alike[each.takes] = _Takes(self._lanes, each.takes)
            slot = _Slot(number, each, self._set_numbers[each.loaded], takes)
            self._slots_with[slot.loaded] += 1
            if each.free_at > now:
                self._busy[slot.loaded][number] = each.free_at
            heap.append((max(now, each.free_at), 0, number, slot))
        for lane, sets in enumerate(self._warm_sets):
            self._copies[lane] = sum(self._slots_with[each] for each in sets)
        heapify(heap)
        return heap

    def _pace(self, begun: list[float]) -> float:
        """The seconds from one start to the next in the later half of the play."""
        if not begun:
            return inf
        half = len(begun) // 2
        count = len(begun) - half - 1
        if count > 0 and begun[-1] > begun[half]:
            return (begun[-1] - begun[half]) / count
        # All of them start at once, so the others follow when these end.
        runs = [run for lane in self._runs for run in lane]
        return sum(run.load_s + run.run_s for run in runs) / len(runs) / len(runs)

    # one slot

    def _choose(self, at: float, slot: _Slot, is_cold: bool) -> tuple[int | None, float]:
        """The lane whose first job the slot takes; or when to look again. Infinite: there is nothing for it."""
        takes, again_at = slot.takes, inf
        for number, level in enumerate(takes.levels(self._left, self._emptied)):
            warm = takes.warm(number, level, slot.loaded, self._warm[slot.loaded])
            if self._times:
                level = self._least_served(level)
                warm = [each for each in warm if each in level]
            if self._next_due <= at and (due := [each for each in level if self._due[each] <= at]):
                return min(due, key=self._by_age), at
            if warm:
                return min(warm, key=self._by_rank if self._times else self._ranks.__getitem__), at
            if not is_cold:
                # A lower priority has to wait until the slots have looked at this one's cold lanes.
                return None, at
            found, found_again_at = self._best_cold(level, at, slot)
            if found is not None:
                return found, at
            again_at = min(again_at, found_again_at)
        return None, again_at

    def _least_served(self, level: Sequence[int]) -> list[int]:
        """The lanes of tenants within a quantum of the least served one."""
        latest = min(map(self._time_of, level)) + self._situation.quantum_s
        return [each for each in level if self._time_of(each) <= latest]

    def _time_of(self, number: int) -> float:
        return self._times.get(self._lanes[number].tenant, 0.0)

    def _by_age(self, number: int) -> tuple[float, float]:
        return self._time_of(number), self._ranks[number][1]

    def _by_rank(self, number: int) -> tuple[int, float, float]:
        selectivity, sequence = self._ranks[number]
        return selectivity, self._time_of(number), sequence

    def _best_cold(self, level: list[int], at: float, slot: _Slot) -> tuple[int | None, float]:
        again_at = at + self._situation.round_s
        # The fewest copies first, so that most lanes need no look at others.
        for number in sorted(level, key=lambda each: (self._copies[each], *self._by_rank(each))):
            offer = self._offer(number, slot)
            if not offer.displaces or not self._is_left(number, at, slot, offer):
                return number, at
            again_at = min(again_at, self._due[number])
        return None, again_at

    def _offer(self, number: int, slot: _Slot) -> _Offer:
        key = (number, slot.loaded, slot.worker_class)
        known = self._offers.get(key)
        if known is None:
            lane, loaded, estimates = self._lanes[number], self._sets[slot.loaded], self._estimates
            run_s = estimates.run_s(lane.workflow_hash, slot.worker_class)
            load_s = reload_s = 0.0
            gone: ModelSet = frozenset()
            if lacking := missing(lane.models, loaded):
                load_s = estimates.load_s(lacking, slot.worker_class)
                if gone := displaced(lane.models, loaded):
                    chance = reload_chance(estimates.gap_s(lane.models), estimates.gap_s(loaded))
                    reload_s = estimates.load_s(gone, slot.worker_class) * chance
            known = self._offers[key] = _Offer(load_s, run_s, reload_s, bool(gone))
        return known

    def _is_left(self, number: int, at: float, slot: _Slot, offer: _Offer) -> bool:
        """As `scheduling.is_left_to_others`, without the better cards that have to load as well."""
        waiting = self._group_left[self._group_of[number]]
        price_s = offer.load_s + offer.reload_s / max(1, self._slots_with[slot.loaded])
        limit = at + price_s + offer.run_s
        run_s, count = max(offer.run_s, EPSILON_S), 0
        for loaded in self._warm_sets[number]:
            for free_at in self._busy[loaded].values():
                if free_at < limit:
                    count += floor((limit - free_at) / run_s + EPSILON_S)
                    if count >= waiting:
                        return True
        return False

    def _start(self, number: int, at: float, slot: _Slot) -> float:
        """Starts the lane's first job and returns when it ends."""
        lane, offer, runs = self._lanes[number], self._offer(number, slot), self._runs[number]
        run = ExpectedRun(at, offer.load_s, offer.run_s, slot.worker_id, slot.worker_class)
        runs.append(run)
        was_due = self._due[number]
        if len(runs) < lane.waiting:
            self._ranks[number] = (lane.selectivity, lane.sequence(len(runs)))
            self._due[number] = self._due_at(lane, len(runs))
        else:
            self._emptied += 1
            self._due[number] = inf
        self._left[number] -= 1
        self._group_left[self._group_of[number]] -= 1
        if was_due <= self._next_due:
            self._next_due = min(self._due)
        if lane.models and self._lane_sets[number] != slot.loaded:
            self._count(slot.loaded, -1)
            slot.loaded = self._lane_sets[number]
            self._count(slot.loaded, 1)
        ends_at = run.ends_at
        self._busy[slot.loaded][slot.number] = ends_at
        if self._times:
            time, weight = self._situation.virtual_times.get(lane.tenant, (0.0, 1.0))
            spent = self._times.get(lane.tenant, time)
            self._times[lane.tenant] = spent + (offer.load_s + offer.run_s) / max(weight, EPSILON_S)
        return ends_at

    def _count(self, loaded: int, by: int) -> None:
        self._slots_with[loaded] += by
        for lane, is_warm in enumerate(self._warm[loaded]):
            if is_warm:
                self._copies[lane] += by
