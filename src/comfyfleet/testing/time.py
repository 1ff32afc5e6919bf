"""A manual clock and seeded randomness: a day of the fleet replays exactly, and nothing sleeps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from heapq import heappop, heappush

from comfyfleet.model.ids import JobId


class ManualTimer:
    __slots__ = ("callback", "is_cancelled")

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualClock:
    """Stands still until it is advanced; timers fire in order, each at its own time."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._set_by = 0.0
        self._timers: list[tuple[float, int, ManualTimer]] = []
        self._made = 0

    def now(self) -> float:
        return self._now + self._set_by

    def monotonic(self) -> float:
        return self._now

    def set_by(self, seconds: float) -> None:
        """Sets the clock to another time. No time passes."""
        self._set_by += seconds

    def call_at(self, when: float, callback: Callable[[], None]) -> ManualTimer:
        timer = ManualTimer(callback)
        self._made += 1
        heappush(self._timers, (max(when - self._set_by, self._now), self._made, timer))
        return timer

    async def advance(self, seconds: float) -> None:
        """Moves on and stops at every timer, so that its tasks can run to their next wait."""
        until = self._now + seconds
        await self.settle()
        while self._timers and self._timers[0][0] <= until:
            at, _, timer = heappop(self._timers)
            self._now = max(self._now, at)
            if not timer.is_cancelled:
                timer.callback()
                await self.settle()
        self._now = until
        await self.settle()

    @staticmethod
    async def settle() -> None:
        """Lets every runnable task run until all of them wait."""
        for _ in range(20):
            await asyncio.sleep(0)


class SeededRandom:
    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self._jobs = 0

    def job_id(self, now: float) -> JobId:
        self._jobs += 1
        # The time as in a version 7 UUID, so that ids can be compared with times.
        milliseconds = f"{int(now * 1000):012x}"
        return JobId(f"{milliseconds[:8]}-{milliseconds[8:]}-{self._jobs:08d}-{self._seed}")

    def token(self) -> str:
        return f"{self._random.getrandbits(64):016x}"

    def fraction(self) -> float:
        return self._random.random()

    def seed(self) -> int:
        return self._random.getrandbits(53)
