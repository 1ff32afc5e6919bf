"""What the memory and the SQLite store do alike: a part of the port, and the import of jobs."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from comfyfleet.model.calls import Command, JobSnapshot
from comfyfleet.model.dispatch import Candidate, Dispatch
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.ports import Clock, Counts, EligibilityMatrix, Peek
from comfyfleet.stores.inprocess.queue_state import EndedLease, QueueEntry, QueueState

E = TypeVar("E", bound=QueueEntry)


class InProcessStore(Generic[E]):
    direct_workers = None
    peer_channel = None

    def __init__(self, clock: Clock, epoch: int) -> None:
        self.epoch = epoch
        self._clock = clock
        self._state: QueueState[E] = QueueState(clock, epoch)

    @property
    def is_shared(self) -> bool:
        return False

    async def tell(self, worker_id: WorkerId, command: Command) -> None:
        """No other process serves a worker."""

    async def now(self) -> float:
        return self._clock.now()

    async def table(self) -> EligibilityMatrix:
        return self._state.table()

    async def peek(self, query: Peek) -> list[Candidate]:
        return self._state.peek(query)

    async def next_due(self) -> float | None:
        return self._state.next_due()

    async def counts(self) -> Counts:
        return self._state.counts()

    async def position(self, job_id: JobId) -> int | None:
        return self._state.position(job_id)

    async def next_block_end(self) -> float | None:
        return self._state.blocks.next_end()


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
