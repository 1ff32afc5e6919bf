"""The part of `FleetClient` that is about files: the same whether a hub keeps them in a folder or in a storage.

The part of `FleetClient` that is about keys, enrolment and the audit log.

The part of `FleetClient` that is about tenants and their credits.

The part of `FleetClient` that is about webhooks and their deliveries.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import aiohttp
import msgspec
from msgspec import UNSET

from comfyfleet.client import file_transfer
from comfyfleet.client.connection import HubConnection, filled
from comfyfleet.client.file_transfer import FileLike, upload
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import FactKind
from comfyfleet.model.file import FileKind
from comfyfleet.model.job import OutputFile
from comfyfleet.wire import credits as money
from comfyfleet.wire import credits as used
from comfyfleet.wire import keys as wire_keys
from comfyfleet.wire import tenants as wire_tenants
from comfyfleet.wire import webhooks as wire_webhooks
from comfyfleet.wire import worker as worker_bodies
from comfyfleet.wire.files import FileDetails, FileList, FileView
from comfyfleet.wire.tenants import FindingList


class FileCalls:
    _link: HubConnection

    async def upload(
        self,
        source: FileLike,
        *,
        name: str | None = None,
        content_type: str | None = None,
        tenant: str | None = None,
    ) -> FileView:
        """A file, by its path or its content, for the `inputs` of any number of jobs: name it by its `id`."""
        return await upload(self._link, source, name, content_type, tenant)

    async def file(self, file_id: str) -> FileDetails:
        return await self._link.ask("get_file", FileDetails, file_id=file_id)

    async def files(
        self,
        *,
        kind: FileKind | None = None,
        job_id: str | None = None,
        tenant: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> FileList:
        """One page, the oldest first. Ask again with its cursor for what follows."""
        query = {"kind": kind, "job_id": job_id, "tenant": tenant, "cursor": cursor, "limit": limit}
        return await self._link.ask("list_files", FileList, query=query)

    async def every_file(self, **wanted: Any) -> AsyncIterator[FileView]:
        """All that `files` would list, page after page."""
        cursor: str | None = None
        while True:
            page = await self.files(**wanted, cursor=cursor)
            for file in page.files:
                yield file
            cursor = page.cursor
            if cursor is None:
                return

    async def delete_file(self, file_id: str) -> None:
        """With its thumbnails. Refused while a job that has not ended needs it."""
        await self._link.ask("delete_file", type(None), file_id=file_id)

    async def fetch(self, file: OutputFile | FileView | str) -> bytes:
        """A file of a result, or one of the hub's by its id, from the hub or from where it lies. Our key does not
        travel there."""
        return await file_transfer.fetch(self._link, await self._found(file))

    async def save(self, file: OutputFile | FileView | str, path: str | Path) -> int:
        """The same to a path, however large it is; what lies there is replaced once all of it has come."""
        return await file_transfer.save_as(self._link, await self._found(file), Path(path))

    async def _found(self, file: OutputFile | FileView | str) -> OutputFile:
        if isinstance(file, OutputFile):
            return file
        # A link of before may have expired.
        known = await self.file(file if isinstance(file, str) else file.id)
        url = known.link.url if known.link is not None and known.link.method == "GET" else None
        return OutputFile("", known.kind, known.name, url=url, file_id=known.id)


class KeyCalls:
    _link: HubConnection

    async def create_key(
        self,
        role: Role | str,
        *,
        name: str = "",
        tenant: str | None = None,
        worker_id: str | None = None,
        expires_in_s: float | None = None,
    ) -> wire_keys.CreatedKey:
        """The only time that the key is told."""
        body = wire_keys.KeyBody(Role(role), name, tenant, worker_id, expires_in_s)
        return await self._link.ask("create_key", wire_keys.CreatedKey, body=body)

    async def keys(self, cursor: str | None = None, limit: int = 100) -> wire_keys.KeyList:
        return await self._link.ask("list_keys", wire_keys.KeyList, query={"cursor": cursor, "limit": limit})

    async def audit(
        self,
        kind: Literal["operations", "jobs"] = "operations",
        *,
        since: float | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire_keys.AuditPage:
        query = {"kind": kind, "since": since, "cursor": cursor, "limit": limit}
        return await self._link.ask("list_audit", wire_keys.AuditPage, query=query)

    async def rotate_key(self, key_id: str, overlap_s: float = 0.0) -> wire_keys.CreatedKey:
        body = wire_keys.RotateBody(overlap_s)
        return await self._link.ask("rotate_key", wire_keys.CreatedKey, body=body, key_id=key_id)

    async def revoke_key(self, key_id: str) -> wire_keys.KeyView:
        return await self._link.ask("revoke_key", wire_keys.KeyView, key_id=key_id)

    async def invite(
        self,
        *,
        uses: int = 1,
        expires_in_s: float = 3600.0,
        worker_prefix: str = "",
        replace: bool = False,
    ) -> wire_keys.CreatedEnrolment:
        """A token with which so many workers fetch keys of their own. `replace`: also those that have one, which then
        ends."""
        body = wire_keys.EnrolmentBody(uses, expires_in_s, worker_prefix, replace)
        return await self._link.ask("create_enrolment", wire_keys.CreatedEnrolment, body=body)

    async def invites(self, cursor: str | None = None, limit: int = 100) -> wire_keys.EnrolmentList:
        """Enrolment tokens, without their secrets."""
        query = {"cursor": cursor, "limit": limit}
        return await self._link.ask("list_enrolments", wire_keys.EnrolmentList, query=query)

    async def uninvite(self, token_id: str) -> None:
        """The token is good for nobody any more; keys that it gave stay."""
        await self._link.ask("revoke_enrolment", type(None), token_id=token_id)

    async def enrol(self, token: str, worker_id: str) -> wire_keys.CreatedKey:
        """One use of the token for a key that is good for this worker alone."""
        body = worker_bodies.EnrolBody(token, worker_id)
        return await self._link.ask("worker_enrol", wire_keys.CreatedKey, body=body)


B = TypeVar("B", bound=msgspec.Struct)


class TenantCalls:
    _link: HubConnection

    async def differences(self) -> FindingList:
        """Where the store and tenants' databases differ just now; nothing is changed."""
        return await self._link.ask("look_for_differences", FindingList)

    async def reconcile(self) -> FindingList:
        """The same, and what mends itself is mended."""
        return await self._link.ask("reconcile", FindingList)

    # tenants

    async def create_tenant(self, tenant_id: str, /, **terms: Any) -> wire_tenants.TenantView:
        """`terms` are the fields of a tenant: pool, name, price, weight, caps … as the protocol has them."""
        body = _told({"id": tenant_id, **terms}, wire_tenants.TenantBody)
        return await self._link.ask("create_tenant", wire_tenants.TenantView, body=body)

    async def tenants(self, cursor: str | None = None, limit: int = 100) -> wire_tenants.TenantList:
        query = {"cursor": cursor, "limit": limit}
        return await self._link.ask("list_tenants", wire_tenants.TenantList, query=query)

    async def tenant(self, tenant_id: str) -> wire_tenants.TenantView:
        return await self._link.ask("get_tenant", wire_tenants.TenantView, tenant_id=tenant_id)

    async def change_tenant(self, tenant_id: str, /, **terms: Any) -> wire_tenants.TenantView:
        """What is not given stays as it is."""
        body = _told(terms, wire_tenants.TenantChange)
        return await self._link.ask("change_tenant", wire_tenants.TenantView, body=body, tenant_id=tenant_id)

    async def suspend_tenant(self, tenant_id: str) -> wire_tenants.TenantView:
        return await self._link.ask("suspend_tenant", wire_tenants.TenantView, tenant_id=tenant_id)

    async def resume_tenant(self, tenant_id: str) -> wire_tenants.TenantView:
        return await self._link.ask("resume_tenant", wire_tenants.TenantView, tenant_id=tenant_id)

    async def move_tenant(self, tenant_id: str, pool: str) -> wire_tenants.TenantView:
        """Begun when it returns; it is there when its `pool` is and its state is not `moving`."""
        body = wire_tenants.MoveBody(pool)
        return await self._link.ask("move_tenant", wire_tenants.TenantView, body=body, tenant_id=tenant_id)

    async def delete_tenant(self, tenant_id: str, *, confirm: str) -> wire_tenants.TenantView:
        """Begun when it returns; it is gone when it is not found any more. `confirm` repeats its id."""
        query = {"confirm": confirm}
        return await self._link.ask(
            "delete_tenant", wire_tenants.TenantView, query=query, tenant_id=tenant_id
        )

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


