"""Where a tenant lives: as an operator set it up, with the database of its pool."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.tenancy.database import TenantDatabase
from comfyfleet.tenancy.pools import Pools
from comfyfleet.tenancy.tenants import Tenants


class Home(NamedTuple):
    tenant: Tenant
    database: TenantDatabase


class Homes:
    def __init__(self, tenants: Tenants, pools: Pools) -> None:
        self.tenants = tenants
        self.pools = pools

    async def of(self, tenant_id: TenantId) -> Home | None:
        """None: it was not set up, and lives in the central store. Raises `Fault` while its database is away."""
        tenant = await self.tenants.get(tenant_id)
        return None if tenant is None else Home(tenant, await self.pools.of(tenant))

    async def newest(self, tenant_id: TenantId) -> Home | None:
        """As the store says now. What `of` remembers is where it lived a moment ago: whatever is missed there may have
        moved with it."""
        await self.tenants.newest(tenant_id)
        return await self.of(tenant_id)

    async def everyone(self) -> dict[str, list[Tenant]]:
        """The tenants of each pool that has any."""
        found: dict[str, list[Tenant]] = {}
        for tenant in await self.tenants.everybody():
            found.setdefault(tenant.pool, []).append(tenant)
        return found

    async def open(self) -> None:
        """Every pool that has tenants. One that is away is asked again by whoever needs it."""
        for pool in await self.everyone():
            with contextlib.suppress(Fault):
                await self.pools.get(pool)
