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
    _kept: QueueState[SqliteEntry]
    _writer: Writer

    def _check(self, value: object) -> bytes: ...
    def _wait(self, key: Key) -> Awaitable[None]: ...


class SqliteFleet(_Store):
    # workers

    async def put_worker(self, worker: WorkerRecord) -> None:
        blob = self._check(worker)
        self._kept.workers[worker.worker_id] = worker
        batch = self._writer.batch()
        codec.put_worker(batch, worker.worker_id, blob)
        await self._writer.written(batch)

    async def add_worker(self, worker: WorkerRecord) -> bool:
        if worker.worker_id in self._kept.workers:
            return False
        await self.put_worker(worker)
        return True

    async def replace_worker(self, worker: WorkerRecord) -> bool:
        # One that is not there is waited for: its removal may not be written yet.
        known = self._kept.workers.get(worker.worker_id) or await self.get_worker(worker.worker_id)
        if known is None or known.revision != worker.revision:
            return False
        await self.put_worker(worker.over(known))
        return True

    async def note_worker(self, worker_id: WorkerId, delta: WorkerDelta) -> WorkerRecord | None:
        known = self._kept.workers.get(worker_id) or await self.get_worker(worker_id)
        if known is None:
            return None
        noted = delta.apply(known)
        await self.put_worker(noted)
        return noted

    async def get_worker(self, worker_id: WorkerId) -> WorkerRecord | None:
        await self._wait(Area.WORKERS)
        return self._kept.workers.get(worker_id)

    async def workers(self) -> list[WorkerRecord]:
        await self._wait(Area.WORKERS)
        return list(self._kept.workers.values())

    async def remove_worker(self, worker_id: WorkerId) -> None:
        self._check(worker_id)
        self._kept.workers.pop(worker_id, None)
        self._kept.blocks.forget_worker(worker_id)
        batch = self._writer.batch()
        codec.remove_worker(batch, worker_id)
        await self._writer.written(batch)

    # lessons

    async def get_lesson(self, workflow_hash: WorkflowHash) -> WorkflowStats | None:
        await self._wait(Area.LESSONS)
        return self._kept.lessons.get(workflow_hash)

    async def put_lesson(self, lesson: WorkflowStats) -> None:
        blob = self._check(lesson)
        batch = self._writer.batch()
        codec.put_lesson(batch, lesson.workflow_hash, blob, self._kept.lessons.put(lesson))
        await self._writer.written(batch)

    async def learn(self, delta: WorkflowStatsDelta) -> WorkflowStats:
        lesson = delta.apply(self._kept.lessons.get(delta.workflow_hash))
        await self.put_lesson(lesson)
        return lesson