class WebhookCalls:
    _link: HubConnection

    async def create_webhook(
        self, url: str, *, events: Sequence[str] | None = None, name: str = "", every_tenant: bool = False
    ) -> wire_webhooks.WebhookView:
        """Facts of every job that is submitted from now on are delivered there."""
        wanted = None if events is None else tuple(FactKind(event) for event in events)
        body = wire_webhooks.SubscriptionBody(url, wanted, name, every_tenant)
        return await self._link.ask("create_webhook", wire_webhooks.WebhookView, body=body)

    async def webhooks(self, cursor: str | None = None, limit: int = 100) -> wire_webhooks.WebhookList:
        query = {"cursor": cursor, "limit": limit}
        return await self._link.ask("list_webhooks", wire_webhooks.WebhookList, query=query)

    async def change_webhook(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        events: Sequence[str] | None = None,
        name: str | None = None,
    ) -> wire_webhooks.WebhookView:
        """What is not given stays as it is."""
        body = wire_webhooks.WebhookChange(
            UNSET if url is None else url,
            UNSET if events is None else tuple(FactKind(event) for event in events),
            UNSET if name is None else name,
        )
        return await self._link.ask(
            "change_webhook", wire_webhooks.WebhookView, body=body, webhook_id=webhook_id
        )

    async def test_webhook(self, webhook_id: str) -> wire_webhooks.WebhookTested:
        """A test delivery goes out at once; what the receiver answered."""
        return await self._link.ask("test_webhook", wire_webhooks.WebhookTested, webhook_id=webhook_id)

    async def delete_webhook(self, webhook_id: str) -> None:
        await self._link.ask("delete_webhook", type(None), webhook_id=webhook_id)

    async def rotate_webhook_secret(
        self, overlap_s: float = 86400.0, *, every_tenant: bool = False
    ) -> wire_webhooks.CreatedSecret:
        """The only time that the secret is told. For so long the one before it signs too."""
        body = wire_webhooks.SecretBody(overlap_s, every_tenant)
        return await self._link.ask("rotate_webhook_secret", wire_webhooks.CreatedSecret, body=body)

    async def deliveries(
        self,
        job_id: str | None = None,
        *,
        status: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire_webhooks.DeliveryList:
        """Those of one job, or one page of all that there are."""
        if job_id is not None:
            return await self._link.ask("job_deliveries", wire_webhooks.DeliveryList, job_id=job_id)
        query = {"status": status, "cursor": cursor, "limit": limit}
        return await self._link.ask("list_deliveries", wire_webhooks.DeliveryList, query=query)

    async def resend_delivery(self, delivery_id: str) -> wire_webhooks.DeliveryView:
        return await self._link.ask("resend_delivery", wire_webhooks.DeliveryView, delivery_id=delivery_id)
