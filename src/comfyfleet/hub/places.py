"""Who keeps a connection: streams, sockets and parked requests, counted in all, for each key and for each address.

An ordinary request is over in a moment and bounded by its rate; these stay, so each takes a place and gives it back.
Whose key is not good any more loses its places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from comfyfleet.hub.limits import Limits
from comfyfleet.model.errors import Refusal, RefusalCode

Kind = Literal["stream", "socket", "poll"]

_AGAIN_S = 5.0


class Place:
    """One that is held. `end` gives it back before its holder leaves by itself."""

    __slots__ = ("end",)

    def __init__(self) -> None:
        self.end: Callable[[], None] = lambda: None


class Places:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._in_all: dict[Kind, int] = {
            "stream": limits.max_streams,
            "socket": limits.max_sockets,
            "poll": limits.max_parked,
        }
        self._held: dict[Kind, int] = dict.fromkeys(self._in_all, 0)
        self._by_key: dict[str, dict[Place, None]] = {}
        self._by_address: Counter[str] = Counter()

    def counts(self) -> dict[Kind, int]:
        return dict(self._held)

    @contextmanager
    def held(self, kind: Kind, key_id: str, address: str) -> Iterator[Place]:
        """Refuses where there is no place: the hub's want of them is its own matter, a caller's is the caller's."""
        if self._held[kind] >= self._in_all[kind]:
            raise Refusal(
                RefusalCode.UNAVAILABLE,
                f"the hub keeps {self._in_all[kind]} connections of this kind and no more; try again, or another hub",
                retry_after_s=_AGAIN_S,
            )
        self._check(len(self._by_key.get(key_id, ())), self._limits.max_held_per_key, "this key")
        self._check(self._by_address[address], self._limits.max_held_per_address, "this address")
        place = Place()
        self._held[kind] += 1
        self._by_key.setdefault(key_id, {})[place] = None
        self._by_address[address] += 1
        try:
            yield place
        finally:
            self._held[kind] -= 1
            del self._by_key[key_id][place]
            if not self._by_key[key_id]:
                del self._by_key[key_id]
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def holders(self) -> list[str]:
        """The keys that have a place now."""
        return list(self._by_key)

    def end(self, key_id: str) -> None:
        for place in list(self._by_key.get(key_id, ())):
            place.end()

    @staticmethod
    def _check(held: int, most: int, who: str) -> None:
        if held >= most:
            raise Refusal(
                RefusalCode.RATE_LIMITED,
                f"{who} keeps {held} streams, sockets and parked requests, which is the most: close one first",
                retry_after_s=_AGAIN_S,
            )
