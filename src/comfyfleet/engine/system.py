"""Time and chance from the machine: the only places where either comes from."""

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
"""The faster loop counts whole milliseconds: it rounds the wait, and the one that has begun counts as well."""
_BLOCK_BYTES = 4096
# The variant of a UUID leaves two of its digit's four bits to chance.
_VARIANTS = {f"{digit:x}": "89ab"[digit % 4] for digit in range(16)}


class SystemClock:
    """The machine's. It is asked each time: a hub may be started before the machine has learned what time it is."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Never before that time: whoever is called looks at the clock, and would find that nothing is due yet."""
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()) + _ROUNDING_S, callback)


class StoreClock:
    """The store's time without asking it: the one clock of an engine. Where several machines share a store, each has a
    clock of its own, and a time from one compared with a time from another may be wrong by hours."""

    def __init__(self, clock: Clock, *, is_shared: bool) -> None:
        self._clock = clock
        self._is_shared = is_shared
        self._began = clock.now() - clock.monotonic()

    def heard(self, now: float) -> None:
        """What the store says. Until then, the machine's time is as good as any."""
        self._began = now - self._clock.monotonic()

    def now(self) -> float:
        # A store that is not shared asks the machine's clock itself, and follows when somebody sets that.
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
        """A version 7 UUID: ids grow with time, far below the millisecond, and nobody can guess one."""
        milliseconds = now * 1000
        whole = int(milliseconds)
        # Twelve digits of milliseconds and, as RFC 9562 allows, three of the fraction of one.
        time = f"{(whole << 12) + int((milliseconds - whole) * 4096):015x}"
        chance = self._draw(8).hex()
        variant = _VARIANTS[chance[0]]
        return JobId(f"{time[:8]}-{time[8:12]}-7{time[12:]}-{variant}{chance[1:4]}-{chance[4:]}")

    def token(self) -> str:
        return urlsafe_b64encode(self._draw(18)).decode()

    def _draw(self, count: int) -> bytes:
        """Of the system's own randomness, fetched by the block: each fetch is a call into the kernel."""
        end = self._used + count
        # A process that was forked off must not give out the same secrets as its parent.
        if end > len(self._unused) or self._owner != os.getpid():
            self._unused, self._owner, end = os.urandom(_BLOCK_BYTES), os.getpid(), count
        self._used = end
        return self._unused[end - count : end]

    def fraction(self) -> float:
        return self._random.random()

    def seed(self) -> int:
        return self._random.getrandbits(53)
