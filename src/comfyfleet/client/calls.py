"""The methods of `FleetClient` for files, keys, tenants with their credits, and webhooks."""

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
from comfyfleet.client.connection import HubConnection, fill_path
from comfyfleet.client.file_transfer import FileLike, upload
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import FactKind
from comfyfleet.model.file import FileKind
from comfyfleet.model.job import OutputFile
from comfyfleet.wire import credits as wire_credits
from comfyfleet.wire import keys as wire_keys
from comfyfleet.wire import tenants as wire_tenants
from comfyfleet.wire import webhooks as wire_webhooks
from comfyfleet.wire import worker as worker_bodies
from comfyfleet.wire.files import FileDetails, FileList, FileView
from comfyfleet.wire.tenants import FindingList

B = TypeVar("B", bound=msgspec.Struct)


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
        """Uploads a path or a content for the `inputs` of any number of jobs, which name it by its `id`."""
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
        """One page, oldest first. Pass its cursor to get the next page."""
        query = {"kind": kind, "job_id": job_id, "tenant": tenant, "cursor": cursor, "limit": limit}
        return await self._link.ask("list_files", FileList, query=query)

    async def every_file(self, **wanted: Any) -> AsyncIterator[FileView]:
        """All files of `files`, page after page."""
        cursor: str | None = None
        while True:
            page = await self.files(**wanted, cursor=cursor)
            for file in page.files:
                yield file
            cursor = page.cursor
            if cursor is None:
                return

    async def delete_file(self, file_id: str) -> None:
        """Also deletes its thumbnails. Refused while an open job needs the file."""
        await self._link.ask("delete_file", type(None), file_id=file_id)

    async def fetch(self, file: OutputFile | FileView | str) -> bytes:
        """The content of a result's file, or of the hub's file with this id."""
        return await file_transfer.fetch(self._link, await self._found(file))

    async def save(self, file: OutputFile | FileView | str, path: str | Path) -> int:
        """The same into a file, which is replaced only when all bytes have arrived."""
        return await file_transfer.save_as(self._link, await self._found(file), Path(path))

    async def _found(self, file: OutputFile | FileView | str) -> OutputFile:
        if isinstance(file, OutputFile):
            return file
        # The link in the view may have expired.
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
        """The answer is the only one that contains the key."""
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
        """A token with which this many workers get their own keys. `replace`: also workers that have a
        key, which then ends."""
        body = wire_keys.EnrolmentBody(uses, expires_in_s, worker_prefix, replace)
        return await self._link.ask("create_enrolment", wire_keys.CreatedEnrolment, body=body)

    async def invites(self, cursor: str | None = None, limit: int = 100) -> wire_keys.EnrolmentList:
        """Enrolment tokens, without their secrets."""
        query = {"cursor": cursor, "limit": limit}
        return await self._link.ask("list_enrolments", wire_keys.EnrolmentList, query=query)

    async def uninvite(self, token_id: str) -> None:
        """The token becomes invalid; keys made with it stay."""
        await self._link.ask("revoke_enrolment", type(None), token_id=token_id)

    async def enrol(self, token: str, worker_id: str) -> wire_keys.CreatedKey:
        """Uses the token once, for a key that is valid for this worker only."""
        body = worker_bodies.EnrolBody(token, worker_id)
        return await self._link.ask("worker_enrol", wire_keys.CreatedKey, body=body)


