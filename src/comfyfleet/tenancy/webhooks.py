"""Webhook subscriptions and signing secrets, in the document store that all hubs share.

Each belongs to a tenant or, without owner, to the hub. `net/url_guard.py` decides which URLs are allowed;
`webhook_outbox.py` has the deliveries.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping

import msgspec

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import TenantId
from comfyfleet.model.recent import RecentDict
from comfyfleet.model.webhook import ENDINGS, SigningSecret, WebhookSubscription
from comfyfleet.ports import Clock, DocumentStore

_WEBHOOKS = "webhooks"
_SECRETS = "webhook_secrets"
_PREFIX = "wh_"
_TRIES = 20

MAX_STANDING = 20
"""For one owner. Every fact of its jobs may become a delivery to each of them."""
_REMEMBER_S = 2.0
_MAX_REMEMBERED = 10_000

_Request = asyncio.Future[tuple[WebhookSubscription, ...]]


class Webhooks:
    def __init__(self, documents: DocumentStore, clock: Clock) -> None:
        self._documents = documents
        self._clock = clock
        self._known: RecentDict[TenantId | None, tuple[_Request, float]] = RecentDict(_MAX_REMEMBERED)
        """Cached or running requests, and when they expire."""

    async def create(
        self,
        owner: TenantId | None,
        url: str,
        *,
        events: tuple[FactKind, ...] = ENDINGS,
        name: str = "",
    ) -> WebhookSubscription:
        if len(await self.list_of_owner(owner)) >= MAX_STANDING:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"there are {MAX_STANDING} webhooks already, which is the maximum: delete one first",
            )
        now = self._clock.now()
        webhook_id = f"{_beginning(owner)}{int(now * 1000):012x}{secrets.token_hex(6)}"
        made = WebhookSubscription(webhook_id, url, now, owner, events, name)
        if not await self._documents.put(_WEBHOOKS, webhook_id, msgspec.json.encode(made), version=0):
            raise Fault("the id of the new webhook is taken; try again")
        self._known.pop(owner, None)
        return made

    async def get(self, webhook_id: str) -> WebhookSubscription | None:
        if not webhook_id.isascii() or not webhook_id.isprintable() or not 0 < len(webhook_id) < 100:
            return None
        document = await self._documents.get(_WEBHOOKS, webhook_id)
        return None if document is None else msgspec.json.decode(document.body, type=WebhookSubscription)

    async def change(self, webhook_id: str, fields: Mapping[str, object]) -> WebhookSubscription | None:
        """None: there is no such webhook."""
        for _ in range(_TRIES):
            document = await self._documents.get(_WEBHOOKS, webhook_id)
            if document is None:
                return None
            kept = msgspec.json.decode(document.body, type=WebhookSubscription)
            changed = msgspec.structs.replace(kept, **fields)
            body = msgspec.json.encode(changed)
            if await self._documents.put(_WEBHOOKS, webhook_id, body, version=document.version):
                self._known.pop(changed.owner, None)
                return changed
        raise Fault("the webhook keeps changing at the same time; try again")

    async def remove(self, webhook: WebhookSubscription) -> None:
        await self._documents.remove(_WEBHOOKS, webhook.webhook_id)
        self._known.pop(webhook.owner, None)

    async def list_of_owner(self, owner: TenantId | None) -> tuple[WebhookSubscription, ...]:
        """In order of creation."""
        beginning = _beginning(owner)
        # Some more than the maximum: two hubs may have created the last one at once.
        page = await self._documents.listing(_WEBHOOKS, beginning, MAX_STANDING + 10)
        found = (
            msgspec.json.decode(document.body, type=WebhookSubscription)
            for document in page
            if document.name.startswith(beginning)
        )
        return tuple(each for each in found if each.owner == owner)

    async def listing(self, after: str = "", limit: int = 100) -> list[WebhookSubscription]:
        """Of all owners."""
        page = await self._documents.listing(_WEBHOOKS, after, limit)
        return [msgspec.json.decode(document.body, type=WebhookSubscription) for document in page]

    async def subscriptions_for(self, tenant: TenantId) -> tuple[WebhookSubscription, ...]:
        """The webhooks for a tenant's jobs: its own and the hub's. Cached for two seconds."""
        return (*await self._cached(tenant), *await self._cached(None))

    async def _cached(self, owner: TenantId | None) -> tuple[WebhookSubscription, ...]:
        now = self._clock.now()
        asked, until = self._known.get(owner, (None, 0.0))
        if asked is not None and now < until and asked.done() and not _has_failed(asked):
            return asked.result()
        if asked is None or now >= until or asked.done():
            # One request serves all callers meanwhile: a batch would send a thousand.
            asked = asyncio.ensure_future(self.list_of_owner(owner))
            self._known[owner] = (asked, now + _REMEMBER_S)
        return await asyncio.shield(asked)

    # secrets

    async def rotate(self, owner: TenantId | None, overlap_s: float, made: str) -> SigningSecret:
        """Sets a new secret. The old one signs deliveries too for `overlap_s`."""
        now = self._clock.now()
        for _ in range(_TRIES):
            document = await self._documents.get(_SECRETS, _beginning(owner))
            before = None if document is None else msgspec.json.decode(document.body, type=SigningSecret)
            has_overlap = before is not None and overlap_s > 0
            secret = SigningSecret(
                made,
                now,
                before.secret if before is not None and has_overlap else None,
                now + overlap_s if has_overlap else None,
            )
            version = 0 if document is None else document.version
            body = msgspec.json.encode(secret)
            if await self._documents.put(_SECRETS, _beginning(owner), body, version=version):
                return secret
        raise Fault("the signing secret keeps changing at the same time; try again")

    async def forget_secret(self, owner: TenantId) -> None:
        await self._documents.remove(_SECRETS, _beginning(owner))

    async def signing(self, owner: TenantId | None, made: str) -> tuple[str, ...]:
        """The valid secrets, newest first. If there is none yet, `made` becomes the first one."""
        first = msgspec.json.encode(SigningSecret(made, self._clock.now()))
        document = await self._documents.get(_SECRETS, _beginning(owner))
        if document is None:
            await self._documents.put(_SECRETS, _beginning(owner), first, version=0)
            document = await self._documents.get(_SECRETS, _beginning(owner))
        assert document is not None, "it was there or has just been written"
        kept = msgspec.json.decode(document.body, type=SigningSecret)
        is_old_valid = kept.old_until is not None and self._clock.now() < kept.old_until
        return (kept.secret, kept.old_secret) if is_old_valid and kept.old_secret else (kept.secret,)


def _has_failed(asked: _Request) -> bool:
    return asked.cancelled() or asked.exception() is not None


def _beginning(owner: TenantId | None) -> str:
    # Tenants may have any name, documents may not: use a hash.
    name = "hub" if owner is None else hashlib.sha256(f"tenant {owner}".encode()).hexdigest()[:24]
    return f"{_PREFIX}{name}_"
