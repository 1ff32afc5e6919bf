"""Tracks since when younger jobs have overtaken a waiting job, for all jobs at once.

When a profile gives a slot to a job, it passes every older job of that priority that it could take. So one
list per profile and priority suffices: a job was first overtaken at the first note above its own sequence
number. With fair shares each tenant has its own list, because age does not order jobs of different
tenants."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from comfyfleet.model.ids import ProfileKey, TenantId

_MAX_NOTES = 4096
_MAX_LISTS = 4096


class OvertakeTracker:
    def __init__(self) -> None:
        self._notes: dict[tuple[ProfileKey, int, TenantId | None], tuple[list[int], list[float]]] = {}

    def note(
        self, profile: ProfileKey, priority: int, tenant: TenantId | None, sequence: int, now: float
    ) -> None:
        if len(self._notes) > _MAX_LISTS:
            # Profiles come and go. After a reset, waits count anew.
            self._notes.clear()
        sequences, times = self._notes.setdefault((profile, priority, tenant), ([], []))
        if sequences and sequence <= sequences[-1]:
            return
        sequences.append(sequence)
        times.append(now)
        if len(sequences) > _MAX_NOTES:
            del sequences[: _MAX_NOTES // 2], times[: _MAX_NOTES // 2]

    def is_overdue(
        self,
        profiles: Iterable[ProfileKey],
        priority: int,
        tenant: TenantId | None,
        sequence: int,
        limit: float,
    ) -> bool:
        """Whether one of these profiles passed the job at or before the limit."""
        for profile in profiles:
            known = self._notes.get((profile, priority, tenant))
            if known is None:
                continue
            sequences, times = known
            first = bisect_right(sequences, sequence)
            if first < len(sequences) and times[first] <= limit:
                return True
        return False
