"""The tenants that an operator set up, in the store's cabinet: every hub on a store has the same.

A tenant that is not here lives in the central store like the default one. What is remembered is good for a moment
only; a tenant that was just changed at another hub is seen as it was for at most that long.

Where a tenant lives: as an operator set it up, with the database of its pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.ports import Clock, Document, DocumentStore
from comfyfleet.stores.documents import is_name
from comfyfleet.tenancy.database.port import TenantDatabase
from comfyfleet.tenancy.database.registry import TenantDatabases

COLLECTION = "tenants"
REMEMBER_S = 2.0
_MAX_REMEMBERED = 10_000
_TRIES = 20
_tenants = msgspec.json.Decoder(Tenant)


class Tenants:
    """`is_shared`: other processes may add tenants, so that one is not there must be asked each time."""

    def __init__(self, documents: DocumentStore, clock: Clock, *, is_shared: bool) -> None:
        self._documents = documents
        self._clock = clock
        self._is_shared = is_shared
        self._known: dict[TenantId, tuple[Tenant | None, float]] = {}

    async def get(self, tenant_id: TenantId) -> Tenant | None:
        """As it was at most a moment ago. One that was set up is never taken for one that was not."""
        if tenant_id == DEFAULT_TENANT:
            return None
        known, until = self._known.get(tenant_id, (None, float("-inf")))
        if self._clock.monotonic() < until:
            return known
        return await self.newest(tenant_id)

    async def newest(self, tenant_id: TenantId) -> Tenant | None:
        # Whoever asks may have made the name up.
        document = await self._documents.get(COLLECTION, tenant_id) if is_name(tenant_id) else None
        found = None if document is None else _tenants.decode(document.body)
        self._remember(tenant_id, found)
        return found

    async def listing(self, after: str = "", limit: int = 100) -> list[Tenant]:
        return [
            _tenants.decode(each.body) for each in await self._documents.listing(COLLECTION, after, limit)
        ]

    async def everybody(self) -> list[Tenant]:
        found: list[Tenant] = []
        while page := await self.listing(found[-1].tenant_id if found else "", 1_000):
            found += page
        return found

    async def create(self, tenant: Tenant) -> Tenant:
        if tenant.tenant_id == DEFAULT_TENANT:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"the tenant {DEFAULT_TENANT!r} is there already and lives in the store itself; choose another name",
            )
        if not await self._documents.put(
            COLLECTION, tenant.tenant_id, msgspec.json.encode(tenant), version=0
        ):
            raise Refusal(
                RefusalCode.DUPLICATE_DIFFERS,
                f"there is a tenant {tenant.tenant_id!r} already; choose another name, or change that one",
            )
        self._remember(tenant.tenant_id, tenant)
        return tenant

    async def change(self, tenant_id: TenantId, decide: Callable[[Tenant], Tenant]) -> Tenant:
        """`decide` gets it as it is and may refuse."""
        for _ in range(_TRIES):
            document = await self._documents.get(COLLECTION, tenant_id)
            if document is None:
                raise not_found(tenant_id)
            changed = decide(_tenants.decode(document.body))
            if await self._put(document, changed):
                return changed
        raise Refusal(
            RefusalCode.UNAVAILABLE, f"tenant {tenant_id!r} is being changed by others; try again in a moment"
        )

    async def remove(self, tenant_id: TenantId) -> None:
        await self._documents.remove(COLLECTION, tenant_id)
        self._remember(tenant_id, None)

    async def _put(self, document: Document, changed: Tenant) -> bool:
        body = msgspec.json.encode(changed)
        is_put = await self._documents.put(COLLECTION, document.name, body, version=document.version)
        if is_put:
            self._remember(changed.tenant_id, changed)
        return is_put

    def _remember(self, tenant_id: TenantId, found: Tenant | None) -> None:
        self._known.pop(tenant_id, None)
        if found is None and self._is_shared:
            return
        # Where nobody else writes, what this process wrote is what there is.
        until = self._clock.monotonic() + REMEMBER_S if self._is_shared else float("inf")
        self._known[tenant_id] = (found, until)
        if len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]


def not_found(tenant_id: TenantId) -> Refusal:
    return Refusal(
        RefusalCode.NOT_FOUND,
        f"there is no tenant {tenant_id!r}; `comfyfleet tenant list` has those there are",
    )


class TenantLocation(NamedTuple):
    tenant: Tenant
    database: TenantDatabase


class TenantDirectory:
    def __init__(self, tenants: Tenants, pools: TenantDatabases) -> None:
        self.tenants = tenants
        self.pools = pools

    async def of(self, tenant_id: TenantId) -> TenantLocation | None:
        """None: it was not set up, and lives in the central store. Raises `Fault` while its database is away."""
        tenant = await self.tenants.get(tenant_id)
        return None if tenant is None else TenantLocation(tenant, await self.pools.of(tenant))

    async def newest(self, tenant_id: TenantId) -> TenantLocation | None:
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
