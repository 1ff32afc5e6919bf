"""The bounds at the door: how large, how many, how long, how often.

What a job may ask for is policy's to bound; here is what anybody may make the hub read. What each route may be sent
stands in the table of routes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.wire.route import LARGE_BYTES
from comfyfleet.wire.socket import AGENT_MESSAGE_BYTES

_MAX_BUCKETS = 10_000
_AGAIN_S = 2.0


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_body_bytes: int = LARGE_BYTES
    """As received, where the table of routes allows large bodies. Small ones have the bound that stands there."""
    max_unpacked_bytes: int = LARGE_BYTES
    max_depth: int = 80
    max_bodies_bytes: Annotated[int, Meta(ge=1)] = 256 * 1024 * 1024
    """All large bodies together that are being read or worked on; half of it for one key."""
    requests_per_s: float = 2_000.0
    """For one key, or one address where there is no key …"""
    burst: int = 4_000
    """… after so many at once."""
    refusals_per_s: float = 5.0
    """Wrong keys from one address …"""
    refusals_burst: int = 50
    max_wait_s: float = 60.0
    """The longest a request is parked, whatever it asks for."""
    max_frame_bytes: Annotated[int, Meta(ge=AGENT_MESSAGE_BYTES)] = 16 * 1024 * 1024
    """One message over the WebSocket."""
    max_connections: int = 30_000
    max_connections_per_address: int = 15_000
    """Before anybody is known by a key; the address may be a proxy's."""
    max_head_bytes: int = 64 * 1024
    """The first line and the headers of a request."""
    request_s: Annotated[float, Meta(ge=0.1)] = 30.0
    """A request arrives whole in this time …"""
    min_bytes_per_s: Annotated[int, Meta(ge=1)] = 1_024
    """… and a second more for each so many bytes."""
    stalled_s: float = 120.0
    """Whoever takes nothing of an answer for so long is let go."""
    max_streams: int = 10_000
    max_sockets: int = 10_000
    max_parked: int = 20_000
    """Polls and calls for commands that wait."""
    max_held_per_key: int = 5_000
    """Streams, sockets and parked requests together …"""
    max_held_per_address: int = 10_000
    """… and as many from one address, which may be a proxy's."""
    beat_s: float = 15.0
    """How often a stream that has nothing to say says that it lives, and whoever stays is asked for its key."""
    max_in_flight: int = 20_000
    """Requests that are being answered, parked polls among them."""
    max_tenant_file_bytes: Annotated[int, Meta(ge=1)] | None = None
    """What all files of one tenant may take together, uploads and what runs left. None: as much as there is."""
    max_pending_deliveries: Annotated[int, Meta(ge=1)] = 100_000
    """Of one tenant, that wait to be sent: beyond them no job of it that adds to them is taken."""


class HungUp(Exception):
    """Whoever asked is gone; nobody reads an answer."""


class Budget:
    """Bytes that are held for a while: so many in all, and half of them by one holder at most, so that it does not keep
    everybody else out. What does not fit is refused, not queued: a queue would hold what has arrived."""

    def __init__(self, most: int, of: str, holder: str) -> None:
        """`of`: what they are; `holder`: who holds them. Both are words of the refusal."""
        self._most = most
        self._of = of
        self._holder = holder
        self._by_holder: Counter[str] = Counter()
        self.held = 0

    def take(self, holder: str, size: int) -> None:
        if self.held + size > self._most or self._by_holder[holder] + size > self._most // 2:
            raise Refusal(
                RefusalCode.UNAVAILABLE,
                f"the hub takes {self._of} of {self._most} bytes at a time and no more, half of it for one "
                f"{self._holder}; try again",
                retry_after_s=_AGAIN_S,
            )
        self._by_holder[holder] += size
        self.held += size

    def give_back(self, holder: str, size: int) -> None:
        self.held -= size
        self._by_holder[holder] -= size
        if not self._by_holder[holder]:
            del self._by_holder[holder]


class Rate:
    """A bucket of tokens for each name, filled at one rate. Names that have been quiet are forgotten."""

    def __init__(self, per_s: float, burst: int, now: Callable[[], float], of: str = "requests") -> None:
        """`of`: what is counted, as whoever is refused reads it."""
        self._of = of
        self._per_s = per_s
        self._burst = float(burst)
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, name: str) -> None:
        """Refuses when the bucket is empty, and says when it will not be."""
        now = self._now()
        left = self._left(name, now)
        self._check(left)
        self._keep(name, left - 1.0, now)

    def check(self, name: str) -> None:
        """Refuses as `take` does, and takes nothing."""
        if name in self._buckets:
            self._check(self._left(name, self._now()))

    def spend(self, name: str) -> None:
        """Takes one without asking: for what has happened already."""
        now = self._now()
        self._keep(name, max(0.0, self._left(name, now) - 1.0), now)

    def _check(self, left: float) -> None:
        if left < 1.0:
            wait_s = (1.0 - left) / self._per_s
            raise Refusal(
                RefusalCode.RATE_LIMITED,
                f"more than {self._per_s:g} {self._of} a second; try again in {wait_s:.1f} s",
                retry_after_s=round(wait_s, 3),
            )

    def _left(self, name: str, now: float) -> float:
        left, at = self._buckets.get(name, (self._burst, now))
        return min(self._burst, left + (now - at) * self._per_s)

    def _keep(self, name: str, left: float, now: float) -> None:
        self._buckets.pop(name, None)
        self._buckets[name] = (left, now)
        if len(self._buckets) > _MAX_BUCKETS:
            # The longest quiet one is the fullest.
            del self._buckets[next(iter(self._buckets))]
