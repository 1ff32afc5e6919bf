"""Background jobs for tenants: relocation, deletion, review of waiting jobs after a change of terms,
suspension of a tenant with poison workflows, and the time-out of jobs that no worker can run.

If a hub stops in the middle, another one continues. Policy decides when to suspend. The store records since
when no worker can run a class of jobs, so the time survives a restart; one hub at a time checks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.audit.log import AuditLog
from comfyfleet.model.access import AuditEntry
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import ComfyFleetError, Fault
from comfyfleet.model.ids import ClassKey, TenantId
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.paginator import documents_in, record_pages
from comfyfleet.policy.tenants import suspended
from comfyfleet.policy.timers import unrunnable_after
from comfyfleet.ports import Clock, DocumentStore
from comfyfleet.tenancy.claims import Claim, claim
from comfyfleet.tenancy.deletion import TenantDeletion
from comfyfleet.tenancy.relocation import TenantRelocation
from comfyfleet.tenancy.tenants import Tenants
from comfyfleet.tenancy.terms import FairShareSync, TermsReview
from comfyfleet.tracing import BackgroundJob, in_background, log_failure

_LOG = logging.getLogger(__name__)

_POLL_S = 10.0
AT_ONCE = 8
"""Tenants processed at the same time."""


class TenantMaintenance(BackgroundJob):
    def __init__(
        self,
        documents: DocumentStore,
        clock: Clock,
        tenants: Tenants,
        relocation: TenantRelocation,
        deletion: TenantDeletion,
        judge: TermsReview,
        shares: FairShareSync,
        audit: AuditLog,
        look_s: float = _POLL_S,
    ) -> None:
        super().__init__("tenant maintenance")
        self._documents = documents
        self._clock = clock
        self._tenants = tenants
        self._relocation = relocation
        self._deletion = deletion
        self._terms_review = judge
        self._shares = shares
        self._audit = audit
        self._look_s = look_s
        self._woken = asyncio.Event()
        self._under_way: dict[TenantId, asyncio.Task[None]] = {}
        self._last = TenantId("")
        """The tenant that was started last. The next one in order follows, so that all get their turn."""

    async def close(self) -> None:
        """Another hub, or the next start, continues unfinished work."""
        await super().close()
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        self._woken.set()

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            try:
                everybody = await self._tenants.list_all()
                await self._shares.compare(everybody)
                due = [each.tenant_id for each in everybody if is_due(each)]
                for tenant_id in sorted(due, key=lambda each: (each <= self._last, each)):
                    if tenant_id not in self._under_way and len(self._under_way) < AT_ONCE:
                        self._begin(tenant_id)
            except Exception:
                log_failure(_LOG, "cannot check tenants; will try again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._woken.wait()

    def _begin(self, tenant_id: TenantId) -> None:
        task = in_background(self._process(tenant_id), name=f"tenant {tenant_id}")
        self._under_way[tenant_id], self._last = task, tenant_id
        task.add_done_callback(lambda _: self._done(tenant_id))

    def _done(self, tenant_id: TenantId) -> None:
        if len(self._under_way) >= AT_ONCE:
            # Another tenant may be waiting for this slot.
            self.wake()
        self._under_way.pop(tenant_id, None)

    async def _process(self, tenant_id: TenantId) -> None:
        try:
            mine = await claim(self._documents, self._clock, tenant_id)
            if mine is None:
                return
            try:
                is_gone = await self._do(tenant_id, mine)
            except BaseException as error:
                # So that any hub can retry at once.
                why = f"another try, after: {error}" if isinstance(error, ComfyFleetError) else ""
                with contextlib.suppress(ComfyFleetError):
                    await mine.release(why)
                raise
            if not is_gone:
                await mine.release()
        except Exception:
            log_failure(_LOG, "maintenance of tenant %s failed; will try again", tenant_id)

    async def _do(self, tenant_id: TenantId, mine: Claim) -> bool:
        """True if the tenant is deleted."""
        tenant = await self._tenants.get_uncached(tenant_id)
        while tenant is not None and is_due(tenant):
            if tenant.state is TenantState.LEAVING:
                await self._delete(tenant, mine)
                return True
            if tenant.state is TenantState.MOVING:
                tenant = await self._relocation.move(tenant, mine)
                await self._shares.put(tenant)
                _LOG.info("tenant %s has moved to the database %s", tenant_id, tenant.database)
            elif tenant.moved_from is not None:
                tenant = await self._relocation.clean_up(tenant, mine)
            else:
                tenant = await self._terms_review.review(tenant, mine)
        return tenant is None

    async def _delete(self, tenant: Tenant, mine: Claim) -> None:
        tenant_id = tenant.tenant_id
        # This may take many attempts while the tenant's database is away; the audit log records its end.
        await self._deletion.delete(tenant, mine)
        entry = AuditEntry(0.0, "hub", None, "tenant_deleted", tenant_id, tenant_id)
        await self._audit.operation(entry, lambda: self._deletion.forget(tenant_id), lambda _: None)
        await self._shares.remove(tenant_id)


def is_due(tenant: Tenant) -> bool:
    is_changing = tenant.state in (TenantState.MOVING, TenantState.LEAVING) or tenant.moved_from is not None
    return is_changing or tenant.judged_number < tenant.terms_number


class TenantSuspension:
    def __init__(self, tenants: Tenants, shares: FairShareSync, audit: AuditLog) -> None:
        self._tenants = tenants
        self._shares = shares
        self._audit = audit

    async def suspend(self, tenant_id: TenantId) -> bool:
        """False if the tenant was not set up or is not active."""
        tenant = await self._tenants.get_uncached(tenant_id)
        if tenant is None or tenant.state is not TenantState.ACTIVE:
            return False
        changed = await self._audit.operation(
            AuditEntry(0.0, "hub", None, "tenant_suspended", tenant_id, tenant_id),
            lambda: self._tenants.change(tenant_id, suspended),
            lambda _: None,
        )
        await self._shares.put(changed)
        return True


COLLECTION = "unrunnable"
CLAIM = TenantId("-unrunnable")
"""No tenant can have this name."""
LOOK_S = 30.0
_PAGE = 200


class _Noted(msgspec.Struct, frozen=True):
    since: float


class UnrunnableJobTimeout(BackgroundJob):
    def __init__(self, engine: Engine, tenants: Tenants, documents: DocumentStore, clock: Clock) -> None:
        super().__init__("unrunnable jobs")
        self._engine = engine
        self._tenants = tenants
        self._documents = documents
        self._clock = clock

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.run_once()
            except Exception:
                log_failure(_LOG, "cannot check for jobs that no worker can run; will try again")

    async def run_once(self) -> int:
        """The number of jobs that it failed."""
        mine = await claim(self._documents, self._clock, CLAIM)
        if mine is None:
            return 0
        try:
            return await self._look(mine)
        finally:
            with contextlib.suppress(ComfyFleetError):
                await mine.release()

    async def _look(self, mine: Claim) -> int:
        classes, failed = await self._engine.waiting_job_review.unrunnable_classes(), 0
        now = self._engine.now()
        noted = await self._noted()
        for key in noted.keys() - classes.keys():
            await self._documents.remove(COLLECTION, key)
        for key in classes.keys() - noted.keys():
            await self._documents.put(COLLECTION, key, msgspec.json.encode(_Noted(now)), version=0)
        of_tenants: dict[TenantId, dict[ClassKey, float]] = {}
        for key, cls in classes.items():
            if key in noted:
                of_tenants.setdefault(cls.tenant, {})[key] = noted[key]
        for tenant_id, since in of_tenants.items():
            after_s = unrunnable_after(await self._tenants.get_uncached(tenant_id), self._engine.rules)
            due = {key: at for key, at in since.items() if at + after_s <= now}
            try:
                failed += await self._fail(tenant_id, due, after_s, mine) if due else 0
            except Fault as fault:
                _LOG.info("cannot fail unrunnable jobs of tenant %s; will try again: %s", tenant_id, fault)
        return failed

    async def _noted(self) -> dict[ClassKey, float]:
        return {
            ClassKey(each.name): msgspec.json.decode(each.body, type=_Noted).since
            async for each in documents_in(self._documents, COLLECTION, size=_PAGE)
        }

    async def _fail(
        self, tenant_id: TenantId, due: dict[ClassKey, float], after_s: float, mine: Claim
    ) -> int:
        reader, failed = self._engine.reader, 0
        async for page in record_pages(reader.records, tenant_id, Phase.QUEUED, _PAGE):
            for dispatch in await reader.load_many([each.job_id for each in page]):
                if dispatch is not None and dispatch.class_key in due:
                    await mine.renew_if_due()
                    failed += await self._engine.waiting_job_review.fail_unrunnable(
                        dispatch, due[dispatch.class_key], after_s
                    )
        return failed
