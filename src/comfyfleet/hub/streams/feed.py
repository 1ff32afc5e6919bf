"""A feed of events, encoded once, that any number of watchers read at their own pace.

A watcher is only a position in the feed, so a slow one costs no memory and delays nobody. The feed drops old
entries that may be lost; facts stay.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()

_PAUSE_S = 20e-6
"""Pause for each watcher between two wake-ups. A write costs about half of it, so a feed with a thousand
watchers is read at most every 20 ms and leaves half of the event loop to others."""


class FeedEntry:
    """One event with its SSE frame. `message` caches the WebSocket frame."""

    __slots__ = ("kind", "message", "number", "sse", "value")

    def __init__(self, kind: str, value: Any, number: int = 0) -> None:
        self.kind = kind
        self.value = value
        self.number = number
        """The number of a fact; 0 for an entry that may be lost."""
        head = f"id: {number}\nevent: {kind}\ndata: " if number else f"event: {kind}\ndata: "
        self.sse = head.encode() + _ENCODER.encode(value) + b"\n\n"
        self.message: bytes | None = None


class Feed:
    """`keep`: number of entries that may be lost but are kept for slow watchers."""

    def __init__(self, keep: int) -> None:
        self.head = 0
        """Position of the newest entry."""
        self.lost = 0
        """Position of the newest entry that was dropped."""
        self.is_over = False
        self._keep = keep
        self._entries: dict[int, FeedEntry] = {}
        self._losable: deque[int] = deque()
        self._newest: dict[str, int] = {}
        self._joined: dict[int, bytes] = {}
        self._watchers: dict[Callable[[], None], None] = {}
        self._is_waking = False
        self._quiet_until = 0.0

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def subscribe(self, wake: Callable[[], None]) -> None:
        """The feed calls `wake` when there may be more to read."""
        self._watchers[wake] = None

    def unsubscribe(self, wake: Callable[[], None]) -> None:
        self._watchers.pop(wake, None)

    def add(self, entry: FeedEntry, *, only_newest: bool = False) -> None:
        """`only_newest`: replaces the previous entry of the same kind."""
        self.head += 1
        if not entry.number:
            if only_newest:
                if (older := self._newest.get(entry.kind)) is not None:
                    del self._entries[older]
                self._newest[entry.kind] = self.head
            else:
                self._losable.append(self.head)
                if len(self._losable) > self._keep:
                    self.lost = self._losable.popleft()
                    del self._entries[self.lost]
        self._entries[self.head] = entry
        self._joined.clear()
        self.wake_watchers()

    def wake_watchers(self) -> None:
        """Wakes the watchers once for all entries of one loop iteration, or of the pause after it."""
        if not self._is_waking:
            self._is_waking = True
            loop = asyncio.get_running_loop()
            if (pause_s := self._quiet_until - loop.time()) > 0:
                loop.call_later(pause_s, self._wake)
            else:
                loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        self._quiet_until = asyncio.get_running_loop().time() + _PAUSE_S * len(self._watchers)
        for wake in self._watchers:
            wake()

    def after(self, position: int) -> list[FeedEntry]:
        """The kept entries after that position, oldest first."""
        found = []
        for number in reversed(self._entries):
            if number <= position:
                break
            found.append(self._entries[number])
        found.reverse()
        return found

    def joined(self, position: int) -> bytes:
        """The same as bytes, shared by all watchers at this position."""
        known = self._joined.get(position)
        if known is None:
            known = self._joined[position] = b"".join(entry.sse for entry in self.after(position))
        return known

    def end(self) -> None:
        self.is_over = True
        self.wake_watchers()

    def __iter__(self) -> Iterator[FeedEntry]:
        return iter(self._entries.values())