class TenantCalls:
    _link: HubConnection

    async def differences(self) -> FindingList:
        """The present differences between the store and the tenant databases. Changes nothing."""
        return await self._link.ask("look_for_differences", FindingList)

    async def reconcile(self) -> FindingList:
        """The same, and repairs what can be repaired automatically."""
        return await self._link.ask("reconcile", FindingList)

    # tenants

    async def create_tenant(self, tenant_id: str, /, **terms: Any) -> wire_tenants.TenantView:
        """`terms` are the fields of a tenant (database, name, price, weight, caps …), as in docs/protocol.md."""
        body = _converted({"id": tenant_id, **terms}, wire_tenants.TenantBody)
        return await self._link.ask("create_tenant", wire_tenants.TenantView, body=body)

    async def tenants(self, cursor: str | None = None, limit: int = 100) -> wire_tenants.TenantList:
        query = {"cursor": cursor, "limit": limit}
        return await self._link.ask("list_tenants", wire_tenants.TenantList, query=query)

    async def tenant(self, tenant_id: str) -> wire_tenants.TenantView:
        return await self._link.ask("get_tenant", wire_tenants.TenantView, tenant_id=tenant_id)

    async def change_tenant(self, tenant_id: str, /, **terms: Any) -> wire_tenants.TenantView:
        """Terms that are not given stay as they are."""
        body = _converted(terms, wire_tenants.TenantChange)
        return await self._link.ask("change_tenant", wire_tenants.TenantView, body=body, tenant_id=tenant_id)

    async def suspend_tenant(self, tenant_id: str) -> wire_tenants.TenantView:
        return await self._link.ask("suspend_tenant", wire_tenants.TenantView, tenant_id=tenant_id)

    async def resume_tenant(self, tenant_id: str) -> wire_tenants.TenantView:
        return await self._link.ask("resume_tenant", wire_tenants.TenantView, tenant_id=tenant_id)

    async def move_tenant(self, tenant_id: str, database: str) -> wire_tenants.TenantView:
        """Starts the relocation. It has ended when `database` is the new one and the state is not `moving`."""
        body = wire_tenants.MoveBody(database)
        return await self._link.ask("move_tenant", wire_tenants.TenantView, body=body, tenant_id=tenant_id)

    async def delete_tenant(self, tenant_id: str, *, confirm: str) -> wire_tenants.TenantView:
        """Starts the deletion. It has ended when the tenant is not found. `confirm` repeats its id."""
        query = {"confirm": confirm}
        return await self._link.ask(
            "delete_tenant", wire_tenants.TenantView, query=query, tenant_id=tenant_id
        )

    # credits

    async def balance(self, tenant_id: str) -> wire_credits.BalanceView:
        return await self._link.ask("balance", wire_credits.BalanceView, tenant_id=tenant_id)

    async def statement(self, tenant_id: str, after: int = 0, limit: int = 100) -> wire_credits.StatementView:
        """The entries after that number."""
        query = {"after": after, "limit": limit}
        return await self._link.ask("statement", wire_credits.StatementView, query=query, tenant_id=tenant_id)

    async def grants(
        self, tenant_id: str, cursor: str | None = None, limit: int = 100
    ) -> wire_credits.GrantList:
        query = {"cursor": cursor, "limit": limit}
        return await self._link.ask("list_grants", wire_credits.GrantList, query=query, tenant_id=tenant_id)

    async def grant_credits(
        self,
        tenant_id: str,
        amount: int,
        *,
        grant_id: str | None = None,
        note: str = "",
        pending: bool = False,
    ) -> wire_credits.GrantView:
        """The same `grant_id`, such as the number of a payment, is one grant, however often it is sent."""
        body = wire_credits.GrantBody(
            amount, uuid.uuid4().hex if grant_id is None else grant_id, note, pending
        )
        return await self._link.ask("grant_credits", wire_credits.GrantView, body=body, tenant_id=tenant_id)

    async def confirm_grant(self, tenant_id: str, grant_id: str) -> wire_credits.GrantView:
        return await self._link.ask(
            "confirm_grant", wire_credits.GrantView, tenant_id=tenant_id, grant_id=grant_id
        )

    async def void_grant(self, tenant_id: str, grant_id: str) -> wire_credits.GrantView:
        return await self._link.ask(
            "void_grant", wire_credits.GrantView, tenant_id=tenant_id, grant_id=grant_id
        )

    async def adjust_credits(
        self, tenant_id: str, amount: int, note: str, *, adjustment_id: str | None = None
    ) -> wire_credits.BalanceView:
        body = wire_credits.AdjustBody(
            amount, note, uuid.uuid4().hex if adjustment_id is None else adjustment_id
        )
        return await self._link.ask(
            "adjust_credits", wire_credits.BalanceView, body=body, tenant_id=tenant_id
        )

    async def usage(
        self,
        *,
        tenant: str | None = None,
        since: float | None = None,
        until: float | None = None,
        by: Sequence[str] = ("tenant",),
    ) -> wire_credits.UsageList:
        """The usage of ended rounds, grouped by what `by` names: tenant, workflow, worker, day."""
        query = {"tenant": tenant, "since": since, "until": until, "by": ",".join(by)}
        return await self._link.ask("usage", wire_credits.UsageList, query=query)

    async def export_credits(
        self,
        tenant_id: str,
        *,
        of: Literal["postings", "runs"] = "postings",
        format: wire_credits.Format = "csv",  # noqa: A002
        after: int = 0,
    ) -> AsyncGenerator[bytes, None]:
        """The file in pieces. Pass the last number as `after` to continue an earlier export."""
        query = urlencode({"of": of, "format": format, "after": after})
        path = fill_path("/api/tenants/{tenant_id}/export", {"tenant_id": tenant_id})
        async with self._link.stream(f"{path}?{query}", {}) as response:
            try:
                async for piece in response.content.iter_any():
                    yield piece
            except aiohttp.ClientError as error:
                raise Fault(f"the export broke off: {error}; start it again") from error

    async def receipt(self, job_id: str) -> wire_credits.ReceiptView:
        """What was held for a job, and what it cost."""
        return await self._link.ask("job_receipt", wire_credits.ReceiptView, job_id=job_id)


