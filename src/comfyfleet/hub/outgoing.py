"""How many calls go out at a time: bounded for each host, each owner and in all, so that who is slow waits for himself.

What has no room stands in line, in memory and bounded: whatever is left out of it is found again by whoever offered it.
It owns the tasks of the calls, and knows nothing of what is sent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.tracing import in_background

_MAX_WAITING = 5_000
_MAX_WAITING_OF_HOST = 500
_GRACE_S = 2.0
_AGAIN_S = 2.0


class Bounds(msgspec.Struct, frozen=True):
    in_all: int = 64
    of_owner: int = 16
    of_host: int = 4


TESTS = Bounds(in_all=16, of_owner=4, of_host=4)
"""Of calls that somebody waits for: they have room of their own, so that they neither wait for deliveries nor keep
them waiting."""


class Waited:
    """Calls whose caller waits for what comes of them: one that has no room is refused, and stands in no line."""

    def __init__(self, bounds: Bounds = TESTS) -> None:
        self._bounds = bounds
        self._hosts: Counter[str] = Counter()
        self._owners: Counter[str] = Counter()

    @contextmanager
    def room(self, host: str, owner: str) -> Iterator[None]:
        bounds = self._bounds
        if (
            self._hosts.total() >= bounds.in_all
            or self._hosts[host] >= bounds.of_host
            or self._owners[owner] >= bounds.of_owner
        ):
            raise Refusal(
                RefusalCode.RATE_LIMITED,
                f"at most {bounds.in_all} test deliveries are under way at a time, {bounds.of_owner} of one owner and "
                f"{bounds.of_host} to one host: wait for the answers to those before it",
                retry_after_s=_AGAIN_S,
            )
        counters = ((self._hosts, host), (self._owners, owner))
        for counter, key in counters:
            counter[key] += 1
        try:
            yield
        finally:
            for counter, key in counters:
                counter[key] -= 1
                if not counter[key]:
                    del counter[key]


class Outgoing:
    """`work` makes the call of that name, and raises nothing."""

    def __init__(self, work: Callable[[str], Awaitable[None]], bounds: Bounds | None = None) -> None:
        self._work = work
        self._bounds = bounds or Bounds()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._hosts: Counter[str] = Counter()
        self._owners: Counter[str] = Counter()
        self._waiting: dict[str, dict[str, str]] = {}
        """By host: names and their owners."""
        self._count = 0
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._running)

    def offer(self, name: str, host: str, owner: str) -> None:
        """Begins it, or lets it stand in line. One that runs or stands there already is the same one."""
        line = self._waiting.get(host)
        if self._is_closed or name in self._running or (line is not None and name in line):
            return
        if self._has_room(host, owner):
            self._start(name, host, owner)
        elif self._count < _MAX_WAITING and len(line or ()) < _MAX_WAITING_OF_HOST:
            self._waiting.setdefault(host, {})[name] = owner
            self._count += 1

    async def close(self) -> None:
        """What is under way may end within a short grace."""
        self._is_closed = True
        self._waiting.clear()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=_GRACE_S)
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _has_room(self, host: str, owner: str) -> bool:
        bounds = self._bounds
        return (
            len(self._running) < bounds.in_all
            and self._hosts[host] < bounds.of_host
            and self._owners[owner] < bounds.of_owner
        )

    def _start(self, name: str, host: str, owner: str) -> None:
        self._hosts[host] += 1
        self._owners[owner] += 1
        task = in_background(self._run(name), name="outgoing")
        self._running[name] = task
        task.add_done_callback(lambda _: self._ended(name, host, owner))

    async def _run(self, name: str) -> None:
        await self._work(name)

    def _ended(self, name: str, host: str, owner: str) -> None:
        del self._running[name]
        for counter, key in ((self._hosts, host), (self._owners, owner)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]
        if self._is_closed:
            return
        # One for each host in turn: a long line does not keep the short ones waiting.
        for each in list(self._waiting):
            if len(self._running) >= self._bounds.in_all:
                return
            self._take_from(each)

    def _take_from(self, host: str) -> None:
        if self._hosts[host] >= self._bounds.of_host:
            return
        line = self._waiting.pop(host)
        # Not always the first: many have the same host, and one whose owner is busy elsewhere keeps the others waiting.
        name = next((name for name, owner in line.items() if self._has_room(host, owner)), None)
        if name is not None:
            self._count -= 1
            self._start(name, host, line.pop(name))
        if line:
            self._waiting[host] = line
