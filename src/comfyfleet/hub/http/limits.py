"""Limits of the hub: sizes, numbers, times and rates. `wire/routes.py` bounds bodies; policy bounds jobs.

`ConnectionLimits` counts connections that stay open: in total, per key and per address. `RateLimiter` counts
the submissions of a tenant. Hubs on a shared store keep its token bucket in the document store, and each hub
draws about one percent of the tokens at a time for its own use; together they never exceed the limit.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.recent import RecentDict
from comfyfleet.policy.admission import TokenBucket, TokenDraw, take_tokens
from comfyfleet.ports import Clock, DocumentStore
from comfyfleet.wire.route import LARGE_BYTES
from comfyfleet.wire.websocket import AGENT_MESSAGE_BYTES

_MAX_BUCKETS = 10_000
_BUDGET_RETRY_S = 2.0


class HubLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_body_bytes: int = LARGE_BYTES
    """As received, on routes that allow large bodies. `wire/routes.py` bounds all other routes."""
    max_unpacked_bytes: int = LARGE_BYTES
    max_depth: int = 80
    max_bodies_bytes: Annotated[int, Meta(ge=1)] = 256 * 1024 * 1024
    """For all large bodies in progress together; one key may hold half."""
    requests_per_s: float = 2_000.0
    """For one key, or for one address if there is no key."""
    burst: int = 4_000
    refusals_per_s: float = 5.0
    """Wrong keys from one address."""
    refusals_burst: int = 50
    max_wait_s: float = 60.0
    """The longest time that a request is parked."""
    max_frame_bytes: Annotated[int, Meta(ge=AGENT_MESSAGE_BYTES)] = 16 * 1024 * 1024
    """One message over the WebSocket."""
    max_connections: int = 30_000
    max_connections_per_address: int = 15_000
    """Counted before authentication; the address may be a proxy's."""
    max_head_bytes: int = 64 * 1024
    """The request line and the headers."""
    request_s: Annotated[float, Meta(ge=0.1)] = 30.0
    """A request must arrive within this time …"""
    min_bytes_per_s: Annotated[int, Meta(ge=1)] = 1_024
    """… plus one second for each this many bytes."""
    stalled_s: float = 120.0
    """A client that reads nothing of its answer for this long is disconnected."""
    max_streams: int = 10_000
    max_sockets: int = 10_000
    max_parked: int = 20_000
    """Polls and requests for commands that wait."""
    max_held_per_key: int = 5_000
    """Streams, sockets and parked requests together."""
    max_held_per_address: int = 10_000
    """The same for one address, which may be a proxy's."""
    beat_s: float = 15.0
    """How often an idle stream sends a comment, and how often keys of open connections are checked."""
    max_in_flight: int = 20_000
    """Requests in progress, parked ones included."""
    max_tenant_file_bytes: Annotated[int, Meta(ge=1)] | None = None
    """For all files of one tenant, uploads and outputs. None: no limit."""
    max_pending_deliveries: Annotated[int, Meta(ge=1)] = 100_000
    """Of one tenant. Beyond it, the hub refuses its jobs that would add deliveries."""


class ClientDisconnected(Exception):
    """The client is gone; nobody reads an answer."""


def subtract(counter: Counter[str], key: str, amount: int = 1) -> None:
    counter[key] -= amount
    if not counter[key]:
        del counter[key]


class ByteBudget:
    """Limits the bytes held at a time: in total, and half of that for one holder. It refuses instead of
    queueing, because a queue would hold the bytes that have arrived."""

    def __init__(self, most: int, of: str, holder: str) -> None:
        """`of` (what the bytes are) and `holder` (who holds them) are words for the message."""
        self._most = most
        self._of = of
        self._holder = holder
        self._by_holder: Counter[str] = Counter()
        self.held = 0

    def take(self, holder: str, size: int) -> None:
        if self.held + size > self._most or self._by_holder[holder] + size > self._most // 2:
            raise Refusal(
                RefusalCode.UNAVAILABLE,
                f"the hub holds at most {self._most} bytes of {self._of} at a time, half of that for one "
                f"{self._holder}; try again",
                retry_after_s=_BUDGET_RETRY_S,
            )
        self._by_holder[holder] += size
        self.held += size

    def release(self, holder: str, size: int) -> None:
        self.held -= size
        subtract(self._by_holder, holder, size)


class RequestRate:
    """One token bucket for each name. The names that were idle longest are forgotten."""

    def __init__(self, per_s: float, burst: int, now: Callable[[], float], of: str = "requests") -> None:
        """`of`: what is counted, a word for the message."""
        self._of = of
        self._per_s = per_s
        self._burst = float(burst)
        self._now = now
        self._buckets: RecentDict[str, tuple[float, float]] = RecentDict(_MAX_BUCKETS)

    def take(self, name: str) -> None:
        now = self._now()
        left = self._left(name, now)
        self._check(left)
        self._keep(name, left - 1.0, now)

    def check(self, name: str) -> None:
        """Refuses as `take` does, but takes no token."""
        if name in self._buckets:
            self._check(self._left(name, self._now()))

    def take_token(self, name: str) -> None:
        """Takes a token without a check, for an event that has already happened."""
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
        # It drops the name that was idle longest, which has the fullest bucket.
        self._buckets[name] = (left, now)


Kind = Literal["stream", "socket", "poll"]

_CONNECTION_RETRY_S = 5.0