def _converted(fields: dict[str, Any], kind: type[B]) -> B:
    try:
        return msgspec.convert(msgspec.to_builtins(fields), kind)
    except msgspec.ValidationError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the tenant's terms are not valid: {error}") from error


class WebhookCalls:
    _link: HubConnection

    async def create_webhook(
        self, url: str, *, events: Sequence[str] | None = None, name: str = "", every_tenant: bool = False
    ) -> wire_webhooks.WebhookView:
        """Delivers facts of all jobs that are submitted from now on."""
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
        """Values that are not given stay as they are."""
        body = wire_webhooks.WebhookChange(
            UNSET if url is None else url,
            UNSET if events is None else tuple(FactKind(event) for event in events),
            UNSET if name is None else name,
        )
        return await self._link.ask(
            "change_webhook", wire_webhooks.WebhookView, body=body, webhook_id=webhook_id
        )

    async def test_webhook(self, webhook_id: str) -> wire_webhooks.WebhookTested:
        """Sends a test delivery at once and returns the receiver's answer."""
        return await self._link.ask("test_webhook", wire_webhooks.WebhookTested, webhook_id=webhook_id)

    async def delete_webhook(self, webhook_id: str) -> None:
        await self._link.ask("delete_webhook", type(None), webhook_id=webhook_id)

    async def rotate_webhook_secret(
        self, overlap_s: float = 86400.0, *, every_tenant: bool = False
    ) -> wire_webhooks.CreatedSecret:
        """The answer is the only one that contains the secret. The old one also signs for `overlap_s`."""
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
        """The deliveries of one job, or one page of all."""
        if job_id is not None:
            return await self._link.ask("job_deliveries", wire_webhooks.DeliveryList, job_id=job_id)
        query = {"status": status, "cursor": cursor, "limit": limit}
        return await self._link.ask("list_deliveries", wire_webhooks.DeliveryList, query=query)

    async def resend_delivery(self, delivery_id: str) -> wire_webhooks.DeliveryView:
        return await self._link.ask("resend_delivery", wire_webhooks.DeliveryView, delivery_id=delivery_id)
