"""The part of `FleetClient` that is about tenants and their credits."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec

from comfyfleet.client.link import Link, filled
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.wire import credits as money
from comfyfleet.wire import tenants as wire
from comfyfleet.wire import usage as used
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
        body = money.GrantBody(amount, uuid.uuid4().hex if grant_id is None else grant_id, note, pending)
        return await self._link.ask("grant_credits", money.GrantView, body=body, tenant_id=tenant_id)

    async def confirm_grant(self, tenant_id: str, grant_id: str) -> money.GrantView:
        return await self._link.ask("confirm_grant", money.GrantView, tenant_id=tenant_id, grant_id=grant_id)

    async def void_grant(self, tenant_id: str, grant_id: str) -> money.GrantView:
        return await self._link.ask("void_grant", money.GrantView, tenant_id=tenant_id, grant_id=grant_id)

    async def adjust_credits(
        self, tenant_id: str, amount: int, note: str, *, adjustment_id: str | None = None
    ) -> money.BalanceView:
        body = money.AdjustBody(amount, note, uuid.uuid4().hex if adjustment_id is None else adjustment_id)
        return await self._link.ask("adjust_credits", money.BalanceView, body=body, tenant_id=tenant_id)

    async def usage(
        self,
        *,
        tenant: str | None = None,
        since: float | None = None,
        until: float | None = None,
        by: Sequence[str] = ("tenant",),
    ) -> used.UsageList:
        """What ended rounds took, for each tenant, workflow, worker, day: as many of these as `by` names."""
        query = {"tenant": tenant, "since": since, "until": until, "by": ",".join(by)}
        return await self._link.ask("usage", used.UsageList, query=query)

    async def export(
        self,
        tenant_id: str,
        *,
        of: Literal["postings", "runs"] = "postings",
        format: used.Format = "csv",  # noqa: A002
        after: int = 0,
    ) -> AsyncGenerator[bytes, None]:
        """The file piece by piece. What was exported up to a number is gone on with `after` it."""
        query = urlencode({"of": of, "format": format, "after": after})
        path = filled("/api/tenants/{tenant_id}/export", {"tenant_id": tenant_id})
        async with self._link.stream(f"{path}?{query}", {}) as response:
            try:
                async for piece in response.content.iter_any():
                    yield piece
            except aiohttp.ClientError as error:
                raise Fault(f"the export broke off: {error}; begin it anew") from error

    async def receipt(self, job_id: str) -> money.ReceiptView:
        """What a job was held for and what it cost."""
        return await self._link.ask("job_receipt", money.ReceiptView, job_id=job_id)


def _told(fields: dict[str, Any], kind: type[B]) -> B:
    try:
        return msgspec.convert(msgspec.to_builtins(fields), kind)
    except msgspec.ValidationError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"this cannot be said of a tenant: {error}") from error
