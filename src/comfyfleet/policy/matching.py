"""One round: the idle slots of a process are given to waiting jobs all at once.

The result is a maximum matching that never trades a higher priority for a lower one. Who may run what is decided before
(`feasibility.py`, blocks, caps); how good a pair is comes in as the order of a job's slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from comfyfleet.model.ids import JobId

RankKey = tuple[bool, bool, int, int, float, float, int]


def rank_key(
    *,
    is_overdue: bool,
    is_preferred: bool,
    warmth: int,
    selectivity: int,
    score: float,
    virtual_time: float = 0.0,
    sequence: int,
) -> RankKey:
    """The order of pairs of equal priority; smaller is earlier.

    A job that was overtaken for too long comes first, so that nothing below can starve it. Then soft preference, a
    warm worker, the class with the fewest live compatible workers, the score, and last the store's own order: the
    tenant that was served least, then the place in line.
    """
    return (not is_overdue, not is_preferred, -warmth, selectivity, -score, virtual_time, sequence)


class WaitingJob(msgspec.Struct, frozen=True):
    """A job as a round sees it."""

    job_id: JobId
    priority: int
    rank: RankKey
    """Its place among jobs of equal priority: the best rank it has with any slot."""
    slots: tuple[str, ...]
    """The idle slots it may take, best first. Jobs of one lane should share the tuple: a round is then as cheap as
    its lanes are few."""

    @classmethod
    def ranked(cls, job_id: JobId, priority: int, ranks: Mapping[str, RankKey]) -> WaitingJob:
        """From the rank of each pair. Of equally good slots the one named first is taken first."""
        slots = tuple(sorted(ranks, key=ranks.__getitem__))
        assert slots, "a job that may take no idle slot has no part in a round"
        return cls(job_id, priority, ranks[slots[0]], slots)

    @property
    def order(self) -> tuple[int, RankKey]:
        return (-self.priority, self.rank)


def assign(jobs: Sequence[WaitingJob]) -> dict[str, JobId]:
    """Slot → job. As many slots get work as can; and by priority, then rank, no set of jobs would be better.

    Jobs come in their order. Each takes the best slot that is free; when none is, jobs placed before it are moved along
    the shortest chain that frees one. A job once placed is moved at most, never put out, so those before it lose
    nothing but a preference.
    """
    slots = {slot for choices in _distinct(jobs) for slot in choices}
    if len(slots) == 1:
        return {slots.pop(): min((job for job in jobs if job.slots), key=_order).job_id}
    round_ = _Round()
    for job in sorted(jobs, key=_order):
        if len(round_.holders) == len(slots):
            break
        round_.place(job)
    return {slot: job.job_id for slot, job in round_.holders.items()}


def _order(job: WaitingJob) -> tuple[int, RankKey]:
    return job.order


def _distinct(jobs: Iterable[WaitingJob]) -> Iterable[tuple[str, ...]]:
    return {id(job.slots): job.slots for job in jobs}.values()


class _Round:
    """The matching while it grows.

    Three facts keep it fast. A slot that is held stays held. Jobs with the same choices reach the same slots, so a
    search visits each tuple once. And slots from which a search found no way to a free one never get a way: later
    chains cannot pass through them, hence cannot change them.
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
        # Breadth first, so that the fewest jobs are moved; each looks at its better slots first.
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
        """The best slot nobody holds. Those before it are held for good and not looked at again."""
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
        """From the far end of the chain each job moves one slot on; the new job takes the slot that leaves."""
        while left is not None:
            self.holders[free] = self.holders[left]
            free, left = left, came_from[left]
        self.holders[free] = job
