"""Time and randomness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from comfyfleet.model.ids import JobId


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """`now` is the wall clock, which may jump. `monotonic` measures durations in this process. A timer does not move
    when the wall clock is set later."""

    def now(self) -> float: ...
    def monotonic(self) -> float: ...
    def call_at(self, when: float, callback: Callable[[], None]) -> Timer: ...


class RandomSource(Protocol):
    def job_id(self, now: float) -> JobId: ...
    def token(self) -> str: ...
    def fraction(self) -> float:
        """Uniform in [0, 1)."""

    def seed(self) -> int: ...
