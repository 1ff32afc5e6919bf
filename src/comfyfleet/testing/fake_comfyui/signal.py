"""A signal that wakes all waiting tasks when something has changed."""

from __future__ import annotations

import asyncio


class Signal:
    """Wakes all waiters at once; a notification without waiters is not remembered."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Wakes all current waiters."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for the next notification."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
