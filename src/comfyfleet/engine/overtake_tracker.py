"""Since when a waiting job has been passed by younger ones, for every job at once.

Where a profile has given a slot to a younger job, every older one of that priority it could have taken was passed. So
it is enough to keep, for each profile and priority, when the youngest so far was taken: a job was first overtaken at
the first note above its own place in line. Where tenants are charged, each tenant has its own notes: whose turn it is
between tenants is no matter of age.
"""

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
            # Profiles come and go; whoever was passed is passed again, and his wait begins anew.
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
        """Whether one of these profiles has passed the job over since the limit or longer."""
        for profile in profiles:
            known = self._notes.get((profile, priority, tenant))
            if known is None:
                continue
            sequences, times = known
            first = bisect_right(sequences, sequence)
            if first < len(sequences) and times[first] <= limit:
                return True
        return False
