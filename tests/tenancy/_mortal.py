"""A process that dies at a chosen step: everything it asks of databases and of the cabinet is counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


class Deadline:
    """Counts what is asked of databases and of the tenants' documents; after so many the process dies."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.is_before = False

    async def taken(self, work: Callable[[], Awaitable[Any]]) -> Any:
        if self.left is None:
            return await work()
        self.left -= 1
        if self.left == 0 and self.is_before:
            raise Killed
        answer = await work()
        if self.left == 0:
            raise Killed
        return answer


class Mortal:
    def __init__(self, inner: Any, deadline: Deadline) -> None:
        self._inner = inner
        self._deadline = deadline

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in ("open", "close", "documents"):
            return method

        async def call(*args: Any, **named: Any) -> Any:
            return await self._deadline.taken(lambda: method(*args, **named))

        return call
