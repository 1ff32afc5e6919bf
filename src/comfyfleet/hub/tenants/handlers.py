"""Handlers of tenants for administrators, and of the reconciliation between the store and tenants' databases.

Policy decides which changes are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.policy import tenants as policy
from comfyfleet.ports import Clock
from comfyfleet.tenancy.claims import waits_for
from comfyfleet.tenancy.database.registry import DEFAULT_DATABASE
from comfyfleet.tenancy.reconciler import Reconciler
from comfyfleet.tenancy.services import TenantServices
from comfyfleet.tenancy.tenants import Tenants, not_found
from comfyfleet.tenancy.terms import FairShareSync
from comfyfleet.wire import bodies
from comfyfleet.wire import tenants as wire
from comfyfleet.wire.tenants import FindingList, finding_view


class TenantHandlers:
    """`wake` starts tenant maintenance at once."""

    def __init__(
        self, tenant_services: TenantServices, shares: FairShareSync, clock: Clock, wake: Callable[[], None]
    ) -> None:
        self._tenant_services = tenant_services
        self._tenants = tenant_services.tenants
        self._shares = shares
        self._databases = tenant_services.databases
        self._clock = clock
        self._wake = wake

    async def list_tenants(self, call: HubRequest[bodies.PageQuery]) -> Reply:
        found = await self._tenants.listing(call.data.cursor or "", call.data.limit)
        cursor = found[-1].tenant_id if len(found) == call.data.limit else None
        return Reply(200, wire.TenantList(tuple(map(wire.view, found)), cursor))

    async def create_tenant(self, call: HubRequest[wire.TenantBody]) -> Reply:
        body = call.data
        name = self._databases.check(wire.database_in(body, DEFAULT_DATABASE))
        tenant = Tenant(TenantId(body.id), name, self._clock.now(), **wire.asked_for(body))
        policy.check_terms(tenant)
        database = await self._databases.get(name)
        if await self._tenants.get_uncached(tenant.tenant_id) is None:
            if await self._tenant_services.has_jobs_of(tenant.tenant_id):
                raise Refusal(
                    RefusalCode.DUPLICATE_DIFFERS,
                    f"tenant {tenant.tenant_id!r} was deleted, and the store still keeps its ended jobs ([retention]), "
                    "which a new tenant would see; choose another name until they are deleted",
                )
            # Before the name is taken: a deleted tenant of this name may have left a frozen account.
            await database.create_account(tenant.tenant_id)
        made = await self._tenants.create(tenant)
        await self._shares.put(made)
        return Reply(201, wire.view(made), created_id=made.tenant_id)

    async def get_tenant(self, call: HubRequest[None]) -> Reply:
        tenant = await known(self._tenants, call.parameters["tenant_id"])
        is_changing = tenant.state in (TenantState.MOVING, TenantState.LEAVING)
        doing = await waits_for(self._tenant_services.documents, tenant.tenant_id) if is_changing else None
        return Reply(200, wire.view(tenant, doing))

    async def change_tenant(self, call: HubRequest[wire.TenantChange]) -> Reply:
        fields = wire.asked_for(call.data)
        reply = await self._changed(call, lambda tenant: policy.changed(tenant, fields))
        # Waiting jobs are reviewed.
        self._wake()
        return reply

    async def suspend_tenant(self, call: HubRequest[None]) -> Reply:
        return await self._changed(call, policy.suspended)

    async def resume_tenant(self, call: HubRequest[None]) -> Reply:
        return await self._changed(call, policy.resumed)

    async def move_tenant(self, call: HubRequest[wire.MoveBody]) -> Reply:
        name, now = self._databases.check(wire.database_in(call.data)), self._clock.now()
        # If no hub knew both databases, the move would never end and no job would be accepted.
        self._databases.check((await known(self._tenants, call.parameters["tenant_id"])).database)
        # An unreachable database would block the tenant during the move.
        await self._databases.get(name)
        return await self._start(call, lambda tenant: policy.start_move(tenant, name, now))

    async def delete_tenant(self, call: HubRequest[wire.DeleteQuery]) -> Reply:
        return await self._start(call, lambda tenant: policy.start_deletion(tenant, call.data.confirm))

    async def _start(self, call: HubRequest[Any], decide: Callable[[Tenant], Tenant]) -> Reply:
        reply = await self._changed(call, decide)
        self._wake()
        return Reply(202, reply.body)

    async def _changed(self, call: HubRequest[Any], decide: Callable[[Tenant], Tenant]) -> Reply:
        tenant = await known(self._tenants, call.parameters["tenant_id"])
        changed = await self._tenants.change(tenant.tenant_id, decide)
        await self._shares.put(changed)
        return Reply(200, wire.view(changed))


async def known(tenants: Tenants, tenant_id: str) -> Tenant:
    """The current tenant, not the cached one."""
    found = await tenants.get_uncached(TenantId(tenant_id))
    if found is None:
        raise not_found(TenantId(tenant_id))
    return found


class ReconcileHandlers:
    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler

    async def look_for_differences(self, call: HubRequest[None]) -> Reply:
        return await self._found(is_dry=True)

    async def reconcile(self, call: HubRequest[None]) -> Reply:
        return await self._found(is_dry=False)

    async def _found(self, *, is_dry: bool) -> Reply:
        views = [
            finding_view(each.kind.value, each.tenant, each.message, each.kind.mends_itself, each.hold_id)
            for each in await self._reconciler.reconcile(is_dry=is_dry)
        ]
        return Reply(200, FindingList(tuple(views), is_mended=not is_dry))
