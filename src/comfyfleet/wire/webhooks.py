"""Webhooks in the API, and deliveries: their content and their signature in the form of Standard Webhooks.

`tenancy/webhooks.py` keeps webhooks and secrets.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import UNSET, UnsetType

from comfyfleet.model.bounds import Name, PageSize, Seconds, Text, Url
from comfyfleet.model.fact import Fact, FactKind
from comfyfleet.model.job import Job
from comfyfleet.model.webhook import Delivery, DeliveryStatus, WebhookSubscription
from comfyfleet.wire.bodies import Events
from comfyfleet.wire.progress import FactBody, fact_body
from comfyfleet.wire.views import timestamp, view_of

MAX_EVENT_BYTES = 256 * 1024
"""A result that would make the event larger is left out."""


class SubscriptionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    url: Url
    events: Events | None = None
    name: Text = ""
    every_tenant: bool = False
    """Receive events of all tenants, signed with the hub's secret. Only for operators."""


class WebhookChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields that are left out stay as they are."""

    url: Url | UnsetType = UNSET
    events: Events | UnsetType | None = UNSET
    """Events that are delivered; null: the ones that end a job."""
    name: Text | UnsetType = UNSET


class SecretBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    overlap_s: Seconds = 86400.0
    """Seconds for which deliveries are also signed with the previous secret."""
    every_tenant: bool = False
    """Change the secret of the hub's own webhooks. Only for operators."""


class DeliveriesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    status: Literal["any", "pending", "delivered", "given_up"] = "any"
    """Only deliveries with this status."""
    cursor: Name | None = None
    limit: PageSize = 100


class WebhookView(msgspec.Struct, frozen=True):
    id: str
    url: str
    """The URL without its query, which may contain a secret."""
    events: tuple[FactKind, ...]
    created_at: float
    tenant: str | None
    """The tenant whose events it receives; null: all tenants."""
    name: str = ""


class WebhookList(msgspec.Struct, frozen=True):
    webhooks: tuple[WebhookView, ...]
    cursor: str | None = None


class WebhookTested(msgspec.Struct, frozen=True):
    """The outcome of a test delivery, without the content of the receiver's answer."""

    id: str
    """The id of the delivery, as in its header `webhook-id`."""
    webhook_id: str
    url: str
    is_delivered: bool
    seconds: float
    status: int | None = None
    """The HTTP status of the receiver's answer; null: it did not answer."""
    error: str | None = None


class CreatedSecret(msgspec.Struct, frozen=True):
    secret: str
    """The secret. The hub does not show it again."""
    created_at: float
    tenant: str | None = None
    old_until: float | None = None


class DeliveryView(msgspec.Struct, frozen=True):
    id: str
    job_id: str
    event: str
    url: str
    webhook: str
    """The id of the webhook, or `job` for the one in the submission."""
    status: DeliveryStatus
    attempts: int
    created_at: float
    next_at: float | None = None
    """When a pending delivery is tried next, in seconds since 1970."""
    last_at: float | None = None
    last_status: int | None = None
    last_error: str | None = None
    ended_at: float | None = None
    webhook_id: str = ""
    """The same as `webhook`."""


class DeliveryList(msgspec.Struct, frozen=True):
    deliveries: tuple[DeliveryView, ...]
    cursor: str | None = None


class EventData(FactBody, frozen=True, kw_only=True):
    """The fact and the job's identity. A fact that ends the job has its result or error."""

    tenant: str
    workflow_hash: str
    submitted_at: float
    reference: str | None = None
    metadata: dict[str, Any] | None = None
    is_cut: bool = False
    """Whether the result was too large to send; `GET /api/jobs/{id}/result` returns it."""


class EventBody(msgspec.Struct, frozen=True):
    type: str
    timestamp: str
    data: EventData


def test_event(webhook_id: str, at: float) -> bytes:
    data = {"webhook_id": webhook_id, "message": "This is a test delivery. No action is needed."}
    return msgspec.json.encode({"type": "webhook.test", "timestamp": timestamp(at), "data": data})


def event_name(kind: FactKind) -> str:
    return f"job.{kind.value}"


def event(fact: Fact, job: Job) -> bytes:
    """The body of a delivery. It never contains the result of a later round of the job."""
    is_last_word = fact.kind.is_final and job.round == fact.round
    body = fact_body(fact, job.result, job.failure) if is_last_word else fact_body(fact)
    data = EventData(
        **msgspec.structs.asdict(body),
        tenant=job.tenant,
        workflow_hash=job.workflow_hash,
        submitted_at=job.submitted_at,
        reference=job.reference,
        metadata=job.payload.metadata,
    )
    event = EventBody(event_name(fact.kind), timestamp(fact.at), data)
    content = msgspec.json.encode(event)
    if len(content) > MAX_EVENT_BYTES and data.result is not None:
        cut = msgspec.structs.replace(data, result=None, is_cut=True)
        content = msgspec.json.encode(msgspec.structs.replace(event, data=cut))
    return content


def view(webhook: WebhookSubscription) -> WebhookView:
    return view_of(WebhookView, webhook, id=webhook.webhook_id, url=shown(webhook.url), tenant=webhook.owner)


def delivery_view(delivery: Delivery) -> DeliveryView:
    return view_of(
        DeliveryView,
        delivery,
        id=delivery.delivery_id,
        event=event_name(delivery.kind),
        url=shown(delivery.url),
        webhook=delivery.webhook_id,
        next_at=delivery.next_at if delivery.status is DeliveryStatus.PENDING else None,
    )


def shown(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(query="…" if parts.query else ""))


SECRET_PREFIX = "whsec_"

ID_HEADER = "webhook-id"
TIME_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
_VERSION = "v1,"


def new_secret(entropy: bytes) -> str:
    return SECRET_PREFIX + base64.b64encode(entropy).decode()


def signatures(secrets: Iterable[str], delivery_id: str, timestamp: int, body: bytes) -> str:
    """A signature for each secret, so that receivers with the old or the new one can verify."""
    return " ".join(_VERSION + _sign(secret, delivery_id, str(timestamp), body) for secret in secrets)


def is_signed(secret: str, delivery_id: str, timestamp: str, body: bytes, given: str) -> bool:
    """Whether one of the signatures was made with this secret. Raises `ValueError` if the secret is not valid."""
    good = (_VERSION + _sign(secret, delivery_id, timestamp, body)).encode()
    found = False
    for each in given.split(" "):
        found |= hmac.compare_digest(good, each.encode("utf-8", "replace"))
    return found


def _sign(secret: str, delivery_id: str, timestamp: str, body: bytes) -> str:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"the secret is not valid: it is {SECRET_PREFIX} followed by base64") from error
    if not key:
        # Anybody can sign with an empty secret, which is what a missing setting looks like.
        raise ValueError(f"the secret is empty: it is {SECRET_PREFIX} followed by base64")
    # Some web servers turn bytes that are not UTF-8 into surrogates.
    signed = f"{delivery_id}.{timestamp}.".encode("utf-8", "surrogatepass") + body
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
