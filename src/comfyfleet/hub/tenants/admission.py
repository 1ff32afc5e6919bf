"""The gate of a hub: the terms of tenants that an operator set up, and how many of their jobs are open.

What the terms mean is policy's. Open jobs are counted in the tenant's own database; between two counts this hub hands
out the room that it found there, so jobs that come together get no further than those that come one by one. Hubs that
share a store take an eighth of the room at a time, and may go beyond it together by so much.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from comfyfleet.hub.http.limits import RateLimiter
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy.terms import check_waiting
from comfyfleet.ports import Clock, DocumentStore
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.tenants import Tenants

_GOOD_FOR_S = 1.0
_SHARE = 8
_MAX_ROOMS = 10_000


class _Room:
    """For one tenant. `idle`: nobody is on his way in, so that everybody who came is counted."""

    __slots__ = ("counting", "good_until", "idle", "left", "most", "under_way")

    def __init__(self) -> None:
        self.most = -1
        self.left = 0
        self.good_until = float("-inf")
        self.under_way = 0
        self.counting = asyncio.Lock()
        self.idle = asyncio.Event()
        self.idle.set()


class TermsAdmission:
    def __init__(
        self,
        tenants: Tenants,
        pools: TenantDatabases,
        documents: DocumentStore,
        clock: Clock,
        *,
        is_shared: bool,
    ) -> None:
        self._tenants = tenants
        self._pools = pools
        self._clock = clock
        self._is_shared = is_shared
        self._turns = RateLimiter(documents, clock, is_shared=is_shared)
        self._rooms: dict[TenantId, _Room] = {}

    async def terms(self, tenant_id: TenantId, /) -> Tenant | None:
        return await self._tenants.get(tenant_id)

    @asynccontextmanager
    async def admit(self, tenant: Tenant, /) -> AsyncIterator[None]:
        caps = tenant.caps
        room = None if caps.max_waiting is None else await self._enter(tenant, caps.max_waiting)
        try:
            # Last: whoever finds no room has not had his turn.
            if caps.submits_per_minute is not None:
                await self._turns.take(tenant.tenant_id, caps.submits_per_minute)
            yield
        finally:
            if room is not None:
                room.under_way -= 1
                if not room.under_way:
                    room.idle.set()

    async def _enter(self, tenant: Tenant, most: int) -> _Room:
        room = self._room(tenant.tenant_id)
        async with room.counting:
            if (
                room.most != most
                or self._clock.monotonic() >= room.good_until
                or (room.left <= 0 and self._is_shared)
            ):
                await room.idle.wait()
                database = await self._pools.of(tenant)
                free = most - await database.count_open(tenant.tenant_id, most)
                room.left = max(1, free // _SHARE) if self._is_shared and free > 0 else free
                room.most, room.good_until = most, self._clock.monotonic() + _GOOD_FOR_S
            check_waiting(tenant, most - max(0, room.left))
            room.left -= 1
            room.under_way += 1
            room.idle.clear()
        return room

    def _room(self, tenant_id: TenantId) -> _Room:
        room = self._rooms.pop(tenant_id, None) or _Room()
        self._rooms[tenant_id] = room
        if len(self._rooms) > _MAX_ROOMS:
            # The longest unused one; whoever is in it has it at hand.
            del self._rooms[next(iter(self._rooms))]
        return room
