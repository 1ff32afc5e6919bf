"""Admission control by tenants' terms: submission rate and number of open jobs. Policy defines the terms.

The tenant's database counts open jobs. Between two counts, this hub hands out the capacity that it found, so
concurrent submissions cannot exceed the limit. A hub on a shared store takes an eighth of the free capacity
at a time, so hubs together may exceed the limit by that much.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from comfyfleet.hub.http.limits import RateLimiter
from comfyfleet.model.ids import TenantId
from comfyfleet.model.recent import RecentDict
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy.terms import check_waiting
from comfyfleet.ports import Clock, DocumentStore
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.tenants import Tenants

_GOOD_FOR_S = 1.0
_SHARE = 8
_MAX_TENANTS = 10_000


class _Capacity:
    """Of one tenant. While `idle` is set, no submission is in progress, so a count finds all of them."""

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
        databases: TenantDatabases,
        documents: DocumentStore,
        clock: Clock,
        *,
        is_shared: bool,
    ) -> None:
        self._tenants = tenants
        self._databases = databases
        self._clock = clock
        self._is_shared = is_shared
        self._rate_limiter = RateLimiter(documents, clock, is_shared=is_shared)
        self._capacities: RecentDict[TenantId, _Capacity] = RecentDict(_MAX_TENANTS)

    async def terms(self, tenant_id: TenantId, /) -> Tenant | None:
        return await self._tenants.get(tenant_id)

    @asynccontextmanager
    async def admit(self, tenant: Tenant, /) -> AsyncIterator[None]:
        caps = tenant.caps
        capacity = None if caps.max_waiting is None else await self._enter(tenant, caps.max_waiting)
        try:
            # Last: a submission without capacity must not use a token.
            if caps.submits_per_minute is not None:
                await self._rate_limiter.take(tenant.tenant_id, caps.submits_per_minute)
            yield
        finally:
            if capacity is not None:
                capacity.under_way -= 1
                if not capacity.under_way:
                    capacity.idle.set()

    async def _enter(self, tenant: Tenant, most: int) -> _Capacity:
        capacity = self._capacity_of(tenant.tenant_id)
        async with capacity.counting:
            if (
                capacity.most != most
                or self._clock.monotonic() >= capacity.good_until
                or (capacity.left <= 0 and self._is_shared)
            ):
                await capacity.idle.wait()
                database = await self._databases.database_of(tenant)
                free = most - await database.count_open(tenant.tenant_id, most)
                capacity.left = max(1, free // _SHARE) if self._is_shared and free > 0 else free
                capacity.most, capacity.good_until = most, self._clock.monotonic() + _GOOD_FOR_S
            check_waiting(tenant, most - max(0, capacity.left))
            capacity.left -= 1
            capacity.under_way += 1
            capacity.idle.clear()
        return capacity

    def _capacity_of(self, tenant_id: TenantId) -> _Capacity:
        # It drops the tenant that was idle longest. A submission in progress keeps its own reference.
        capacity = self._capacities[tenant_id] = self._capacities.get(tenant_id) or _Capacity()
        return capacity
