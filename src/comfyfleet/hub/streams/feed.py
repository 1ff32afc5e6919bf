"""A feed: what happened, encoded once, for any number of watchers that each read at their own pace.

A watcher is a place in the feed and nothing more, so one that does not read costs no memory and delays nobody: what may
be lost is dropped from the feed behind its back, what may not (facts) stays for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()

_PAUSE_S = 20e-6
"""For each watcher, between two rings. A write costs about half of it: a feed that a thousand watch is read every 20 ms
at most, more in each write, and leaves half of the loop to everybody else. One that few watch does not notice."""


class FeedEntry:
    """One event. `value` is what it says, `sse` its frame; the frames of other transports are made when asked for."""

    __slots__ = ("kind", "message", "number", "sse", "value")

    def __init__(self, kind: str, value: Any, number: int = 0) -> None:
        self.kind = kind
        self.value = value
        self.number = number
        """Of a fact; 0 for whatever may be lost."""
        head = f"id: {number}\nevent: {kind}\ndata: " if number else f"event: {kind}\ndata: "
        self.sse = head.encode() + _ENCODER.encode(value) + b"\n\n"
        self.message: bytes | None = None


class Feed:
    """`keep` is how many entries that may be lost are held for those who are behind."""

    def __init__(self, keep: int) -> None:
        self.head = 0
        """The place of the newest entry."""
        self.lost = 0
        """The place of the newest entry that was dropped."""
        self.is_over = False
        self._keep = keep
        self._entries: dict[int, FeedEntry] = {}
        self._losable: deque[int] = deque()
        self._newest: dict[str, int] = {}
        self._joined: dict[int, bytes] = {}
        self._watchers: dict[Callable[[], None], None] = {}
        self._is_ringing = False
        self._quiet_until = 0.0

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def join(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there may be more to read."""
        self._watchers[wake] = None

    def leave(self, wake: Callable[[], None]) -> None:
        self._watchers.pop(wake, None)

    def add(self, entry: FeedEntry, *, only_newest: bool = False) -> None:
        """`only_newest`: of this kind no other is held."""
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
        self.ring()

    def ring(self) -> None:
        """Once for everything that is added in one turn of the loop, or while the last ring is still being answered."""
        if not self._is_ringing:
            self._is_ringing = True
            loop = asyncio.get_running_loop()
            if (pause_s := self._quiet_until - loop.time()) > 0:
                loop.call_later(pause_s, self._wake)
            else:
                loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._is_ringing = False
        self._quiet_until = asyncio.get_running_loop().time() + _PAUSE_S * len(self._watchers)
        for wake in self._watchers:
            wake()

    def after(self, place: int) -> list[FeedEntry]:
        """What is held behind that place, oldest first."""
        found = []
        for number in reversed(self._entries):
            if number <= place:
                break
            found.append(self._entries[number])
        found.reverse()
        return found

    def joined(self, place: int) -> bytes:
        """The same as one piece of bytes; made once for all who stand at the same place."""
        known = self._joined.get(place)
        if known is None:
            known = self._joined[place] = b"".join(entry.sse for entry in self.after(place))
        return known

    def end(self) -> None:
        self.is_over = True
        self.ring()

    def __iter__(self) -> Iterator[FeedEntry]:
        return iter(self._entries.values())
