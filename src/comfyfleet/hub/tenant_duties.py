"""Sees to tenants that are on their way, to another pool or for good, and to jobs of those whose terms have changed.
What one hub leaves undone another takes up, and the store knows the terms of all of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from comfyfleet.hub.audit import Audit
from comfyfleet.model.access import AuditEntry
from comfyfleet.model.errors import ComfyFleetError
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.ports import Cabinet, Clock
from comfyfleet.tenancy.claims import Claim, claim
from comfyfleet.tenancy.judging import TermsJudge
from comfyfleet.tenancy.leaving import Leaver
from comfyfleet.tenancy.moving import Mover
from comfyfleet.tenancy.shares import ShareKeeper
from comfyfleet.tenancy.tenants import Tenants
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

_LOOK_S = 10.0
AT_ONCE = 8
"""So many tenants are seen to at the same time; the others have their turn when one is done."""


class TenantDuties:
    """`start` and `close` are its life; both may be called twice."""

    def __init__(
        self,
        cabinet: Cabinet,
        clock: Clock,
        tenants: Tenants,
        mover: Mover,
        leaver: Leaver,
        judge: TermsJudge,
        shares: ShareKeeper,
        audit: Audit,
        look_s: float = _LOOK_S,
    ) -> None:
        self._cabinet = cabinet
        self._clock = clock
        self._tenants = tenants
        self._mover = mover
        self._leaver = leaver
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
            mine = await claim(self._cabinet, self._clock, tenant_id)
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
                tenant = await self._mover.move(tenant, mine)
                await self._shares.keep(tenant)
                _LOG.info("tenant %s lies in the pool %s now", tenant_id, tenant.pool)
            elif tenant.moved_from is not None:
                tenant = await self._mover.tidy(tenant, mine)
            else:
                tenant = await self._judge.judge(tenant, mine)
        return tenant is None

    async def _delete(self, tenant: Tenant, mine: Claim) -> None:
        tenant_id = tenant.tenant_id
        # It may take long, and many attempts while its pool is away: the log tells of its end.
        await self._leaver.leave(tenant, mine)
        entry = AuditEntry(0.0, "hub", None, "tenant_deleted", tenant_id, tenant_id)
        await self._audit.operation(entry, lambda: self._leaver.forget(tenant_id), lambda _: None)
        await self._shares.forget(tenant_id)


def is_due(tenant: Tenant) -> bool:
    is_on_its_way = tenant.state in (TenantState.MOVING, TenantState.LEAVING) or tenant.moved_from is not None
    return is_on_its_way or tenant.judged_number < tenant.terms_number
