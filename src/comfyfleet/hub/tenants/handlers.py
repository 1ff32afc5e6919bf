"""Handlers of tenants for administrators, and of the reconciliation between the store and tenants' databases.

Policy decides which changes are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfyfleet.hub.http.pipeline import Handler, HubRequest, Reply
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.policy import tenants as policy
from comfyfleet.ports import Clock
from comfyfleet.tenancy.claims import waits_for
from comfyfleet.tenancy.reconciler import Reconciler
from comfyfleet.tenancy.services import TenantServices
from comfyfleet.tenancy.tenants import Tenants, not_found
from comfyfleet.tenancy.terms import FairShareSync
from comfyfleet.wire import bodies
from comfyfleet.wire import tenants as wire
from comfyfleet.wire.tenants import finding_list, finding_view


class TenantHandlers:
    """`wake` starts tenant maintenance at once."""

    def __init__(
        self, tenant_services: TenantServices, shares: FairShareSync, clock: Clock, wake: Callable[[], None]
    ) -> None:
        self._tenant_services = tenant_services
        self._tenants = tenant_services.tenants
        self._shares = shares
        self._pools = tenant_services.pools
        self._clock = clock
        self._wake = wake

    def bound(self) -> dict[str, Handler]:
        return {
            "list_tenants": self.list_tenants,
            "create_tenant": self.create,
            "get_tenant": self.get,
            "change_tenant": self.change,
            "suspend_tenant": self.suspend,
            "resume_tenant": self.resume,
            "move_tenant": self.move,
            "delete_tenant": self.delete,
        }

    async def list_tenants(self, call: HubRequest[bodies.PageQuery]) -> Reply:
        found = await self._tenants.listing(call.given.cursor or "", call.given.limit)
        cursor = found[-1].tenant_id if len(found) == call.given.limit else None
        return Reply(200, wire.TenantList(tuple(map(wire.view, found)), cursor))

    async def create(self, call: HubRequest[wire.TenantBody]) -> Reply:
        body, pool = call.given, self._pools.check(call.given.pool)
        tenant = Tenant(TenantId(body.id), pool, self._clock.now(), **wire.asked_for(body))
        policy.check_terms(tenant)
        database = await self._pools.get(pool)
        if await self._tenants.newest(tenant.tenant_id) is None:
            if await self._tenant_services.remembers(tenant.tenant_id):
                raise Refusal(
                    RefusalCode.DUPLICATE_DIFFERS,
                    f"tenant {tenant.tenant_id!r} was deleted, and the store still keeps its ended jobs ([retention]), "
                    "which a new tenant would see; choose another name until they are deleted",
                )
            # Before the name is taken: a deleted tenant of this name may have left a frozen account.
            await database.create_account(tenant.tenant_id)
        made = await self._tenants.create(tenant)
        await self._shares.keep(made)
        return Reply(201, wire.view(made), made=made.tenant_id)

    async def get(self, call: HubRequest[None]) -> Reply:
        tenant = await known(self._tenants, call.parameters["tenant_id"])
        is_changing = tenant.state in (TenantState.MOVING, TenantState.LEAVING)
        doing = await waits_for(self._tenant_services.documents, tenant.tenant_id) if is_changing else None
        return Reply(200, wire.view(tenant, doing))

    async def change(self, call: HubRequest[wire.TenantChange]) -> Reply:
        fields = wire.asked_for(call.given)
        reply = await self._changed(call, lambda tenant: policy.changed(tenant, fields))
        # Waiting jobs are reviewed.
        self._wake()
        return reply

    async def suspend(self, call: HubRequest[None]) -> Reply:
        return await self._changed(call, policy.suspended)

    async def resume(self, call: HubRequest[None]) -> Reply:
        return await self._changed(call, policy.resumed)

    async def move(self, call: HubRequest[wire.MoveBody]) -> Reply:
        pool, now = self._pools.check(call.given.pool), self._clock.now()
        # If no hub knew both databases, the move would never end and no job would be accepted.
        self._pools.check((await known(self._tenants, call.parameters["tenant_id"])).pool)
        # An unreachable database would block the tenant during the move.
        await self._pools.get(pool)
        return await self._start(call, lambda tenant: policy.moving(tenant, pool, now))

    async def delete(self, call: HubRequest[wire.DeleteQuery]) -> Reply:
        return await self._start(call, lambda tenant: policy.leaving(tenant, call.given.confirm))

    async def _start(self, call: HubRequest[Any], decide: Callable[[Tenant], Tenant]) -> Reply:
        reply = await self._changed(call, decide)
        self._wake()
        return Reply(202, reply.body)

    async def _changed(self, call: HubRequest[Any], decide: Callable[[Tenant], Tenant]) -> Reply:
        tenant = await known(self._tenants, call.parameters["tenant_id"])
        changed = await self._tenants.change(tenant.tenant_id, decide)
        await self._shares.keep(changed)
        return Reply(200, wire.view(changed))


async def known(tenants: Tenants, tenant_id: str) -> Tenant:
    """The current tenant, not the cached one."""
    found = await tenants.newest(TenantId(tenant_id))
    if found is None:
        raise not_found(TenantId(tenant_id))
    return found


class ReconcileHandlers:
    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler

    def bound(self) -> dict[str, Handler]:
        return {"look_for_differences": self.look, "reconcile": self.reconcile}

    async def look(self, call: HubRequest[None]) -> Reply:
        return await self._found(is_dry=True)

    async def reconcile(self, call: HubRequest[None]) -> Reply:
        return await self._found(is_dry=False)

    async def _found(self, *, is_dry: bool) -> Reply:
        views = (
            finding_view(each.kind.value, each.tenant, each.message, each.kind.mends_itself, each.hold_id)
            for each in await self._reconciler.reconcile(is_dry=is_dry)
        )
        return Reply(200, finding_list(views, is_mended=not is_dry))
