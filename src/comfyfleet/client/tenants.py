"""The part of `FleetClient` that is about tenants and their credits."""

from __future__ import annotations

import uuid
from typing import Any, TypeVar

import msgspec

from comfyfleet.client.link import Link
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.wire import credits as money
from comfyfleet.wire import tenants as wire
from comfyfleet.wire.reconciling import FindingList

B = TypeVar("B", bound=msgspec.Struct)


class TenantCalls:
    _link: Link

    async def differences(self) -> FindingList:
        """Where the store and tenants' databases differ just now; nothing is changed."""
        return await self._link.ask("look_for_differences", FindingList)

    async def reconcile(self) -> FindingList:
        """The same, and what mends itself is mended."""
        return await self._link.ask("reconcile", FindingList)

    # tenants

    async def create_tenant(self, tenant_id: str, /, **terms: Any) -> wire.TenantView:
        """`terms` are the fields of a tenant: pool, name, price, weight, caps … as the protocol has them."""
        body = _told({"id": tenant_id, **terms}, wire.TenantBody)
        return await self._link.ask("create_tenant", wire.TenantView, body=body)

    async def tenants(self, cursor: str | None = None, limit: int = 100) -> wire.TenantList:
        query = {"cursor": cursor, "limit": limit}
        return await self._link.ask("list_tenants", wire.TenantList, query=query)

    async def tenant(self, tenant_id: str) -> wire.TenantView:
        return await self._link.ask("get_tenant", wire.TenantView, tenant_id=tenant_id)

    async def change_tenant(self, tenant_id: str, /, **terms: Any) -> wire.TenantView:
        """What is not given stays as it is."""
        body = _told(terms, wire.TenantChange)
        return await self._link.ask("change_tenant", wire.TenantView, body=body, tenant_id=tenant_id)

    async def suspend_tenant(self, tenant_id: str) -> wire.TenantView:
        return await self._link.ask("suspend_tenant", wire.TenantView, tenant_id=tenant_id)

    async def resume_tenant(self, tenant_id: str) -> wire.TenantView:
        return await self._link.ask("resume_tenant", wire.TenantView, tenant_id=tenant_id)

    async def move_tenant(self, tenant_id: str, pool: str) -> wire.TenantView:
        """Begun when it returns; it is there when its `pool` is and its state is not `moving`."""
        body = wire.MoveBody(pool)
        return await self._link.ask("move_tenant", wire.TenantView, body=body, tenant_id=tenant_id)

    async def delete_tenant(self, tenant_id: str, *, confirm: str) -> wire.TenantView:
        """Begun when it returns; it is gone when it is not found any more. `confirm` repeats its id."""
        query = {"confirm": confirm}
        return await self._link.ask("delete_tenant", wire.TenantView, query=query, tenant_id=tenant_id)

    # credits

    async def balance(self, tenant_id: str) -> money.BalanceView:
        return await self._link.ask("balance", money.BalanceView, tenant_id=tenant_id)

    async def statement(self, tenant_id: str, after: int = 0, limit: int = 100) -> money.StatementView:
        """The entries behind that number."""
        query = {"after": after, "limit": limit}
        return await self._link.ask("statement", money.StatementView, query=query, tenant_id=tenant_id)

    async def grants(self, tenant_id: str, cursor: str | None = None, limit: int = 100) -> money.GrantList:
        query = {"cursor": cursor, "limit": limit}
        return await self._link.ask("list_grants", money.GrantList, query=query, tenant_id=tenant_id)

    async def grant_credits(
        self,
        tenant_id: str,
        amount: int,
        *,
        grant_id: str | None = None,
        note: str = "",
        pending: bool = False,
    ) -> money.GrantView:
        """The same `grant_id`, such as the number of a payment, is one grant however often it is sent."""
        body = money.GrantBody(amount, grant_id or uuid.uuid4().hex, note, pending)
        return await self._link.ask("grant_credits", money.GrantView, body=body, tenant_id=tenant_id)

    async def confirm_grant(self, tenant_id: str, grant_id: str) -> money.GrantView:
        return await self._link.ask("confirm_grant", money.GrantView, tenant_id=tenant_id, grant_id=grant_id)

    async def void_grant(self, tenant_id: str, grant_id: str) -> money.GrantView:
        return await self._link.ask("void_grant", money.GrantView, tenant_id=tenant_id, grant_id=grant_id)

    async def adjust_credits(
        self, tenant_id: str, amount: int, note: str, *, adjustment_id: str | None = None
    ) -> money.BalanceView:
        body = money.AdjustBody(amount, note, adjustment_id or uuid.uuid4().hex)
        return await self._link.ask("adjust_credits", money.BalanceView, body=body, tenant_id=tenant_id)

    async def receipt(self, job_id: str) -> money.ReceiptView:
        """What a job was held for and what it cost."""
        return await self._link.ask("job_receipt", money.ReceiptView, job_id=job_id)


def _told(fields: dict[str, Any], kind: type[B]) -> B:
    try:
        return msgspec.convert(msgspec.to_builtins(fields), kind)
    except msgspec.ValidationError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"this cannot be said of a tenant: {error}") from error
