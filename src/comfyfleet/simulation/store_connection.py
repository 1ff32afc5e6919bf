"""The connection of one engine process to a store, in the simulation of faults.

Calls take time now and then, so that the steps of two engines interleave. The connection breaks for ever before or
after a chosen write: for the store, the process has crashed there. What the store did is shown to the checker at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from comfyfleet.model.errors import Fault

_WRITES = frozenset(
    {"enqueue", "lease", "write", "heartbeat", "purge", "mark_late", "pause_queue", "send_command"}
    | {"put_worker", "add_worker", "replace_worker", "apply_worker_delta", "remove_worker"}
    | {"put_class", "put_profile", "drop_profiles", "put_block", "lift", "expired_blocks"}
    | {"put_workflow_stats", "add_workflow_stats", "put", "remove", "put_terms", "charge"}
)
_PARTS = frozenset({"records", "documents", "fair_share", "job_transfer"})
_DELAYED = 0.03
_DELAY_S = 0.02
_SLOW = 0.0005
_SLOW_S = 25.0


class ConnectionLost(Fault):
    """The process has crashed, or the message was lost."""


class StoreWatcher(Protocol):
    def saw(self, name: str, arguments: tuple[Any, ...], answer: Any) -> None:
        """The store has answered a call. Nothing happened since."""


class StoreConnection:
    """It has the methods of `Store`, and of the parts of a store."""

    def __init__(self, store: Any, rng: random.Random, watcher: StoreWatcher) -> None:
        self._store, self._rng, self._watcher = store, rng, watcher
        self._switch = self
        self._breaks_in: int | None = None
        self.is_broken = False
        self.broken = asyncio.Event()

    def break_after(self, writes: int) -> None:
        """Breaks at the write with this number from now: before it or after it, as chance has it."""
        self._breaks_in = writes

    def break_now(self) -> None:
        self.is_broken = True
        self.broken.set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name in _PARTS:
            part = StoreConnection(found, self._rng, self._watcher)
            part._switch = self._switch
            found = part
        elif asyncio.iscoroutinefunction(found):
            found = self._wrapped(name, found)
        else:
            # Plain values may change, so they are read each time.
            return found
        setattr(self, name, found)
        return found

    async def close(self) -> None:
        """The store outlives its connections."""

    def _wrapped(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **named: Any) -> Any:
            switch, is_write = self._switch, name in _WRITES
            await self._delay()
            self._check()
            if is_write and switch._breaks_in is not None:
                switch._breaks_in -= 1
                if switch._breaks_in <= 0:
                    switch.break_now()
                    if self._rng.random() < 0.5:
                        self._watcher.saw(name, arguments, await method(*arguments, **named))
            self._check()
            answer = await method(*arguments, **named)
            self._watcher.saw(name, arguments, answer)
            await self._delay()
            self._check()
            return answer

        return call

    def _check(self) -> None:
        if self._switch.is_broken:
            raise ConnectionLost("the connection to the store is lost")

    async def _delay(self) -> None:
        draw = self._rng.random()
        if draw < _SLOW:
            await asyncio.sleep(self._rng.random() * _SLOW_S)
        elif draw < _DELAYED:
            await asyncio.sleep(self._rng.random() * _DELAY_S)
