"""Time and chance, as arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from comfyfleet.model.ids import JobId


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """`now` is the time of day; somebody may set it, so it jumps and goes back. `monotonic` only passes: for what lasts
    in this process. A timer is as far away as that time is now; a clock that is set later moves none."""

    def now(self) -> float: ...
    def monotonic(self) -> float: ...
    def call_at(self, when: float, callback: Callable[[], None]) -> Timer: ...


class RandomSource(Protocol):
    def job_id(self, now: float) -> JobId: ...
    def token(self) -> str: ...
    def fraction(self) -> float:
        """Uniform in [0, 1)."""

    def seed(self) -> int: ...
