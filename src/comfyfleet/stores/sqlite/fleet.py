"""What a SQLite store keeps of workers and lessons. A change is made in memory at once, so two never meet."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from comfyfleet.model.ids import WorkerId, WorkflowHash
from comfyfleet.model.worker import WorkerDelta, WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta
from comfyfleet.stores.inprocess.queue_state import QueueState
from comfyfleet.stores.sqlite import codec
from comfyfleet.stores.sqlite.codec import SqliteEntry
from comfyfleet.stores.sqlite.writer import Area, Key, Writer


class _Store(Protocol):
    _state: QueueState[SqliteEntry]
    _writer: Writer

    def _check(self, value: object) -> bytes: ...
    def _wait(self, key: Key) -> Awaitable[None]: ...


class SqliteFleet(_Store):
    # workers

    async def put_worker(self, worker: WorkerRecord) -> None:
        blob = self._check(worker)
        self._state.workers[worker.worker_id] = worker
        batch = self._writer.batch()
        codec.put_worker(batch, worker.worker_id, blob)
        await self._writer.written(batch)

    async def add_worker(self, worker: WorkerRecord) -> bool:
        if worker.worker_id in self._state.workers:
            return False
        await self.put_worker(worker)
        return True

    async def replace_worker(self, worker: WorkerRecord) -> bool:
        # One that is not there is waited for: its removal may not be written yet.
        known = self._state.workers.get(worker.worker_id) or await self.get_worker(worker.worker_id)
        if known is None or known.revision != worker.revision:
            return False
        await self.put_worker(worker.over(known))
        return True

    async def note_worker(self, worker_id: WorkerId, delta: WorkerDelta) -> WorkerRecord | None:
        known = self._state.workers.get(worker_id) or await self.get_worker(worker_id)
        if known is None:
            return None
        noted = delta.apply(known)
        await self.put_worker(noted)
        return noted

    async def get_worker(self, worker_id: WorkerId) -> WorkerRecord | None:
        await self._wait(Area.WORKERS)
        return self._state.workers.get(worker_id)

    async def workers(self) -> list[WorkerRecord]:
        await self._wait(Area.WORKERS)
        return list(self._state.workers.values())

    async def remove_worker(self, worker_id: WorkerId) -> None:
        self._check(worker_id)
        self._state.workers.pop(worker_id, None)
        self._state.blocks.forget_worker(worker_id)
        batch = self._writer.batch()
        codec.remove_worker(batch, worker_id)
        await self._writer.written(batch)

    # lessons

    async def get_workflow_stats(self, workflow_hash: WorkflowHash) -> WorkflowStats | None:
        await self._wait(Area.WORKFLOW_STATS)
        return self._state.workflow_stats.get(workflow_hash)

    async def put_workflow_stats(self, stats: WorkflowStats) -> None:
        blob = self._check(stats)
        batch = self._writer.batch()
        codec.put_workflow_stats(batch, stats.workflow_hash, blob, self._state.workflow_stats.put(stats))
        await self._writer.written(batch)

    async def learn(self, delta: WorkflowStatsDelta) -> WorkflowStats:
        stats = delta.apply(self._state.workflow_stats.get(delta.workflow_hash))
        await self.put_workflow_stats(stats)
        return stats
