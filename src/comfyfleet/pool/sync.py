"""The pool for scripts without an event loop: the same names, each call waits for its answer.

The pool itself runs on a loop in a thread of its own, so progress and retries go on while the script does other things.
Handlers given to `on` are called on that thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

from comfyfleet.model.block import Block
from comfyfleet.model.calls import Explanation
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.pool.events import EventName, Handler, PoolEvent
from comfyfleet.pool.options import Affinity, Seconds, Server
from comfyfleet.pool.pool import WorkflowPool
from comfyfleet.pool.records import JobRecord, PoolStats

T = TypeVar("T")


class SyncWorkflowPool:
    """A `WorkflowPool` whose methods block. Takes the same arguments."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._make: Callable[[], WorkflowPool] = functools.partial(WorkflowPool, *args, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="comfyfleet pool", daemon=True)
        self._thread.start()
        self._is_closed = False
        self.pool = self._call(self._build())

    async def _build(self) -> WorkflowPool:
        return self._make()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except (KeyboardInterrupt, concurrent.futures.CancelledError):
            future.cancel()
            raise

    def __enter__(self) -> SyncWorkflowPool:
        try:
            self._call(self.pool.start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        self.__enter__()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._call(self.pool.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def drain(self) -> None:
        self._call(self.pool.drain())

    def add_server(self, server: str | Server) -> str:
        return self._call(self.pool.add_server(server))

    def remove_server(self, client_id: str, *, drain: bool = True) -> None:
        self._call(self.pool.remove_server(client_id, drain=drain))

    def refresh(self, client_id: str | None = None) -> None:
        self._call(self.pool.refresh(client_id))

    def enqueue(self, workflow: Mapping[str, Any] | str | Path, **options: Any) -> str:
        return self._call(self.pool.enqueue(workflow, **options))

    def run(self, workflow: Mapping[str, Any] | str | Path, **options: Any) -> JobResult:
        return self._call(self.pool.run(workflow, **options))

    def wait(self, job_id: str, timeout: Seconds | None = None) -> JobResult:
        return self._call(self.pool.wait(job_id, timeout))

    def get_job(self, job_id: str) -> JobRecord:
        return self._call(self.pool.get_job(job_id))

    def cancel(self, job_id: str) -> bool:
        return self._call(self.pool.cancel(job_id))

    def retry(self, job_id: str) -> None:
        self._call(self.pool.retry(job_id))

    def pause(self, job_id: str) -> None:
        self._call(self.pool.pause(job_id))

    def resume(self, job_id: str) -> None:
        self._call(self.pool.resume(job_id))

    def set_priority(self, job_id: str, priority: int) -> None:
        self._call(self.pool.set_priority(job_id, priority))

    def explain(self, job_id: str) -> Explanation:
        return self._call(self.pool.explain(job_id))

    def fetch(self, file: OutputFile, client_id: str | None = None) -> bytes:
        return self._call(self.pool.fetch(file, client_id))

    def pause_queue(self) -> None:
        self._call(self.pool.pause_queue())

    def resume_queue(self) -> None:
        self._call(self.pool.resume_queue())

    def set_affinity(self, affinity: Affinity) -> None:
        self.pool.set_affinity(affinity)

    def remove_affinity(self, workflow_hash: str) -> None:
        self.pool.remove_affinity(workflow_hash)

    def blocks(self) -> list[Block]:
        return self._call(self.pool.blocks())

    def unblock(self, client_id: str, workflow_hash: str) -> bool:
        return self._call(self.pool.unblock(client_id, workflow_hash))

    def stats(self) -> PoolStats:
        return self._call(self.pool.stats())

    def on(
        self, name: EventName | Literal["*"], handler: Handler, where: Mapping[str, Any] | None = None
    ) -> Callable[[], None]:
        return self.pool.on(name, handler, where)

    def events(self, job_id: str) -> Iterator[PoolEvent]:
        """Everything that happened and happens to a job, to its end."""
        watched = self.pool.events(job_id)
        try:
            while True:
                try:
                    yield self._call(_next(watched))
                except StopAsyncIteration:
                    return
        finally:
            self._call(watched.aclose())


async def _next(watched: Any) -> PoolEvent:
    event: PoolEvent = await anext(watched)
    return event
