"""The fake server's time.

In `ScaledClock` simulated seconds pass in scaled wall-clock time; in `HandClock` time passes only when a test
says so. Everything that takes simulated time uses a clock.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol

# Enough turns of the event loop for a woken node to reach its next wait: a run yields once per node.
_SETTLE_TURNS = 40


class FakeClock(Protocol):
    """The clock of a fake server."""

    def now(self) -> float:
        """Seconds; only differences mean anything."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits for this many simulated seconds."""
        ...


class ScaledClock:
    """Simulated seconds last `time_scale` wall-clock seconds each."""

    def __init__(self, time_scale: float) -> None:
        self._time_scale = time_scale

    def now(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds) * self._time_scale)


class HandClock:
    """Time stands still until a test moves it, so a run takes the same course on any machine."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), waker))
        await waker

    async def advance_to(self, moment: float) -> None:
        """Moves time forward and wakes sleepers one by one; each runs as far as it can."""
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= moment:
            wake_at, _, waker = heapq.heappop(self._sleepers)
            self._now = max(self._now, wake_at)
            if not waker.done():
                waker.set_result(None)
                await self._settle()
        self._now = max(self._now, moment)

    def next_wake(self) -> float | None:
        """When the next sleeper is due. None: nobody sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    async def _settle(self) -> None:
        for _ in range(_SETTLE_TURNS):
            await asyncio.sleep(0)
