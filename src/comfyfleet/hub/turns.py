"""Who submits how often, counted for each tenant: by this hub alone, or by all hubs on a store together.

Where hubs share a store, the turns of a tenant lie in its cabinet, and each hub draws some at a time into a purse of
its own: together they hand out no more than there are. What lies in one hub's purse, about one in a hundred, is no
other's.
"""

from __future__ import annotations

import asyncio

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.policy.turns import Bucket, Drawn, draw
from comfyfleet.ports import Cabinet, Clock

DRAWER = "tenant_turns"
_PURSE = 100
"""One turn in so many is drawn at a time."""
_TRIES = 20
_MAX_PURSES = 10_000
_buckets = msgspec.json.Decoder(Bucket)


class _Purse:
    __slots__ = ("bucket", "empty_until", "lock", "turns")

    def __init__(self) -> None:
        self.turns = 0
        self.bucket: Bucket | None = None
        """Where no other hub counts."""
        self.empty_until = float("-inf")
        self.lock = asyncio.Lock()


class Turns:
    def __init__(self, cabinet: Cabinet, clock: Clock, *, is_shared: bool) -> None:
        self._cabinet = cabinet
        self._clock = clock
        self._is_shared = is_shared
        self._purses: dict[TenantId, _Purse] = {}

    async def take(self, tenant: TenantId, per_minute: int) -> None:
        """Refuses where there is none left, and says when there will be."""
        purse = self._purse(tenant)
        async with purse.lock:
            if not purse.turns and (passed := self._clock.monotonic()) >= purse.empty_until:
                drawn = await self._draw(tenant, purse, per_minute)
                purse.turns = drawn.turns
                purse.empty_until = passed + drawn.wait_s
            if not purse.turns:
                wait_s = max(0.001, purse.empty_until - self._clock.monotonic())
                raise Refusal(
                    RefusalCode.RATE_LIMITED,
                    f"the tenant {tenant!r} may submit {per_minute} jobs a minute; try again in {wait_s:.1f} s",
                    retry_after_s=round(wait_s, 3),
                    limit=per_minute,
                )
            purse.turns -= 1

    async def _draw(self, tenant: TenantId, purse: _Purse, per_minute: int) -> Drawn:
        if not self._is_shared:
            drawn = draw(purse.bucket, per_minute, 1, self._clock.monotonic())
            purse.bucket = drawn.bucket
            return drawn
        for _ in range(_TRIES):
            document, now = await self._cabinet.get(DRAWER, tenant), self._clock.now()
            bucket = None if document is None else _buckets.decode(document.body)
            drawn = draw(bucket, per_minute, max(1, per_minute // _PURSE), now)
            version = 0 if document is None else document.version
            if not drawn.turns or await self._cabinet.put(
                DRAWER, tenant, msgspec.json.encode(drawn.bucket), version=version
            ):
                return drawn
        raise Refusal(
            RefusalCode.UNAVAILABLE,
            f"too many submit for the tenant {tenant!r} at once; try again in a moment",
        )

    def _purse(self, tenant: TenantId) -> _Purse:
        purse = self._purses.pop(tenant, None) or _Purse()
        self._purses[tenant] = purse
        if len(self._purses) > _MAX_PURSES:
            # The longest unused one; somebody who waits for its lock holds it himself.
            del self._purses[next(iter(self._purses))]
        return purse
