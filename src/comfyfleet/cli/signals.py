"""SIGINT and SIGTERM for programs that serve: the first one is a request, the second an order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Signals:
    """Use it as a context manager, inside a loop."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _heard():
            with contextlib.suppress(NotImplementedError):  # loops of Windows know no signals
                loop.add_signal_handler(number, self._hear, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _heard():
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)

    def _hear(self, number: int) -> None:
        self.came.append(number)
        self._changed.set()

    async def before(self, work: Coroutine[Any, Any, T], count: int) -> tuple[T] | None:
        """What the work answers. None: so many signals came before, and it was cancelled."""
        task = asyncio.create_task(work)
        while len(self.came) < count:
            self._changed.clear()
            heard = asyncio.create_task(self._changed.wait())
            await asyncio.wait({task, heard}, return_when=asyncio.FIRST_COMPLETED)
            heard.cancel()
            if task.done():
                return (task.result(),)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None

    async def wait(self, count: int = 1) -> None:
        while len(self.came) < count:
            self._changed.clear()
            await self._changed.wait()


def _heard() -> tuple[signal.Signals, ...]:
    return (signal.SIGINT, signal.SIGTERM)
