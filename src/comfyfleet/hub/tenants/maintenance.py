"""Sees to tenants that are on their way, to another pool or for good, and to jobs of those whose terms have changed.
What one hub leaves undone another takes up, and the store knows the terms of all of them.

Suspends a tenant for the hub itself: servers die of what it submits. An operator resumes it like any other.

When that is so is policy's (`policy/poison_workflows.py`); the change is the one an operator makes, and
stands in the audit log under the hub's name.

Jobs that no worker can run fail after a while, and what is held for them is given back.

Since when nobody can run a class of jobs is noted in the store, so that it outlives hubs. One hub at a time looks.
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
from comfyfleet.model.ids import ClassKey, JobId, TenantId
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.policy.tenants import suspended
from comfyfleet.policy.timers import unrunnable_after
from comfyfleet.ports import Clock, DocumentStore
from comfyfleet.tenancy.claims import Claim, claim
from comfyfleet.tenancy.deletion import TenantDeletion
from comfyfleet.tenancy.relocation import TenantRelocation
from comfyfleet.tenancy.tenants import Tenants
from comfyfleet.tenancy.terms import FairShareSync, TermsReview
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

_POLL_S = 10.0
AT_ONCE = 8
"""So many tenants are seen to at the same time; the others have their turn when one is done."""


class TenantMaintenance:
    """`start` and `close` are its life; both may be called twice."""

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
        self._documents = documents
        self._clock = clock
        self._tenants = tenants
        self._relocation = relocation
        self._deletion = deletion
        self._judge = judge
        self._shares = shares
        self._audit = audit
        self._look_s = look_s
        self._woken = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._under_way: dict[TenantId, asyncio.Task[None]] = {}
        self._last = TenantId("")
        """The one that was begun last: those behind it are next, so that nobody is in front of the others for ever."""

    def start(self) -> None:
        if self._running is None:
            self._running = in_background(self._run(), name="tenant duties")

    async def close(self) -> None:
        """What is under way is gone on with after the next start, or by another hub."""
        running, self._running = self._running, None
        tasks = [*self._under_way.values(), *([] if running is None else [running])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def wake(self) -> None:
        self._woken.set()

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            try:
                everybody = await self._tenants.everybody()
                await self._shares.compare(everybody)
                due = [each.tenant_id for each in everybody if is_due(each)]
                for tenant_id in sorted(due, key=lambda each: (each <= self._last, each)):
                    if tenant_id not in self._under_way and len(self._under_way) < AT_ONCE:
                        self._begin(tenant_id)
            except ComfyFleetError as error:
                _LOG.warning("tenants are looked at later: %s", error)
            except Exception:
                log_failure(_LOG, "tenants could not be looked at; the next look tries again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._woken.wait()

    def _begin(self, tenant_id: TenantId) -> None:
        task = in_background(self._see_to(tenant_id), name=f"tenant {tenant_id}")
        self._under_way[tenant_id], self._last = task, tenant_id
        task.add_done_callback(lambda _: self._done(tenant_id))

    def _done(self, tenant_id: TenantId) -> None:
        if len(self._under_way) >= AT_ONCE:
            # Somebody may have been waiting for this one's place.
            self.wake()
        self._under_way.pop(tenant_id, None)

    async def _see_to(self, tenant_id: TenantId) -> None:
        try:
            mine = await claim(self._documents, self._clock, tenant_id)
            if mine is None:
                return
            try:
                is_gone = await self._do(tenant_id, mine)
            except BaseException as error:
                # Taken up again at once, by whoever looks first.
                why = f"another try, after: {error}" if isinstance(error, ComfyFleetError) else ""
                with contextlib.suppress(ComfyFleetError):
                    await mine.give_back(why)
                raise
            if not is_gone:
                await mine.give_back()
        except ComfyFleetError as error:
            _LOG.warning("tenant %s is seen to later: %s", tenant_id, error)
        except Exception:
            log_failure(_LOG, "tenant %s could not be seen to; it is tried again", tenant_id)

    async def _do(self, tenant_id: TenantId, mine: Claim) -> bool:
        """Whether nothing of it is left."""
        tenant = await self._tenants.newest(tenant_id)
        while tenant is not None and is_due(tenant):
            if tenant.state is TenantState.LEAVING:
                await self._delete(tenant, mine)
                return True
            if tenant.state is TenantState.MOVING:
                tenant = await self._relocation.move(tenant, mine)
                await self._shares.keep(tenant)
                _LOG.info("tenant %s lies in the pool %s now", tenant_id, tenant.pool)
            elif tenant.moved_from is not None:
                tenant = await self._relocation.tidy(tenant, mine)
            else:
                tenant = await self._judge.judge(tenant, mine)
        return tenant is None

    async def _delete(self, tenant: Tenant, mine: Claim) -> None:
        tenant_id = tenant.tenant_id
        # It may take long, and many attempts while its pool is away: the log tells of its end.
        await self._deletion.leave(tenant, mine)
        entry = AuditEntry(0.0, "hub", None, "tenant_deleted", tenant_id, tenant_id)
        await self._audit.operation(entry, lambda: self._deletion.forget(tenant_id), lambda _: None)
        await self._shares.forget(tenant_id)


def is_due(tenant: Tenant) -> bool:
    is_on_its_way = tenant.state in (TenantState.MOVING, TenantState.LEAVING) or tenant.moved_from is not None
    return is_on_its_way or tenant.judged_number < tenant.terms_number


class TenantSuspension:
    def __init__(self, tenants: Tenants, shares: FairShareSync, audit: AuditLog) -> None:
        self._tenants = tenants
        self._shares = shares
        self._audit = audit

    async def suspend(self, tenant_id: TenantId) -> bool:
        """False: nobody set it up, or it does not work now anyway."""
        tenant = await self._tenants.newest(tenant_id)
        if tenant is None or tenant.state is not TenantState.ACTIVE:
            return False
        changed = await self._audit.operation(
            AuditEntry(0.0, "hub", None, "tenant_suspended", tenant_id, tenant_id),
            lambda: self._tenants.change(tenant_id, suspended),
            lambda _: None,
        )
        await self._shares.keep(changed)
        return True


COLLECTION = "unrunnable"
CLAIM = TenantId("-unrunnable")
"""No tenant has a name like this."""
LOOK_S = 30.0
_PAGE = 200


class _Noted(msgspec.Struct, frozen=True):
    since: float


class UnrunnableJobTimeout:
    """`start` and `close` are its life; both may be called twice."""

    def __init__(
        self, engine: Engine, tenants: Tenants, documents: DocumentStore, clock: Clock, look_s: float = LOOK_S
    ) -> None:
        self._engine = engine
        self._tenants = tenants
        self._documents = documents
        self._clock = clock
        self._look_s = look_s
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._running is None:
            self._running = in_background(self._run(), name="unrunnable jobs")

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            try:
                await self.look()
            except ComfyFleetError as error:
                _LOG.warning("jobs that nobody can run are looked for later: %s", error)
            except Exception:
                log_failure(
                    _LOG, "jobs that nobody can run could not be looked for; the next look tries again"
                )

    async def look(self) -> int:
        """How many have failed."""
        mine = await claim(self._documents, self._clock, CLAIM)
        if mine is None:
            return 0
        try:
            return await self._look(mine)
        finally:
            with contextlib.suppress(ComfyFleetError):
                await mine.give_back()

    async def _look(self, mine: Claim) -> int:
        classes, now, failed = (
            await self._engine.judge.unrunnable_classes(),
            await self._engine.store.now(),
            0,
        )
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
            after_s = unrunnable_after(await self._tenants.newest(tenant_id), self._engine.rules)
            due = {key: at for key, at in since.items() if at + after_s <= now}
            try:
                failed += await self._fail(tenant_id, due, after_s, mine) if due else 0
            except Fault as fault:
                _LOG.info("jobs of tenant %s that nobody can run fail later: %s", tenant_id, fault)
        return failed

    async def _noted(self) -> dict[ClassKey, float]:
        noted: dict[ClassKey, float] = {}
        after = ""
        while page := await self._documents.listing(COLLECTION, after, _PAGE):
            noted |= {ClassKey(each.name): msgspec.json.decode(each.body, type=_Noted).since for each in page}
            after = page[-1].name
        return noted

    async def _fail(
        self, tenant_id: TenantId, due: dict[ClassKey, float], after_s: float, mine: Claim
    ) -> int:
        store, failed = self._engine.store, 0
        after: JobId | None = None
        while True:
            page = await store.records.listing(tenant=tenant_id, phase=Phase.QUEUED, limit=_PAGE, after=after)
            for dispatch in await store.load_many([each.job_id for each in page]):
                if dispatch is not None and dispatch.class_key in due:
                    await mine.keep()
                    failed += await self._engine.judge.fail_unrunnable(
                        dispatch, due[dispatch.class_key], after_s
                    )
            if len(page) < _PAGE:
                return failed
            after = page[-1].job_id
