"""The pool for scripts without an event loop: the same methods, but each call blocks.

The pool runs on an event loop in its own thread, so progress and retries continue while the script does other things.
Handlers of `on` are called on that thread.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from comfyfleet.blocking_facade import BlockingFacade, blocking
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.job import JobResult
from comfyfleet.pool.events import PoolEvent
from comfyfleet.pool.pool import WorkflowPool

P = ParamSpec("P")
T = TypeVar("T")


def _at_once(
    method: Callable[Concatenate[WorkflowPool, P], T],
) -> Callable[Concatenate[SyncWorkflowPool, P], T]:
    """Like `blocking`, for methods that need no loop and may be called before the start."""

    @functools.wraps(method)
    def call(self: SyncWorkflowPool, /, *args: P.args, **options: P.kwargs) -> T:
        return method(self.pool, *args, **options)

    return call


class SyncWorkflowPool(BlockingFacade):
    """A `WorkflowPool` whose methods block. The first call starts it; `close()` or the end of a `with` ends it."""

    __signature__ = inspect.signature(WorkflowPool)

    def __init__(self, *args: Any, **options: Any) -> None:
        self.pool = WorkflowPool(*args, **options)
        super().__init__(self.pool, "pool")

    # life

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Connect to the servers, once. The first call of another method does it too."""
        self._must_not_be_its_own_thread()
        with self._life:
            if self._is_closed:
                raise Refusal(RefusalCode.UNAVAILABLE, "the pool is closed; make a new one")
            if self._thread is not None:
                return
            try:
                super()._run(self.pool.start)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Stop at once and cancel running jobs on their servers. Call `drain()` first to let them finish."""
        self._must_not_be_its_own_thread()
        super().close()

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self.start()
        return super()._run(work)

    def _must_not_be_its_own_thread(self) -> None:
        if self._thread is threading.current_thread():
            raise RuntimeError(
                "a handler of a SyncWorkflowPool cannot call it: the call would wait for the thread it runs on. "
                "Put the event into a queue, or make the handler an async function and await `pool.pool`"
            )

    # the pool's methods

    drain = blocking(WorkflowPool.drain)
    add_server = blocking(WorkflowPool.add_server)
    remove_server = blocking(WorkflowPool.remove_server)
    refresh = blocking(WorkflowPool.refresh)
    enqueue = blocking(WorkflowPool.enqueue)
    convert = blocking(WorkflowPool.convert)
    wait = blocking(WorkflowPool.wait)
    wait_for_record = blocking(WorkflowPool.wait_for_record)
    get_job = blocking(WorkflowPool.get_job)
    cancel = blocking(WorkflowPool.cancel)
    retry = blocking(WorkflowPool.retry)
    pause = blocking(WorkflowPool.pause)
    resume = blocking(WorkflowPool.resume)
    set_priority = blocking(WorkflowPool.set_priority)
    quote = blocking(WorkflowPool.quote)
    explain = blocking(WorkflowPool.explain)
    fetch = blocking(WorkflowPool.fetch)
    save = blocking(WorkflowPool.save)
    pause_queue = blocking(WorkflowPool.pause_queue)
    resume_queue = blocking(WorkflowPool.resume_queue)
    blocks = blocking(WorkflowPool.blocks)
    unblock = blocking(WorkflowPool.unblock)
    stats = blocking(WorkflowPool.stats)
    set_affinity = _at_once(WorkflowPool.set_affinity)
    remove_affinity = _at_once(WorkflowPool.remove_affinity)
    on = _at_once(WorkflowPool.on)

    def run(self, workflow: Mapping[str, Any] | str | Path, **options: Any) -> JobResult:
        """`enqueue`, then `wait`."""
        return self.wait(self.enqueue(workflow, **options))

    def events(self, job_id: str) -> Iterator[PoolEvent]:
        """The stored events of a job without progress, then all further ones until the job or the pool ends."""
        self.start()
        yield from self._each(self.pool.events(job_id), until_closed=True)
