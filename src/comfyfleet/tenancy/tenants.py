"""The tenants that operators created, and the database that each one has.

They are documents in the store that all hubs share, cached for `REMEMBER_S`. Other tenants,
like the default one, have everything in the central store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId
from comfyfleet.model.recent import RecentDict
from comfyfleet.model.tenant import Tenant
from comfyfleet.ports import Clock, DocumentStore
from comfyfleet.stores.documents import is_name
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.database.sql_database import TenantDatabase

COLLECTION = "tenants"
REMEMBER_S = 2.0
_MAX_REMEMBERED = 10_000
_TRIES = 20
_tenants = msgspec.json.Decoder(Tenant)


class Tenants:
    """`is_shared`: other processes may add tenants, so unknown ones are not cached."""

    def __init__(self, documents: DocumentStore, clock: Clock, *, is_shared: bool) -> None:
        self._documents = documents
        self._clock = clock
        self._is_shared = is_shared
        self._known: RecentDict[TenantId, tuple[Tenant | None, float]] = RecentDict(_MAX_REMEMBERED)

    async def get(self, tenant_id: TenantId) -> Tenant | None:
        """At most `REMEMBER_S` old, but never None for a tenant that exists."""
        if tenant_id == DEFAULT_TENANT:
            return None
        known, until = self._known.get(tenant_id, (None, float("-inf")))
        if self._clock.monotonic() < until:
            return known
        return await self.get_uncached(tenant_id)

    async def get_uncached(self, tenant_id: TenantId) -> Tenant | None:
        # The name comes from a caller and may be invalid.
        document = await self._documents.get(COLLECTION, tenant_id) if is_name(tenant_id) else None
        found = None if document is None else _tenants.decode(document.body)
        self._remember(tenant_id, found)
        return found

    async def listing(self, after: str = "", limit: int = 100) -> list[Tenant]:
        return [
            _tenants.decode(each.body) for each in await self._documents.listing(COLLECTION, after, limit)
        ]

    async def list_all(self) -> list[Tenant]:
        found: list[Tenant] = []
        while page := await self.listing(found[-1].tenant_id if found else "", 1_000):
            found += page
        return found

    async def create(self, tenant: Tenant) -> Tenant:
        if tenant.tenant_id == DEFAULT_TENANT:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"tenant {DEFAULT_TENANT!r} always exists, in the central store; choose another name",
            )
        if not await self._documents.put(
            COLLECTION, tenant.tenant_id, msgspec.json.encode(tenant), version=0
        ):
            raise Refusal(
                RefusalCode.DUPLICATE_DIFFERS,
                f"tenant {tenant.tenant_id!r} exists already; choose another name, or change that tenant",
            )
        self._remember(tenant.tenant_id, tenant)
        return tenant

    async def change(self, tenant_id: TenantId, decide: Callable[[Tenant], Tenant]) -> Tenant:
        """`decide` may raise a refusal."""
        for _ in range(_TRIES):
            document = await self._documents.get(COLLECTION, tenant_id)
            if document is None:
                raise not_found(tenant_id)
            changed = decide(_tenants.decode(document.body))
            body = msgspec.json.encode(changed)
            if await self._documents.put(COLLECTION, tenant_id, body, version=document.version):
                self._remember(tenant_id, changed)
                return changed
        raise Refusal(
            RefusalCode.UNAVAILABLE,
            f"tenant {tenant_id!r} keeps changing at the same time; try again in a moment",
        )

    async def remove(self, tenant_id: TenantId) -> None:
        await self._documents.remove(COLLECTION, tenant_id)
        self._remember(tenant_id, None)

    def _remember(self, tenant_id: TenantId, found: Tenant | None) -> None:
        self._known.pop(tenant_id, None)
        if found is None and self._is_shared:
            return
        # If no other process writes, the cache never expires.
        until = self._clock.monotonic() + REMEMBER_S if self._is_shared else float("inf")
        self._known[tenant_id] = (found, until)


def not_found(tenant_id: TenantId) -> Refusal:
    return Refusal(
        RefusalCode.NOT_FOUND,
        f"there is no tenant {tenant_id!r}; `comfyfleet tenant list` shows all tenants",
    )


class TenantLocation(NamedTuple):
    tenant: Tenant
    database: TenantDatabase


class TenantDirectory:
    def __init__(self, tenants: Tenants, databases: TenantDatabases) -> None:
        self.tenants = tenants
        self.databases = databases

    async def locate(self, tenant_id: TenantId) -> TenantLocation | None:
        """None: the tenant has no database. Raises `Fault` while its database is unreachable."""
        tenant = await self.tenants.get(tenant_id)
        return None if tenant is None else TenantLocation(tenant, await self.databases.database_of(tenant))

    async def locate_uncached(self, tenant_id: TenantId) -> TenantLocation | None:
        """Like `locate`, without the cache: the tenant may just have moved."""
        await self.tenants.get_uncached(tenant_id)
        return await self.locate(tenant_id)

    async def tenants_by_database(self) -> dict[str, list[Tenant]]:
        """Tenants by the name of their database."""
        found: dict[str, list[Tenant]] = {}
        for tenant in await self.tenants.list_all():
            found.setdefault(tenant.database, []).append(tenant)
        return found

    async def open(self) -> None:
        """Opens every database that has tenants, if it is reachable."""
        for name in await self.tenants_by_database():
            with contextlib.suppress(Fault):
                await self.databases.get(name)
