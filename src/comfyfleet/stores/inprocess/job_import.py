"""Imports jobs from another store into the memory store, with the part that all in-process stores share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.ids import JobId
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.stores.inprocess.memory_records import MemoryEntry
from comfyfleet.stores.inprocess.queue_state import EndedLease, QueueEntry, QueueState

E = TypeVar("E", bound=QueueEntry)


def place(queue: QueueState[E], entry: E, snapshot: JobSnapshot, now: float) -> E:
    """Puts an imported job behind all jobs that are here."""
    assert snapshot.dispatch.lease is None, "a leased job does not move"
    queue.sequence += 1
    entry.dispatch = msgspec.structs.replace(snapshot.dispatch, sequence=queue.sequence)
    entry.attempts, entry.fact_count = snapshot.attempts, len(snapshot.facts)
    if entry.dispatch.phase.is_final:
        queue.endings += 1
        entry.ending = EndedLease(queue.endings, now)
    queue.take_in(entry)
    return entry


def is_as_read(found: Dispatch | None, read: Dispatch) -> bool:
    return found is not None and found.lease is None and found.revision == read.revision


class MemoryJobTransfer:
    def __init__(
        self,
        queue: QueueState[MemoryEntry],
        now: Callable[[], float],
        note_end: Callable[[MemoryEntry], None],
        forget: Callable[[MemoryEntry], None],
    ) -> None:
        self._state = queue
        self._now = now
        self._note_end = note_end
        self._forget = forget

    async def import_jobs(self, jobs: Sequence[JobSnapshot]) -> list[Dispatch] | None:
        queue = self._state
        if not all(queue.has_classes(each.dispatch) for each in jobs):
            return None
        return [self._import_jobs(each).dispatch for each in jobs]

    def _import_jobs(self, snapshot: JobSnapshot) -> MemoryEntry:
        job = snapshot.job
        known: JobId | None = job.job_id
        if job.job_id not in self._state.entries and job.reference is not None:
            known = self._state.references.get((job.tenant, job.reference))
        if known is not None and (found := self._state.entries.get(known)) is not None:
            return found
        entry = place(self._state, MemoryEntry(dispatch=snapshot.dispatch, job=job), snapshot, self._now())
        entry.facts = snapshot.facts
        self._note_end(entry)
        return entry

    async def discard(self, jobs: Sequence[Dispatch]) -> list[bool]:
        answers = []
        for read in jobs:
            entry = self._state.entries.get(read.job_id)
            answers.append(is_as_read(None if entry is None else entry.dispatch, read))
            if entry is not None and answers[-1]:
                self._forget(entry)
        return answers

    async def workflow_stats(self) -> list[WorkflowStats]:
        return self._state.workflow_stats.listing()
