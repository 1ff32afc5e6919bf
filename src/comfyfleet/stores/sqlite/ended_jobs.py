"""Ended jobs, which only the file holds. A write loads one into memory until its commit."""

from __future__ import annotations

from heapq import merge
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.ids import JobId
from comfyfleet.stores.guards import last_to_go
from comfyfleet.stores.sqlite import codec
from comfyfleet.stores.sqlite.writer import Batch

if TYPE_CHECKING:
    from comfyfleet.stores.sqlite.store import SqliteStore


class EndedJobs:
    """Uses the store's private members."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    async def failed(self, limit: int, after: JobId | None) -> list[Dispatch]:
        await self._store._wait(None)
        return self._store._disk.failed(limit, after)

    async def unsettled(self, limit: int, after: JobId | None) -> list[Dispatch]:
        await self._store._wait(None)
        return self._store._disk.unsettled(limit, after)

    async def purge(self, phase: Phase, before: float, limit: int) -> int:
        store = self._store
        await store._wait(None)
        store._writer.check()
        settled_before = last_to_go(before, store._clock.now())
        # Two queues: young jobs in one must not delay the other.
        plain = takewhile(lambda row: row.ended_at < before, store._disk.ended(phase, limit, False))
        settled = takewhile(lambda row: row.ended_at < settled_before, store._disk.ended(phase, limit, True))
        # A job with a pending write may be retried.
        gone = [
            row for row in islice(merge(plain, settled), limit) if not store._writer.is_pending(row.job_id)
        ]
        if gone:
            batch = store._writer.batch()
            for row in gone:
                codec.purge(batch, row.job_id, row.sequence)
                store._state.by_phase[phase] -= 1
            codec.keep_place(batch, store._state.sequence)
            await store._writer.written(batch)
        return len(gone)

    def bring_back(self, job_id: JobId) -> None:
        store = self._store
        if job_id not in store._state.entries and not store._writer.is_pending(job_id):
            entry = store._disk.entry(job_id)
            if entry is not None:
                store._state.bring_back(entry)

    def let_go(self, job_id: JobId) -> None:
        store = self._store
        entry = store._state.entries.get(job_id)
        if entry is not None and entry.dispatch.phase.is_final and not store._writer.is_pending(job_id):
            store._state.let_go(entry)

    def restore(self, job_id: JobId) -> None:
        """Reloads a job from the file, open or ended."""
        queue = self._store._state
        if (entry := queue.entries.get(job_id)) is not None:
            queue.forget(entry)
        if (entry := self._store._disk.entry(job_id)) is not None:
            queue.take_in(entry)
            if entry.dispatch.phase.is_final:
                queue.let_go(entry)

    def committed(self, batch: Batch) -> None:
        for job_id in batch.ended():
            self.let_go(job_id)
