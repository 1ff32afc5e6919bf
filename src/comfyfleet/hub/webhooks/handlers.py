"""Handlers of webhooks: subscriptions, signing secrets, deliveries. `dispatcher.py` delivers.

An owner sees its own webhooks only; webhooks for every tenant belong to operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.http.credentials import visible_job
from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.hub.http.router import page_of
from comfyfleet.hub.webhooks.sender import WebhookSender, make_secret
from comfyfleet.model.access import Caller
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.webhook import ENDINGS, Delivery, WebhookSubscription
from comfyfleet.net.url_guard import UrlGuard
from comfyfleet.policy.webhook_delivery import retried_manually
from comfyfleet.tenancy.webhook_outbox import WebhookOutbox, named
from comfyfleet.tenancy.webhooks import Webhooks
from comfyfleet.wire import bodies
from comfyfleet.wire import webhooks as wire

_MAX_RECORDS_READ = 2_000
_PAGE = 250


class WebhookHandlers:
    """`wake` makes the dispatcher look for due deliveries."""

    def __init__(
        self,
        engine: Engine,
        webhooks: Webhooks,
        ledger: WebhookOutbox,
        guard: UrlGuard,
        sender: WebhookSender,
        wake: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._webhooks = webhooks
        self._ledger = ledger
        self._guard = guard
        self._sender = sender
        self._wake = wake

    async def list_webhooks(self, call: HubRequest[bodies.PageQuery]) -> Reply:
        if call.caller.scope is not None:
            own = await self._webhooks.list_of_owner(call.caller.scope)
            return Reply(200, wire.WebhookList(tuple(map(wire.view, own))))
        found = await self._webhooks.listing(call.data.cursor or "", call.data.limit)
        cursor = found[-1].webhook_id if len(found) == call.data.limit else None
        return Reply(200, wire.WebhookList(tuple(map(wire.view, found)), cursor))

    async def create_webhook(self, call: HubRequest[wire.SubscriptionBody]) -> Reply:
        body = call.data
        self._guard.check(body.url)
        made = await self._webhooks.create(
            _owner(call.caller, body.every_tenant),
            body.url,
            events=tuple(dict.fromkeys(body.events or ENDINGS)),
            name=body.name,
        )
        return Reply(201, wire.view(made), created_id=made.webhook_id)

    async def change_webhook(self, call: HubRequest[wire.WebhookChange]) -> Reply:
        webhook, body = await self._mine(call), call.data
        fields: dict[str, object] = {}
        if body.url is not UNSET:
            self._guard.check(body.url)
            fields["url"] = body.url
        if body.events is not UNSET:
            fields["events"] = tuple(dict.fromkeys(body.events or ENDINGS))
        if body.name is not UNSET:
            fields["name"] = body.name
        changed = await self._webhooks.change(webhook.webhook_id, fields)
        if changed is None:
            raise _no_webhook(webhook.webhook_id)
        return Reply(200, wire.view(changed))

    async def test_webhook(self, call: HubRequest[None]) -> Reply:
        return Reply(200, await self._sender.send_test(await self._mine(call)))

    async def delete_webhook(self, call: HubRequest[None]) -> Reply:
        await self._webhooks.remove(await self._mine(call))
        return Reply(204)

    async def _mine(self, call: HubRequest[Any]) -> WebhookSubscription:
        webhook = await self._webhooks.get(call.parameters["webhook_id"])
        if webhook is None or not _sees(call.caller, webhook.owner):
            raise _no_webhook(call.parameters["webhook_id"])
        return webhook

    async def rotate_webhook_secret(self, call: HubRequest[wire.SecretBody]) -> Reply:
        owner = _owner(call.caller, call.data.every_tenant)
        made = await self._webhooks.rotate(owner, call.data.overlap_s, make_secret())
        answer = wire.CreatedSecret(made.secret, made.created_at, owner, made.old_until)
        return Reply(200, answer, created_id="every tenant" if owner is None else f"tenant {owner}")

    async def list_deliveries(self, call: HubRequest[wire.DeliveriesQuery]) -> Reply:
        """Reads a bounded number of deliveries, so a page with a cursor may be short or empty."""
        asked, after, records_read = call.data, call.data.cursor or "", 0
        found: list[wire.DeliveryView] = []
        while records_read < _MAX_RECORDS_READ:
            page, further = await self._page(call.caller, after)
            for name, delivery in page:
                if len(found) == asked.limit:
                    return Reply(200, wire.DeliveryList(tuple(found), after))
                after = name
                if asked.status in ("any", delivery.status):
                    found.append(wire.delivery_view(delivery))
            if not further:
                return Reply(200, wire.DeliveryList(tuple(found)))
            records_read, after = records_read + _PAGE, further
        return Reply(200, wire.DeliveryList(tuple(found), after))

    async def _page(self, caller: Caller, after: str) -> tuple[list[tuple[str, Delivery]], str]:
        if caller.scope is not None:
            return await self._ledger.page_of(caller.scope, after, _PAGE)
        page = await self._ledger.page(after, _PAGE)
        return page, page[-1][0] if len(page) == _PAGE else ""

    async def job_deliveries(self, call: HubRequest[bodies.OptionalPageQuery]) -> Reply:
        job_id = JobId(call.parameters["job_id"])
        await visible_job(call.caller, self._engine, job_id)
        found = [each for each in await self._ledger.of_job(job_id) if _sees(call.caller, each.owner)]
        page, cursor = page_of(found, call.data, lambda each: each.delivery_id)
        return Reply(200, wire.DeliveryList(tuple(map(wire.delivery_view, page)), cursor))

    async def resend_delivery(self, call: HubRequest[None]) -> Reply:
        delivery_id = call.parameters["delivery_id"]

        def again(delivery: Delivery) -> Delivery:
            if not _sees(call.caller, delivery.owner):
                raise missing
            return retried_manually(delivery, self._engine.now())

        missing = Refusal(RefusalCode.NOT_FOUND, f"there is no delivery {delivery_id!r} (any more)")
        name = named(delivery_id)
        if name is None:
            raise missing
        changed = await self._ledger.change(name, again)
        if changed is None:
            raise missing
        self._wake()
        return Reply(200, wire.delivery_view(changed))


def _no_webhook(webhook_id: str) -> Refusal:
    return Refusal(RefusalCode.NOT_FOUND, f"there is no webhook {webhook_id!r} (any more)")


def _owner(caller: Caller, every_tenant: bool) -> TenantId | None:
    if not every_tenant:
        return caller.owner
    if caller.scope is not None:
        raise Refusal(RefusalCode.NOT_ALLOWED, "only an operator's key may subscribe to every tenant's jobs")
    return None


def _sees(caller: Caller, owner: TenantId | None) -> bool:
    """A webhook for every tenant belongs to operators, who see everything."""
    return caller.scope is None or caller.scope == owner
