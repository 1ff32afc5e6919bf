"""When each open job of an in-process store falls due.

A heap of hints: a job that moves leaves its old hint behind, and one that moves later needs no new hint. The
callback `due_at` has the true time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from comfyfleet.model.ids import JobId

_WRONG_HINTS = 1_000
"""The heap is rebuilt after this many wrong hints."""


class DueTimes:
    def __init__(self, due_at: Callable[[JobId], float | None]) -> None:
        self._due_at = due_at
        self._hints: list[tuple[float, JobId]] = []
        self._wrong = 0

    def add(self, job_id: JobId, at: float) -> None:
        heappush(self._hints, (at, job_id))

    def next(self) -> float | None:
        hints = self._hints
        while hints:
            at, job_id = hints[0]
            true_at = self._due_at(job_id)
            if true_at == at:
                return at
            heappop(hints)
            if true_at is not None and true_at > at:
                heappush(hints, (true_at, job_id))
        return None

    def until(self, now: float, last: tuple[float, str]) -> Iterator[JobId]:
        """Jobs due by `now`, ordered by time and id, after `last`. They stay due."""
        if self._wrong > _WRONG_HINTS:
            self._rebuild()
        hints = self._hints
        # Walks the heap in order without changing it. A corrected hint has the index -1.
        ahead = [(hints[0], 0)] if hints else []
        while ahead and ahead[0][0][0] <= now:
            (at, job_id), place = heappop(ahead)
            for below in (2 * place + 1, 2 * place + 2) if place >= 0 else ():
                if below < len(hints):
                    heappush(ahead, (hints[below], below))
            true_at = self._due_at(job_id)
            if true_at == at:
                if (at, job_id) > last:
                    last = (at, job_id)
                    yield job_id
                continue
            self._wrong += 1
            if true_at is not None and true_at > at:
                heappush(ahead, ((true_at, job_id), -1))

    def _rebuild(self) -> None:
        known = {job_id: self._due_at(job_id) for _, job_id in self._hints}
        self._hints = sorted((at, job_id) for job_id, at in known.items() if at is not None)
        self._wrong = 0
