"""Deletes tenants with everything they own, and old jobs and events in tenant databases.

Every deletion step may be repeated; the tenant's own document goes last. The central store keeps the job
stubs (no payload, no result) until their retention ends. Retention never deletes ledger entries.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.paginator import record_pages
from comfyfleet.policy.rules import DAY_S, Retention
from comfyfleet.ports import RecordQuery, Store
from comfyfleet.tenancy import claims
from comfyfleet.tenancy.claims import Claim
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.keys import Keys
from comfyfleet.tenancy.relocation import erase_all
from comfyfleet.tenancy.tenants import REMEMBER_S, TenantDirectory
from comfyfleet.tenancy.webhook_outbox import WebhookOutbox
from comfyfleet.tenancy.webhooks import Webhooks

_LOG = logging.getLogger(__name__)
_DELETION_PAGE = 200
_POLL_S = 0.5
_MAX_POLLS = 120
"""After that, other tenants get their turn."""
_RETENTION_PAGE = 500
_MAX_PAGES = 20
"""For each database and kind in one run."""
_ALREADY_ENDED = (RefusalCode.NOT_FOUND, RefusalCode.WRONG_PHASE)


@dataclass(frozen=True, kw_only=True)
class TenantResources:
    """Functions that cancel jobs, end connections, erase files and destroy payload keys."""

    cancel: Callable[[JobId], Awaitable[object]]
    revoked: Callable[[str], None] = lambda _: None
    erase_files: Callable[[TenantId], Awaitable[object]] | None = None
    crypto_shred: Callable[[TenantId], Awaitable[object]] | None = None


class TenantDeletion:
    def __init__(
        self,
        central: Store,
        directory: TenantDirectory,
        keys: Keys,
        webhooks: Webhooks,
        deliveries: WebhookOutbox,
        resources: TenantResources,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._central = central
        self._directory = directory
        self._keys = keys
        self._webhooks = webhooks
        self._deliveries = deliveries
        self._resources = resources
        self._sleep = sleep

    async def delete(self, tenant: Tenant, claim: Claim) -> None:
        """Deletes everything but the tenant's document. Raises `Fault` if it has to continue later."""
        tenant_id = tenant.tenant_id
        await self._revoke(tenant_id, claim)
        # Wait until every hub knows that the tenant submits no more jobs.
        await self._sleep(REMEMBER_S)
        await self._end_jobs(tenant, claim)
        # A poison workflow would stay blocked for a new tenant of the same name.
        blocks = [block.pair for block in await self._central.blocks() if block.tenant == tenant_id]
        await self._central.lift(blocks)
        if self._resources.erase_files is not None:
            await self._resources.erase_files(tenant_id)
        await self._remove_webhooks(tenant_id, claim)
        if self._resources.crypto_shred is not None:
            await self._resources.crypto_shred(tenant_id)
        for name in dict.fromkeys((tenant.database, tenant.moving_to, tenant.moved_from)):
            if name is not None:
                database = await self._directory.databases.get(name)
                await claim.renew_if_due()
                if not await database.freeze_account(tenant_id, claim.fence):
                    raise claims.lost(tenant_id)
                await erase_all(database, tenant_id, claim)
        # Again: a key may have been created in the meantime.
        await self._revoke(tenant_id, claim)

    async def forget(self, tenant_id: TenantId) -> None:
        await self._central.documents.remove(claims.COLLECTION, tenant_id)
        await self._directory.tenants.remove(tenant_id)

    async def _revoke(self, tenant: TenantId, claim: Claim) -> None:
        after = ""
        while page := await self._keys.listing(after, _DELETION_PAGE):
            await claim.renew_if_due()
            for key in page:
                if key.tenant == tenant:
                    if key.revoked_at is None:
                        await self._keys.revoke(key.key_id)
                    self._resources.revoked(key.key_id)
            after = page[-1].key_id

    async def _end_jobs(self, tenant: Tenant, claim: Claim) -> None:
        """Cancels the jobs and waits until they are settled in the tenant database."""
        for _ in range(_MAX_POLLS):
            await claim.renew_if_due()
            if not await self._cancel_all(tenant, claim):
                return
            await self._sleep(_POLL_S)
        raise Fault(
            f"jobs of tenant {tenant.tenant_id!r} are still being cancelled; the hub deletes the tenant later"
        )

    async def _cancel_all(self, tenant: Tenant, claim: Claim) -> bool:
        """False: no job is open and all are settled."""
        tenant_id, found = tenant.tenant_id, False
        for phase in (Phase.QUEUED, Phase.LEASED):
            async for page in record_pages(self._central.records, tenant_id, phase, _DELETION_PAGE):
                found = True
                for job in page:
                    await self._cancel(job.job_id)
        database = await self._directory.databases.database_of(tenant)
        # The job may not be in the queue yet. The relay brings it there, and the next poll cancels it.
        if await database.listing(RecordQuery(tenant=tenant_id, phase=Phase.QUEUED, limit=1)):
            found = True
            if await database.fence_of(tenant_id) is not None:
                # A relocation has frozen the account, but refunds need an active one. If the relocation
                # freezes it again with an older fence, the next poll comes back here.
                await _reopen(database, tenant_id, claim)
        return found

    async def _cancel(self, job_id: JobId) -> None:
        try:
            await self._resources.cancel(job_id)
        except Refusal as refusal:
            if refusal.code not in _ALREADY_ENDED:
                raise

    async def _remove_webhooks(self, tenant: TenantId, claim: Claim) -> None:
        for webhook in await self._webhooks.list_of_owner(tenant):
            await self._webhooks.remove(webhook)
        await self._webhooks.forget_secret(tenant)
        while await self._deliveries.forget_some_of(tenant, _DELETION_PAGE):
            await claim.renew_if_due()


async def _reopen(database: TenantDatabase, tenant: TenantId, claim: Claim) -> None:
    is_ours = await database.freeze_account(tenant, claim.fence)
    if not is_ours or not await database.unfreeze_account(tenant, claim.fence):
        raise claims.lost(tenant)


class TenantRetention:
    def __init__(self, central: Store, directory: TenantDirectory, retention: Retention) -> None:
        self._central = central
        self._directory = directory
        self._retention = retention

    async def clean_up(self) -> None:
        now = await self._central.now()
        for name in await self._directory.tenants_by_database():
            try:
                database = await self._directory.databases.get(name)
                await self._delete_events(database, now)
                await self._delete_jobs(database, now)
            except Fault as fault:
                # Go on with the other databases.
                _LOG.warning("cannot delete old jobs and events in database %s, will retry: %s", name, fault)

    async def _delete_events(self, database: TenantDatabase, now: float) -> None:
        before = now - self._retention.events_days * DAY_S
        for _ in range(_MAX_PAGES):
            if await database.forget_events(before, _RETENTION_PAGE) < _RETENTION_PAGE:
                return

    async def _delete_jobs(self, database: TenantDatabase, now: float) -> None:
        kept = self._retention
        for phase, days in (
            (Phase.COMPLETED, kept.completed_days),
            (Phase.CANCELLED, kept.cancelled_days),
            (Phase.FAILED, kept.failed_days),
        ):
            before = now - days * DAY_S
            for _ in range(_MAX_PAGES):
                # A job goes here only after it has gone from the central store.
                old = await database.ended_jobs(phase, before, _RETENTION_PAGE)
                known = await self._central.load_many(old)
                gone = [job_id for job_id, dispatch in zip(old, known, strict=True) if dispatch is None]
                if not gone or not await database.forget_jobs(gone, before) or len(old) < _RETENTION_PAGE:
                    break
