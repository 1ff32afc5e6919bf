"""Hints from other processes: one subscription on a connection of its own.

A hint that is lost costs a moment, never a job.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from comfyfleet.stores.redis.address import Address

CHANNEL = "channel:hub:events"
_PAUSE_S = 1.0


class Listener:
    def __init__(self, address: Address, wake: Callable[[], None]) -> None:
        self._address = address
        self._wake = wake
        self._task: asyncio.Task[None] | None = None
        self.is_listening = asyncio.Event()

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="redis hints")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError):
                await self._listen()
            self.is_listening.clear()
            await asyncio.sleep(_PAUSE_S)

    async def _listen(self) -> None:
        address = self._address
        # No retries and no timeout: by its defaults the library repeats commands and ends blocking reads.
        redis = Redis(
            host=address.host,
            port=address.port,
            db=address.database,
            username=address.username,
            password=address.password,
            ssl=address.is_tls,
            ssl_ca_certs=address.authority,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_keepalive=True,
        )
        try:
            async with redis.pubsub() as subscription:
                await subscription.subscribe(address.prefix + CHANNEL)
                async for message in subscription.listen():
                    if message["type"] == "subscribe":
                        self.is_listening.set()
                        # What was told while nobody listened is not told again.
                        self._wake()
                    elif message["type"] == "message":
                        self._wake()
        finally:
            await redis.aclose()