class ConnectionSlot:
    """One open connection. `end` closes it early."""

    __slots__ = ("end",)

    def __init__(self) -> None:
        self.end: Callable[[], None] = lambda: None


class ConnectionLimits:
    def __init__(self, limits: HubLimits) -> None:
        self._limits = limits
        self._in_all: dict[Kind, int] = {
            "stream": limits.max_streams,
            "socket": limits.max_sockets,
            "poll": limits.max_parked,
        }
        self._held: dict[Kind, int] = dict.fromkeys(self._in_all, 0)
        self._by_key: dict[str, dict[ConnectionSlot, None]] = {}
        self._by_address: Counter[str] = Counter()

    def counts(self) -> dict[Kind, int]:
        return dict(self._held)

    @contextmanager
    def held(self, kind: Kind, key_id: str, address: str) -> Iterator[ConnectionSlot]:
        """Counts a connection while it is open. Raises `unavailable` if the hub is full, and
        `rate_limited` if the caller has too many."""
        if self._held[kind] >= self._in_all[kind]:
            raise Refusal(
                RefusalCode.UNAVAILABLE,
                f"the hub keeps at most {self._in_all[kind]} connections of this kind: try again, or use another hub",
                retry_after_s=_CONNECTION_RETRY_S,
            )
        self._check(len(self._by_key.get(key_id, ())), self._limits.max_held_per_key, "this key")
        self._check(self._by_address[address], self._limits.max_held_per_address, "this address")
        slot = ConnectionSlot()
        self._held[kind] += 1
        self._by_key.setdefault(key_id, {})[slot] = None
        self._by_address[address] += 1
        try:
            yield slot
        finally:
            self._held[kind] -= 1
            del self._by_key[key_id][slot]
            if not self._by_key[key_id]:
                del self._by_key[key_id]
            subtract(self._by_address, address)

    def holders(self) -> list[str]:
        """The ids of the keys that have open connections."""
        return list(self._by_key)

    def end(self, key_id: str) -> None:
        for slot in list(self._by_key.get(key_id, ())):
            slot.end()

    @staticmethod
    def _check(held: int, most: int, who: str) -> None:
        if held >= most:
            raise Refusal(
                RefusalCode.RATE_LIMITED,
                f"{who} has {held} streams, sockets and parked requests, which is the limit: close one first",
                retry_after_s=_CONNECTION_RETRY_S,
            )


COLLECTION = "tenant_turns"
_LOCAL_TOKENS = 100
"""A hub draws one in this many of a minute's tokens at a time."""
_TRIES = 20
_MAX_TENANTS = 10_000
_buckets = msgspec.json.Decoder(TokenBucket)


class _LocalTokens:
    __slots__ = ("bucket", "empty_until", "lock", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.bucket: TokenBucket | None = None
        """Used only if the store is not shared."""
        self.empty_until = float("-inf")
        self.lock = asyncio.Lock()


class RateLimiter:
    def __init__(self, documents: DocumentStore, clock: Clock, *, is_shared: bool) -> None:
        self._documents = documents
        self._clock = clock
        self._is_shared = is_shared
        self._local_tokens: RecentDict[TenantId, _LocalTokens] = RecentDict(_MAX_TENANTS)

    async def take(self, tenant: TenantId, per_minute: int) -> None:
        """Takes one token, or refuses and says when the next one is available."""
        local_tokens = self._tokens_of(tenant)
        async with local_tokens.lock:
            if not local_tokens.tokens and (passed := self._clock.monotonic()) >= local_tokens.empty_until:
                drawn = await self._draw(tenant, local_tokens, per_minute)
                local_tokens.tokens = drawn.tokens
                local_tokens.empty_until = passed + drawn.wait_s
            if not local_tokens.tokens:
                wait_s = max(0.001, local_tokens.empty_until - self._clock.monotonic())
                raise Refusal(
                    RefusalCode.RATE_LIMITED,
                    f"the tenant {tenant!r} may submit {per_minute} jobs a minute; try again in {wait_s:.1f} s",
                    retry_after_s=round(wait_s, 3),
                    limit=per_minute,
                )
            local_tokens.tokens -= 1

    async def _draw(self, tenant: TenantId, local_tokens: _LocalTokens, per_minute: int) -> TokenDraw:
        if not self._is_shared:
            drawn = take_tokens(local_tokens.bucket, per_minute, 1, self._clock.monotonic())
            local_tokens.bucket = drawn.bucket
            return drawn
        for _ in range(_TRIES):
            document, now = await self._documents.get(COLLECTION, tenant), self._clock.now()
            bucket = None if document is None else _buckets.decode(document.body)
            drawn = take_tokens(bucket, per_minute, max(1, per_minute // _LOCAL_TOKENS), now)
            version = 0 if document is None else document.version
            if not drawn.tokens or await self._documents.put(
                COLLECTION, tenant, msgspec.json.encode(drawn.bucket), version=version
            ):
                return drawn
        raise Refusal(
            RefusalCode.UNAVAILABLE,
            f"too many clients submit for tenant {tenant!r} at once; try again in a moment",
        )

    def _tokens_of(self, tenant: TenantId) -> _LocalTokens:
        # It drops the tenant that was idle longest. A task that waits for its lock keeps its own reference.
        local_tokens = self._local_tokens[tenant] = self._local_tokens.get(tenant) or _LocalTokens()
        return local_tokens
