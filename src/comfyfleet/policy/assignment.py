"""One matching pass: it assigns the idle slots of a process to waiting jobs, and scores the pairs.

The result is a maximum matching that never trades a higher priority for a lower one. Feasibility, blocks and caps are
decided before, and `scheduling.py` decides what is due and what is left to others. A score only orders the slots of a
job. Live values count only here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import msgspec

from comfyfleet.model.ids import JobId
from comfyfleet.model.requirement import COST_TIERS, Preferences, RequirementClass
from comfyfleet.model.worker import Capabilities, WorkerRecord
from comfyfleet.policy.feasibility import collect_aliases, has_model, normal_model
from comfyfleet.policy.rules import Weights

RankKey = tuple[bool, bool, bool, int, int, float, int]
SlotKey = tuple[float, ...]


def rank_key(
    *,
    is_due: bool,
    is_preferred: bool = False,
    is_cold: bool = False,
    copies: int = 0,
    selectivity: int = 0,
    virtual_time: float = 0.0,
    sequence: int,
) -> RankKey:
    """The order of jobs of equal priority; smaller is earlier.

    Jobs that are due come first, the oldest of the least served tenant before the others. Then come jobs for a worker
    that they prefer, jobs for a worker that has their models loaded, those whose models the fewest workers have loaded,
    those of the class with the fewest compatible workers, the least served tenant, and the place in the queue.
    """
    if is_due:
        return (False, False, False, 0, 0, virtual_time, sequence)
    return (True, not is_preferred, is_cold, copies if is_cold else 0, selectivity, virtual_time, sequence)


class WaitingJob(msgspec.Struct, frozen=True):
    """A job as a matching pass sees it."""

    job_id: JobId
    priority: int
    rank: RankKey
    """Its order among jobs of equal priority."""
    slots: tuple[str, ...]
    """The idle slots it may take, best first. Jobs of one lane should share the tuple, which makes a pass cheap."""

    @property
    def order(self) -> tuple[int, RankKey]:
        return (-self.priority, self.rank)


def slot_key(
    *, is_preferred: bool, is_cold: bool, cost: int, ran_it_last: bool, score: float, wants_score: bool
) -> SlotKey:
    """The order of the slots that a job may take; smaller is better.

    Preferred workers come first. Then what the job costs there in time, then a worker that ran the same workflow last,
    then the score. `wants_score`: the job itself prefers a quality, a region or a cost tier, which counts more than
    time, unless models have to be loaded for it.
    """
    if wants_score:
        return (not is_preferred, is_cold, -score, cost, not ran_it_last)
    return (not is_preferred, cost, not ran_it_last, -score)


def assign(jobs: Sequence[WaitingJob]) -> dict[str, JobId]:
    """Slot → job: a maximum matching, and the best set of jobs by priority, then rank.

    Jobs are placed in their order. Each takes its best free slot. If none is free, the shortest chain of moves of
    earlier jobs frees one. A placed job may move but always keeps a slot.
    """
    slots = {slot for choices in _distinct(jobs) for slot in choices}
    if len(slots) == 1:
        return {slots.pop(): min((job for job in jobs if job.slots), key=attrgetter("order")).job_id}
    matching = _Matching()
    for job in sorted(jobs, key=attrgetter("order")):
        if len(matching.holders) == len(slots):
            break
        matching.place(job)
    return {slot: job.job_id for slot, job in matching.holders.items()}


def _distinct(jobs: Iterable[WaitingJob]) -> Iterable[tuple[str, ...]]:
    return {id(job.slots): job.slots for job in jobs}.values()


class _Matching:
    """The growing matching.

    Three facts keep it fast. A held slot stays held. Jobs with the same choices reach the same slots, so a search
    visits each tuple once. And slots from which no free slot is reachable stay so, because later chains cannot pass
    through them.
    """

    def __init__(self) -> None:
        self.holders: dict[str, WaitingJob] = {}
        self._held_prefix: dict[int, int] = {}
        self._dead_ends: set[int] = set()

    def place(self, job: WaitingJob) -> None:
        if id(job.slots) in self._dead_ends:
            return
        free = self._first_free(job.slots)
        if free is not None:
            self.holders[free] = job
            return
        visited = {id(job.slots)}
        came_from: dict[str, str | None] = {}
        # Breadth first, so that the fewest jobs move.
        searches: deque[tuple[tuple[str, ...], str | None]] = deque([(job.slots, None)])
        while searches:
            choices, left = searches.popleft()
            for slot in choices:
                others = self.holders[slot].slots
                if id(others) in visited or id(others) in self._dead_ends:
                    continue
                visited.add(id(others))
                came_from[slot] = left
                free = self._first_free(others)
                if free is not None:
                    self._shift(job, free, slot, came_from)
                    return
                searches.append((others, slot))
        self._dead_ends |= visited

    def _first_free(self, slots: tuple[str, ...]) -> str | None:
        """The best free slot. Slots before it stay held and are not checked again."""
        start = self._held_prefix.get(id(slots), 0)
        for index in range(start, len(slots)):
            if slots[index] not in self.holders:
                self._held_prefix[id(slots)] = index
                return slots[index]
        self._held_prefix[id(slots)] = len(slots)
        return None

    def _shift(
        self, job: WaitingJob, free: str, left: str | None, came_from: Mapping[str, str | None]
    ) -> None:
        """Move each job of the chain to the next slot, from the far end. The new job takes the freed slot."""
        while left is not None:
            self.holders[free] = self.holders[left]
            free, left = left, came_from[left]
        self.holders[free] = job


# Each is the amount that scores one half.
HALF_SPARE_MEMORY_GB = 16.0
HALF_EXPECTED_S = 60.0
HALF_RATE_PER_HOUR = 1.0

INDIFFERENT = 0.5
"""The value is unknown, or there is no preference."""


def score(
    cls: RequirementClass, worker: WorkerRecord, load: float, weights: Weights, expected_s: float | None
) -> float:
    """The weighted sum of values from 0 to 1; higher is better.

    `load` is the share of the worker's slots in use, `expected_s` the mean duration of this workflow on its worker
    class. The service dimension only filters.
    """
    capabilities, preferences = worker.capabilities, cls.preferences
    return (
        weights.hardware * _spare_memory(cls, worker)
        + weights.models * _available_models(cls, worker)
        + weights.tenant * _closeness(cls, capabilities)
        + weights.performance * (_quality(preferences, capabilities) + _speed(capabilities, expected_s)) / 2
        + weights.location * _region(preferences, capabilities)
        + weights.cost * _cheapness(preferences, capabilities)
        + weights.load * (1.0 - min(1.0, max(0.0, load)))
    )


def _spare_memory(cls: RequirementClass, worker: WorkerRecord) -> float:
    """GPU memory beyond the need, from the free memory if known, else from the total."""
    need = cls.requirements.hardware
    free = worker.live.free_vram_gb
    memory_gb = worker.capabilities.hardware.gpu.memory_gb if free is None else free
    spare = max(0.0, memory_gb - max(need.gpu_memory_gb, need.gpu_memory_above_gb))
    return spare / (spare + HALF_SPARE_MEMORY_GB)


def _available_models(cls: RequirementClass, worker: WorkerRecord) -> float:
    """The mean over required and preferred models: loaded counts 1, installed one half. Without models it is 1."""
    names = {normal_model(name) for name in (*cls.requirements.models, *cls.preferences.models)}
    if not names:
        return 1.0
    loaded = worker.live.loaded_models
    known = loaded | collect_aliases(loaded) if loaded else loaded
    inventories = [
        service.models for service in worker.capabilities.services if service.name == cls.requirements.service
    ]
    total = 0.0
    for name in names:
        if name in known:
            total += 1.0
        elif any(models is None or has_model(models, name) for models in inventories):
            total += 0.5
    return total / len(names)


def _closeness(cls: RequirementClass, capabilities: Capabilities) -> float:
    """A worker with an allow list prefers the tenants on it."""
    access = capabilities.tenant_access
    if access.isolation == "none" or not access.allowed:
        return INDIFFERENT
    return 1.0 if cls.tenant in access.allowed else 0.0


def _quality(preferences: Preferences, capabilities: Capabilities) -> float:
    if preferences.quality is None:
        return 1.0
    return 1.0 if preferences.quality in capabilities.performance.quality_levels else 0.0


def _speed(capabilities: Capabilities, expected_s: float | None) -> float:
    """From the mean duration, else from the worker's declared speed. The usual speed is 1 and scores one half."""
    if expected_s is not None:
        return HALF_EXPECTED_S / (HALF_EXPECTED_S + max(0.0, expected_s))
    speed = max(0.0, capabilities.performance.speed)
    return speed / (speed + 1.0)


def _region(preferences: Preferences, capabilities: Capabilities) -> float:
    if preferences.region is None:
        return 1.0
    region = capabilities.location.region
    return 1.0 if region is not None and region.casefold() == preferences.region.casefold() else 0.0


def _cheapness(preferences: Preferences, capabilities: Capabilities) -> float:
    """A lower hourly rate is better. The distance to a preferred tier counts as much."""
    cost = capabilities.cost
    cheap = (
        INDIFFERENT
        if cost.rate_per_hour is None
        else HALF_RATE_PER_HOUR / (HALF_RATE_PER_HOUR + max(0.0, cost.rate_per_hour))
    )
    if preferences.cost_tier is None:
        return cheap
    distance = abs(COST_TIERS.index(cost.tier) - COST_TIERS.index(preferences.cost_tier))
    return (cheap + 1.0 - distance / (len(COST_TIERS) - 1)) / 2
