"""A tenant is deleted with everything of its own: keys, jobs, blocks, files, webhooks, keys of payloads, rows.

Every step may be repeated, and finds what is left to do; only then the tenant itself is forgotten. What the central
store has of its jobs (no payload, no result) goes when jobs of that age go.

What is old in tenants' databases: jobs with payload and result, and the events that were taken in.

A job goes there when the store has none of it any more, so whoever finds it in one place finds it in the other. The
book of credits stays: holds, settlements, postings, and what each round took.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy.rules import DAY_S, Retention
from comfyfleet.ports import Store
from comfyfleet.tenancy import claims
from comfyfleet.tenancy.claims import Claim
from comfyfleet.tenancy.database.port import TenantDatabase
from comfyfleet.tenancy.keys import Keys
from comfyfleet.tenancy.relocation import erase_all
from comfyfleet.tenancy.tenants import REMEMBER_S, TenantDirectory
from comfyfleet.tenancy.webhook_outbox import WebhookOutbox
from comfyfleet.tenancy.webhooks import Webhooks

_DELETION_PAGE = 200
_POLL_S = 0.5
_LOOKS = 120
"""Then others get their turn, and it goes on later."""
_OVER = (RefusalCode.NOT_FOUND, RefusalCode.WRONG_PHASE)


class TenantResources:
    """What has to be asked of others: to end a key's connections, to cancel a job, to erase files, to make payloads
    unreadable for good."""

    def __init__(
        self,
        *,
        cancel: Callable[[JobId], Awaitable[object]],
        revoked: Callable[[str], None] = lambda _: None,
        erase_files: Callable[[TenantId], Awaitable[object]] | None = None,
        shred: Callable[[TenantId], Awaitable[object]] | None = None,
    ) -> None:
        self.cancel = cancel
        self.revoked = revoked
        self.erase_files = erase_files
        self.shred = shred


class TenantDeletion:
    def __init__(
        self,
        central: Store,
        homes: TenantDirectory,
        keys: Keys,
        webhooks: Webhooks,
        deliveries: WebhookOutbox,
        resources: TenantResources,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._central = central
        self._homes = homes
        self._keys = keys
        self._webhooks = webhooks
        self._deliveries = deliveries
        self._its = resources
        self._sleep = sleep

    async def leave(self, tenant: Tenant, claim: Claim) -> None:
        """Until nothing is left but its name. Raises `Fault` where it has to be gone on with later."""
        tenant_id = tenant.tenant_id
        await self._revoke(tenant_id, claim)
        # Until every hub knows that nothing is taken for it any more.
        await self._sleep(REMEMBER_S)
        await self._end_jobs(tenant, claim)
        # Most end by themselves; a refused workflow would be refused to a tenant of the same name, too.
        its_blocks = [block.pair for block in await self._central.blocks() if block.tenant == tenant_id]
        await self._central.lift(its_blocks)
        if self._its.erase_files is not None:
            await self._its.erase_files(tenant_id)
        await self._silence(tenant_id, claim)
        if self._its.shred is not None:
            await self._its.shred(tenant_id)
        for pool in dict.fromkeys((tenant.pool, tenant.moving_to, tenant.moved_from)):
            if pool is not None:
                database = await self._homes.pools.get(pool)
                await claim.keep()
                if not await database.freeze_account(tenant_id, claim.fence):
                    raise claims.lost(tenant_id)
                await erase_all(database, tenant_id, claim)
        # Once more: one may have been made meanwhile.
        await self._revoke(tenant_id, claim)

    async def forget(self, tenant_id: TenantId) -> None:
        """The last step."""
        await self._central.documents.remove(claims.COLLECTION, tenant_id)
        await self._homes.tenants.remove(tenant_id)

    async def _revoke(self, tenant: TenantId, claim: Claim) -> None:
        after = ""
        while page := await self._keys.listing(after, _DELETION_PAGE):
            await claim.keep()
            for key in page:
                if key.tenant == tenant:
                    if key.revoked_at is None:
                        await self._keys.revoke(key.key_id)
                    self._its.revoked(key.key_id)
            after = page[-1].key_id

    async def _end_jobs(self, tenant: Tenant, claim: Claim) -> None:
        """Cancelled, and settled in its database. A worker has its time to stop."""
        for _ in range(_LOOKS):
            await claim.keep()
            if not await self._cancelled(tenant, claim):
                return
            await self._sleep(_POLL_S)
        raise Fault(
            f"jobs of tenant {tenant.tenant_id!r} are still being cancelled; it is gone on with later"
        )

    async def _cancelled(self, tenant: Tenant, claim: Claim) -> bool:
        """Whether there was anything to be cancelled, or is still to be settled."""
        tenant_id, found = tenant.tenant_id, False
        for phase in (Phase.QUEUED, Phase.LEASED):
            after: JobId | None = None
            while page := await self._central.records.listing(
                tenant=tenant_id, phase=phase, limit=_DELETION_PAGE, after=after
            ):
                found = True
                for job in page:
                    await self._cancel(job.job_id)
                after = page[-1].job_id
        database = await self._homes.pools.of(tenant)
        # Open there, and perhaps not in the queue yet: the relay brings it there, and it is found by the next look.
        if await database.listing(tenant=tenant_id, phase=Phase.QUEUED, limit=1, after=None):
            found = True
            if await database.fence_of(tenant_id) is not None:
                # It was on its way to another pool, and its jobs can be refunded in an open book only. Whoever moved
                # it may come once more with an older fence: then the next look finds the book closed again.
                await _reopen(database, tenant_id, claim)
        return found

    async def _cancel(self, job_id: JobId) -> None:
        try:
            await self._its.cancel(job_id)
        except Refusal as refusal:
            if refusal.code not in _OVER:
                raise

    async def _silence(self, tenant: TenantId, claim: Claim) -> None:
        for webhook in await self._webhooks.of(tenant):
            await self._webhooks.remove(webhook)
        await self._webhooks.forget_secret(tenant)
        while await self._deliveries.forget_some_of(tenant, _DELETION_PAGE):
            await claim.keep()


async def _reopen(database: TenantDatabase, tenant: TenantId, claim: Claim) -> None:
    is_ours = await database.freeze_account(tenant, claim.fence)
    if not is_ours or not await database.unfreeze_account(tenant, claim.fence):
        raise claims.lost(tenant)


_LOG = logging.getLogger(__name__)
_RETENTION_PAGE = 500
_PAGES = 20
"""In one look at a database, of each kind."""


class TenantRetention:
    def __init__(self, central: Store, homes: TenantDirectory, retention: Retention) -> None:
        self._central = central
        self._homes = homes
        self._retention = retention

    async def tidy(self) -> None:
        now = await self._central.now()
        for pool in await self._homes.everyone():
            try:
                database = await self._homes.pools.get(pool)
                await self._events(database, now)
                await self._jobs(database, now)
            except Fault as fault:
                # One database that is away must not keep the others full.
                _LOG.warning("what is old in the pool %s is forgotten later: %s", pool, fault)

    async def _events(self, database: TenantDatabase, now: float) -> None:
        before = now - self._retention.events_days * DAY_S
        for _ in range(_PAGES):
            if await database.forget_events(before, _RETENTION_PAGE) < _RETENTION_PAGE:
                return

    async def _jobs(self, database: TenantDatabase, now: float) -> None:
        kept = self._retention
        for phase, days in (
            (Phase.COMPLETED, kept.completed_days),
            (Phase.CANCELLED, kept.cancelled_days),
            (Phase.FAILED, kept.failed_days),
        ):
            before = now - days * DAY_S
            for _ in range(_PAGES):
                old = await database.ended_jobs(phase, before, _RETENTION_PAGE)
                known = await self._central.load_many(old)
                gone = [job_id for job_id, dispatch in zip(old, known, strict=True) if dispatch is None]
                if not gone or not await database.forget_jobs(gone, before) or len(old) < _RETENTION_PAGE:
                    break
