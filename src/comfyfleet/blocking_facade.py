"""The base of `SyncWorkflowPool` and `SyncFleetClient`: async methods for scripts without an event loop.

Each call blocks. The work runs on an event loop in its own thread, which the first call starts.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class BlockingFacade:
    """`inner` has the async methods. `close()`, or the end of a `with`, closes it and ends the thread."""

    def __init__(self, inner: Any, what: str) -> None:
        self._inner = inner
        self._what = what
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._life = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._life:
            is_first, self._is_closed = not self._is_closed, True
            if not is_first or self._loop is None or self._thread is None:
                return
            try:
                _result(self._end(), self._loop)
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    async def _end(self) -> None:
        try:
            await self._inner.close()
        finally:
            # Other threads may wait for a result; none may wait for ever.
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await asyncio.get_running_loop().shutdown_asyncgens()

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        with self._life:
            if self._is_closed:
                raise RuntimeError(f"the {self._what} is closed; make a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name=f"comfyfleet {self._what}", daemon=True
                )
                self._thread.start()
            loop = self._loop
        return _result(work(), loop)

    def _each(self, source: AsyncIterator[T], *, until_closed: bool = False) -> Iterator[T]:
        """`until_closed`: ends when this is closed, without an error."""

        async def following() -> T:
            return await anext(source)

        try:
            while not (until_closed and self._is_closed):
                try:
                    yield self._run(following)
                except StopAsyncIteration:
                    return
        finally:
            close = getattr(source, "aclose", None)
            if close is not None and not self._is_closed:
                self._run(close)


def _result(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except (KeyboardInterrupt, concurrent.futures.CancelledError):
        future.cancel()
        raise


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingFacade, P], T]:
    """The method with its signature and docstring, as a blocking call."""

    @functools.wraps(method)
    def call(self: BlockingFacade, /, *args: P.args, **options: P.kwargs) -> T:
        return self._run(lambda: method(self._inner, *args, **options))

    return call
