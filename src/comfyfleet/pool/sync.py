"""The pool for scripts without an event loop: the same methods, but each call blocks.

The pool runs on an event loop in its own thread, so progress and retries continue while the script does other things.
Handlers of `on` are called on that thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.job import JobResult
from comfyfleet.pool.events import PoolEvent
from comfyfleet.pool.pool import WorkflowPool

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(
    method: Callable[Concatenate[WorkflowPool, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncWorkflowPool, P], T]:
    """The pool's method with its signature and docstring, as a blocking call."""

    @functools.wraps(method)
    def call(self: SyncWorkflowPool, /, *args: P.args, **options: P.kwargs) -> T:
        self.start()
        return self._run(lambda: method(self.pool, *args, **options))

    return call


def _at_once(
    method: Callable[Concatenate[WorkflowPool, P], T],
) -> Callable[Concatenate[SyncWorkflowPool, P], T]:
    """As above, for methods that need no loop and may be called before the start."""

    @functools.wraps(method)
    def call(self: SyncWorkflowPool, /, *args: P.args, **options: P.kwargs) -> T:
        return method(self.pool, *args, **options)

    return call


class SyncWorkflowPool:
    """A `WorkflowPool` whose methods block. The first call starts it; `close()` or the end of a `with` ends it."""

    __signature__ = inspect.signature(WorkflowPool)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.pool = WorkflowPool(*args, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._life = threading.RLock()

    # life

    def __enter__(self) -> SyncWorkflowPool:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Connect to the servers, once. The first call of another method does it too."""
        self._must_not_be_its_own_thread()
        with self._life:
            if self._is_closed:
                raise Refusal(RefusalCode.UNAVAILABLE, "the pool is closed; make a new one")
            if self._thread is not None:
                return
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="comfyfleet pool", daemon=True
            )
            self._thread.start()
            try:
                self._run(self.pool.start)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Stop at once and cancel running jobs on their servers. Call `drain()` first to let them finish."""
        self._must_not_be_its_own_thread()
        with self._life:
            is_first, self._is_closed = not self._is_closed, True
            if not is_first or self._loop is None or self._thread is None:
                return
            try:
                self._run(self._end)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    async def _end(self) -> None:
        try:
            await self.pool.close()
        finally:
            # Other threads may wait for a result; none may wait for ever.
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.get_running_loop().shutdown_asyncgens()

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        assert self._loop is not None, "the pool is started"
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except (KeyboardInterrupt, concurrent.futures.CancelledError):
            future.cancel()
            raise

    def _must_not_be_its_own_thread(self) -> None:
        if self._thread is threading.current_thread():
            raise RuntimeError(
                "a handler of a SyncWorkflowPool cannot call it: the call would wait for the thread it runs on. "
                "Put the event into a queue, or make the handler an async function and await `pool.pool`"
            )

    # the pool's methods

    drain = _blocking(WorkflowPool.drain)
    add_server = _blocking(WorkflowPool.add_server)
    remove_server = _blocking(WorkflowPool.remove_server)
    refresh = _blocking(WorkflowPool.refresh)
    enqueue = _blocking(WorkflowPool.enqueue)
    convert = _blocking(WorkflowPool.convert)
    wait = _blocking(WorkflowPool.wait)
    wait_for_record = _blocking(WorkflowPool.wait_for_record)
    get_job = _blocking(WorkflowPool.get_job)
    cancel = _blocking(WorkflowPool.cancel)
    retry = _blocking(WorkflowPool.retry)
    pause = _blocking(WorkflowPool.pause)
    resume = _blocking(WorkflowPool.resume)
    set_priority = _blocking(WorkflowPool.set_priority)
    explain = _blocking(WorkflowPool.explain)
    fetch = _blocking(WorkflowPool.fetch)
    save = _blocking(WorkflowPool.save)
    pause_queue = _blocking(WorkflowPool.pause_queue)
    resume_queue = _blocking(WorkflowPool.resume_queue)
    blocks = _blocking(WorkflowPool.blocks)
    unblock = _blocking(WorkflowPool.unblock)
    stats = _blocking(WorkflowPool.stats)
    set_affinity = _at_once(WorkflowPool.set_affinity)
    remove_affinity = _at_once(WorkflowPool.remove_affinity)
    on = _at_once(WorkflowPool.on)

    def run(self, workflow: Mapping[str, Any] | str | Path, **options: Any) -> JobResult:
        """`enqueue`, then `wait`."""
        return self.wait(self.enqueue(workflow, **options))

    def events(self, job_id: str) -> Iterator[PoolEvent]:
        """The stored events of a job without progress, then all further ones until the job or the pool ends."""
        self.start()
        watched = self.pool.events(job_id)
        try:
            while not self._is_closed:
                try:
                    yield self._run(lambda: _next(watched))
                except StopAsyncIteration:
                    return
        finally:
            if not self._is_closed:
                self._run(watched.aclose)


async def _next(watched: Any) -> PoolEvent:
    event: PoolEvent = await anext(watched)
    return event
