"""The system clock, the store clock and the random source. All time and chance come from here."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable

from comfyfleet.model.ids import JobId
from comfyfleet.ports import Clock, Timer

_ROUNDING_S = 0.002
"""The faster event loop rounds waits to whole milliseconds."""
_BLOCK_BYTES = 4096
# The UUID variant fixes two bits of this digit.
_VARIANTS = {f"{digit:x}": "89ab"[digit % 4] for digit in range(16)}


class SystemClock:
    """Asks the machine each time: a hub may start before the machine has the right time."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Never calls early, because the callback would find nothing due."""
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()) + _ROUNDING_S, callback)


class StoreClock:
    """The store's time without a call to the store. Machines that share a store have different clocks, so an
    engine compares and writes only this time."""

    def __init__(self, clock: Clock, *, is_shared: bool) -> None:
        self._clock = clock
        self._is_shared = is_shared
        self._began = clock.now() - clock.monotonic()

    def set_store_time(self, now: float) -> None:
        """Sets the store's time. Before, the machine's time counts."""
        self._began = now - self._clock.monotonic()

    def now(self) -> float:
        # A store that is not shared follows the machine's clock, also when somebody sets it.
        return self._began + self._clock.monotonic() if self._is_shared else self._clock.now()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        if self._is_shared:
            when += self._clock.now() - self.now()
        return self._clock.call_at(when, callback)


class SystemRandom:
    def __init__(self) -> None:
        self._random = random.Random(secrets.randbits(128))
        self._unused = b""
        self._used = 0
        self._owner = 0

    def job_id(self, now: float) -> JobId:
        """A version 7 UUID: sorts by time below the millisecond and cannot be guessed."""
        milliseconds = now * 1000
        whole = int(milliseconds)
        # Twelve digits of milliseconds and, as RFC 9562 allows, three of their fraction.
        time = f"{(whole << 12) + int((milliseconds - whole) * 4096):015x}"
        chance = self._draw(8).hex()
        variant = _VARIANTS[chance[0]]
        return JobId(f"{time[:8]}-{time[8:12]}-7{time[12:]}-{variant}{chance[1:4]}-{chance[4:]}")

    def token(self) -> str:
        return urlsafe_b64encode(self._draw(18)).decode()

    def _draw(self, count: int) -> bytes:
        """Reads the system's randomness in blocks, because each read is a system call."""
        end = self._used + count
        # A forked process must not repeat its parent's secrets.
        if end > len(self._unused) or self._owner != os.getpid():
            self._unused, self._owner, end = os.urandom(_BLOCK_BYTES), os.getpid(), count
        self._used = end
        return self._unused[end - count : end]

    def fraction(self) -> float:
        return self._random.random()

    def seed(self) -> int:
        return self._random.getrandbits(53)
