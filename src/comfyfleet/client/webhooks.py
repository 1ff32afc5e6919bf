"""The part of `FleetClient` that is about webhooks and their deliveries."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from comfyfleet.client.link import Link
from comfyfleet.model.fact import FactKind
from comfyfleet.wire import webhooks as wire


class WebhookCalls:
    _link: Link

    async def create_webhook(
        self, url: str, *, events: Sequence[str] | None = None, name: str = "", every_tenant: bool = False
    ) -> wire.WebhookView:
        """Facts of every job that is submitted from now on are delivered there."""
        wanted = None if events is None else tuple(FactKind(event) for event in events)
        body = wire.StandingBody(url, wanted, name, every_tenant)
        return await self._link.ask("create_webhook", wire.WebhookView, body=body)

    async def webhooks(self, cursor: str | None = None, limit: int = 100) -> wire.WebhookList:
        query = {"cursor": cursor, "limit": limit}
        return await self._link.ask("list_webhooks", wire.WebhookList, query=query)

    async def change_webhook(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        events: Sequence[str] | None = None,
        name: str | None = None,
    ) -> wire.WebhookView:
        """What is not given stays as it is."""
        body = wire.WebhookChange(
            UNSET if url is None else url,
            UNSET if events is None else tuple(FactKind(event) for event in events),
            UNSET if name is None else name,
        )
        return await self._link.ask("change_webhook", wire.WebhookView, body=body, webhook_id=webhook_id)

    async def test_webhook(self, webhook_id: str) -> wire.WebhookTested:
        """A test delivery goes out at once; what the receiver answered."""
        return await self._link.ask("test_webhook", wire.WebhookTested, webhook_id=webhook_id)

    async def delete_webhook(self, webhook_id: str) -> None:
        await self._link.ask("delete_webhook", type(None), webhook_id=webhook_id)

    async def rotate_webhook_secret(
        self, overlap_s: float = 86400.0, *, every_tenant: bool = False
    ) -> wire.SecretMade:
        """The only time that the secret is told. For so long the one before it signs too."""
        body = wire.SecretBody(overlap_s, every_tenant)
        return await self._link.ask("rotate_webhook_secret", wire.SecretMade, body=body)

    async def deliveries(
        self,
        job_id: str | None = None,
        *,
        status: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> wire.DeliveryList:
        """Those of one job, or one page of all that there are."""
        if job_id is not None:
            return await self._link.ask("job_deliveries", wire.DeliveryList, job_id=job_id)
        query = {"status": status, "cursor": cursor, "limit": limit}
        return await self._link.ask("list_deliveries", wire.DeliveryList, query=query)

    async def resend_delivery(self, delivery_id: str) -> wire.DeliveryView:
        return await self._link.ask("resend_delivery", wire.DeliveryView, delivery_id=delivery_id)
