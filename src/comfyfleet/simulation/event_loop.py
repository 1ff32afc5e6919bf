"""An asyncio event loop on simulated time. When every task waits, time jumps to the next timer.

A day of a fleet passes in seconds and always in the same order. There are no sockets and no threads, and nothing
sleeps. `SimulatedClock` and `SimulatedRandom` are the ports of an engine on this loop.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from comfyfleet.model.ids import JobId

T = TypeVar("T")

START = 1_000_000.0
"""The wall clock at the start."""
_RESOLUTION_S = 1e-9


def _resolution_s(at: float) -> float:
    """Timers that differ by less fire together. Late in a simulation, floats differ by more than a nanosecond."""
    return max(_RESOLUTION_S, 4 * math.ulp(at))


class EverythingWaits(RuntimeError):
    """Every task waits and no timer is set, so nothing can ever happen again."""


class SimulatedTimeLoop(asyncio.BaseEventLoop):
    """The base class calls `select` to wait for sockets; here that call moves the time."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0
        self._clock_resolution = _resolution_s(0.0)
        self._selector = self
        self._scheduled: list[asyncio.TimerHandle]

    def time(self) -> float:
        return self._seconds

    def select(self, timeout: float | None) -> tuple[()]:
        if timeout is None:
            raise EverythingWaits("every task waits and no timer is set")
        if timeout > 0:
            # The time of the timer itself: a sum would be off by a rounding error, and the timer too early.
            self._seconds = max(self._seconds, self._scheduled[0].when())
            self._clock_resolution = _resolution_s(self._seconds)
        return ()

    def run_in_executor(  # type: ignore[override]
        self, _executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs the function at once: threads have no order that a seed could repeat."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def _process_events(self, event_list: object) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """Ctrl-C calls this. The loop never blocks, so nothing has to wake it."""


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine on a new loop. Ctrl-C cancels it and raises `KeyboardInterrupt`."""
    with asyncio.Runner(loop_factory=SimulatedTimeLoop, debug=False) as runner:
        return runner.run(main)


class SimulatedClock:
    """The clock of one machine. Its wall clock can be set, which moves no timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._set_by = 0.0

    def now(self) -> float:
        return START + self._set_by + self._loop.time()

    def monotonic(self) -> float:
        return self._loop.time()

    def set_by(self, seconds: float) -> None:
        self._set_by += seconds

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        # A little later, so that the wall clock has reached `when` in spite of rounding.
        at = when - START - self._set_by
        return self._loop.call_at(max(at + 2 * _resolution_s(when), self._loop.time()), callback)


class SimulatedRandom:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._prefix = f"{seed & 0xFFFF:04x}"
        self._jobs = 0

    def job_id(self, now: float) -> JobId:
        self._jobs += 1
        # Shaped as a version 7 UUID, whose order is that of time.
        time = f"{int(now * 1000):012x}"
        return JobId(f"{time[:8]}-{time[8:]}-7000-{self._prefix}-{self._jobs:012x}")

    def token(self) -> str:
        return f"{self._random.getrandbits(64):016x}"

    def fraction(self) -> float:
        return self._random.random()

    def seed(self) -> int:
        return self._random.getrandbits(53)
