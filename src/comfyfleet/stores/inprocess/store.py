"""The part of the port that the memory and the SQLite store answer alike, from their `QueueState`."""

from __future__ import annotations

from typing import Generic, TypeVar

from comfyfleet.model.calls import Command
from comfyfleet.model.dispatch import Candidate
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.ports import Clock, Counts, EligibilityMatrix, Peek
from comfyfleet.stores.inprocess.queue_state import QueueEntry, QueueState

E = TypeVar("E", bound=QueueEntry)


class InProcessStore(Generic[E]):
    is_shared = False
    direct_workers = None
    peer_channel = None

    def __init__(self, clock: Clock, epoch: int) -> None:
        self.epoch = epoch
        self._clock = clock
        self._state: QueueState[E] = QueueState(clock, epoch)

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
