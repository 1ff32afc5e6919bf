"""What the memory and the SQLite store do alike: a part of the port, and the import of jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.calls import Command, JobSnapshot
from comfyfleet.model.dispatch import Candidate, Dispatch
from comfyfleet.model.ids import JobId, WorkerId, WorkflowHash
from comfyfleet.model.worker import WorkerDelta, WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta
from comfyfleet.ports import Clock, Counts, EligibilityMatrix, LaneBacklog, Peek
from comfyfleet.stores.inprocess.queue_state import JobEnd, QueueEntry, QueueState

E = TypeVar("E", bound=QueueEntry)


class Area(StrEnum):
    """Keys for changes that do not belong to one job."""

    TABLE = "table"
    WORKERS = "workers"
    BLOCKS = "blocks"
    WORKFLOW_STATS = "workflow_stats"
    TENANTS = "tenants"
    PAUSE = "pause"
    PLACES = "places"
    DOCUMENTS = "documents"


Key = JobId | Area


class InProcessStore(Generic[E]):
    """A change applies to memory before the first await, so no other call comes in between. `_wait` waits until
    changes are durable."""

    direct_workers = None
    peer_channel = None

    def __init__(self, clock: Clock, epoch: int) -> None:
        self.epoch = epoch
        self._clock = clock
        self._state: QueueState[E] = QueueState(clock, epoch)
        self._wake: Callable[[], None] = lambda: None

    async def _wait(self, key: Key | None) -> None:
        """Waits until the changes under the key (None: all) are durable."""

    async def _save_worker(self, worker: WorkerRecord) -> None:
        raise NotImplementedError

    async def _save_workflow_stats(self, stats: WorkflowStats) -> None:
        raise NotImplementedError

    async def load(self, job_id: JobId) -> Dispatch | None:
        raise NotImplementedError

    @property
    def is_shared(self) -> bool:
        return False

    def listen(
        self,
        wake: Callable[[], None],
        on_command: Callable[[WorkerId, Command], None] | None = None,  # noqa: ARG002
        on_new_class: Callable[[], None] | None = None,  # noqa: ARG002
    ) -> None:
        """No other process writes, but a lease may not be written, or a tenant may fall below its cap."""
        self._wake = self._state.fair_share.on_freed = wake

    async def send_command(self, worker_id: WorkerId, command: Command) -> None:
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

    async def waiting_lanes(self, limit: int) -> list[LaneBacklog]:
        return self._state.waiting_lanes(limit)

    async def load_many(self, job_ids: Sequence[JobId]) -> list[Dispatch | None]:
        return [await self.load(job_id) for job_id in job_ids]

    async def is_queue_paused(self) -> bool:
        await self._wait(Area.PAUSE)
        return self._state.is_paused

    # workers

    async def put_worker(self, worker: WorkerRecord) -> None:
        await self._save_worker(worker)

    async def add_worker(self, worker: WorkerRecord) -> bool:
        if worker.worker_id in self._state.workers:
            return False
        await self._save_worker(worker)
        return True

    async def replace_worker(self, worker: WorkerRecord) -> bool:
        # If it is missing, wait: its removal may not be written yet.
        known = self._state.workers.get(worker.worker_id) or await self.get_worker(worker.worker_id)
        if known is None or known.revision != worker.revision:
            return False
        await self._save_worker(worker.merged_onto(known))
        return True

    async def apply_worker_delta(self, worker_id: WorkerId, delta: WorkerDelta) -> WorkerRecord | None:
        known = self._state.workers.get(worker_id) or await self.get_worker(worker_id)
        if known is None:
            return None
        noted = delta.apply(known)
        await self._save_worker(noted)
        return noted

    async def get_worker(self, worker_id: WorkerId) -> WorkerRecord | None:
        await self._wait(Area.WORKERS)
        return self._state.workers.get(worker_id)

    async def workers(self) -> list[WorkerRecord]:
        await self._wait(Area.WORKERS)
        return list(self._state.workers.values())

    # blocks and workflow statistics

    async def get_block(self, pair: Pair) -> Block | None:
        await self._wait(Area.BLOCKS)
        return self._state.blocks.get(pair)

    async def blocks(self, worker_id: WorkerId | None = None) -> list[Block]:
        await self._wait(Area.BLOCKS)
        return self._state.blocks.listing(worker_id)

    async def next_block_end(self) -> float | None:
        return self._state.blocks.next_end()

    async def get_workflow_stats(self, workflow_hash: WorkflowHash) -> WorkflowStats | None:
        await self._wait(Area.WORKFLOW_STATS)
        return self._state.workflow_stats.get(workflow_hash)

    async def put_workflow_stats(self, stats: WorkflowStats) -> None:
        await self._save_workflow_stats(stats)

    async def add_workflow_stats(self, delta: WorkflowStatsDelta) -> WorkflowStats:
        stats = delta.apply(self._state.workflow_stats.get(delta.workflow_hash))
        await self._save_workflow_stats(stats)
        return stats


def place(queue: QueueState[E], entry: E, snapshot: JobSnapshot, now: float) -> E:
    """Puts an imported job behind all jobs that are here."""
    assert snapshot.dispatch.lease is None, "a leased job does not move"
    queue.sequence += 1
    entry.dispatch = msgspec.structs.replace(snapshot.dispatch, sequence=queue.sequence)
    entry.attempts, entry.fact_count = snapshot.attempts, len(snapshot.facts)
    if entry.dispatch.phase.is_final:
        queue.endings += 1
        entry.ending = JobEnd(queue.endings, now)
    queue.load(entry)
    return entry


def is_as_read(found: Dispatch | None, read: Dispatch) -> bool:
    return found is not None and found.lease is None and found.revision == read.revision
