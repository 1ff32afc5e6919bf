"""Keeps the latest progress of each running job in memory, for new watchers."""

from __future__ import annotations

from typing import TypeVar

from comfyfleet.model.fact import Event, Fact, FactKind, ProgressEvent, ProgressKind
from comfyfleet.model.ids import JobId
from comfyfleet.ports import Bus

_MAX_JOBS = 20_000
_STARTS_ANEW = frozenset(
    {
        FactKind.QUEUED,
        FactKind.LEASED,
        FactKind.RETRYING,
        FactKind.RELEASED,
        FactKind.PAUSED,
        FactKind.COMPLETED,
        FactKind.FAILED,
        FactKind.CANCELLED,
    }
)


K = TypeVar("K")
V = TypeVar("V")


def put_newest(entries: dict[K, V], key: K, value: V, limit: int) -> None:
    """Puts the entry last, and drops the first one beyond the limit."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > limit:
        del entries[next(iter(entries))]


class LatestProgress:
    def __init__(self, bus: Bus) -> None:
        self._known: dict[JobId, ProgressEvent] = {}
        bus.listen(self._hear)

    def of(self, job_id: JobId) -> ProgressEvent | None:
        return self._known.get(job_id)

    def _hear(self, event: Event) -> None:
        if isinstance(event, ProgressEvent):
            if event.kind is ProgressKind.PROGRESS:
                put_newest(self._known, event.job_id, event, _MAX_JOBS)
        elif isinstance(event, Fact) and event.kind in _STARTS_ANEW:
            self._known.pop(event.job_id, None)
