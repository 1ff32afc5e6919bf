"""Time and chance from the machine: the only places where either comes from."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable

from comfyfleet.model.ids import JobId
from comfyfleet.ports import Timer


class SystemClock:
    """Wall-clock seconds that never go back: they start at the system's time and follow its monotonic clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when - self.now()), callback)


class SystemChance:
    def __init__(self) -> None:
        self._random = random.Random(secrets.randbits(128))

    def job_id(self, now: float) -> JobId:
        """A version 7 UUID: ids grow with time, to the millisecond, and nobody can guess one."""
        value = (
            int(now * 1000) << 80 | 0x7 << 76 | secrets.randbits(12) << 64 | 0x2 << 62 | secrets.randbits(62)
        )
        text = f"{value:032x}"
        return JobId(f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}")

    def token(self) -> str:
        return secrets.token_urlsafe(18)

    def fraction(self) -> float:
        return self._random.random()

    def seed(self) -> int:
        return self._random.getrandbits(53)
