"""Builds a hub's tenant services around its store: directory, ledger store, relay, reconciler, retention.

The relay and the reconciler start with the engine and stop before it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from comfyfleet.model.ids import TenantId
from comfyfleet.policy.rules import Retention
from comfyfleet.ports import Clock, DocumentStore, RecordQuery, Store
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.deletion import TenantRetention
from comfyfleet.tenancy.ledger_store import TenantLedgerStore
from comfyfleet.tenancy.outbox_relay import Admit, OutboxRelay
from comfyfleet.tenancy.reconciler import Reconciler
from comfyfleet.tenancy.tenants import TenantDirectory, Tenants

_NEWEST = 100


class TenantServices:
    """`urls` maps database names to URLs; `around` wraps each database, for encryption."""

    def __init__(
        self,
        central: Store,
        clock: Clock,
        urls: Mapping[str, str],
        open_database: Callable[[str], TenantDatabase] = open_tenant_database,
        *,
        around: Callable[[TenantDatabase], TenantDatabase] | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._central = central
        self.tenants = Tenants(central.documents, clock, is_shared=central.is_shared)
        self.databases = TenantDatabases(urls, clock, open_database, around)
        self.directory = TenantDirectory(self.tenants, self.databases)
        self.ledger_store = TenantLedgerStore(central, self.directory)
        self.reconciler = Reconciler(self.ledger_store, clock)
        self.retention = TenantRetention(central, self.directory, retention or Retention())

    @property
    def documents(self) -> DocumentStore:
        """The central document store."""
        return self._central.documents

    @property
    def store(self) -> Store:
        """The store for the engine."""
        return self.ledger_store.as_store()

    async def documents_of(self, tenant: TenantId) -> DocumentStore:
        home = await self.directory.locate(tenant)
        return self._central.documents if home is None else home.database.documents(tenant)

    async def has_jobs_of(self, tenant: TenantId) -> bool:
        """Whether the central store still has jobs of a deleted tenant with this name."""
        stubs = await self._central.records.listing(
            RecordQuery(tenant=tenant, limit=_NEWEST, newest_first=True)
        )
        there = await self._central.load_many([each.job_id for each in stubs])
        return any(each is not None and each.has_tenant_database for each in there)

    @asynccontextmanager
    async def background_tasks(self, admit: Admit) -> AsyncIterator[None]:
        relay = OutboxRelay(self.ledger_store, admit)
        relay.start()
        self.reconciler.start()
        try:
            yield
        finally:
            await self.reconciler.close()
            await relay.close()

    async def close(self) -> None:
        await self.databases.close()
