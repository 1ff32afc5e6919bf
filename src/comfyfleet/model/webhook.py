"""Webhooks, their signing secrets and their deliveries.

A webhook belongs to one job or to all jobs of a tenant. A delivery is one fact for one webhook.
`policy/webhook_delivery.py` decides about retries.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import JobId, TenantId

ENDINGS = (FactKind.COMPLETED, FactKind.FAILED, FactKind.CANCELLED)
"""The default events."""

OF_THE_JOB = "job"
"""The webhook id of the webhook that came with the job."""


class Webhook(msgspec.Struct, frozen=True, omit_defaults=True):
    url: str
    events: tuple[FactKind, ...] = ENDINGS


class WebhookSubscription(msgspec.Struct, frozen=True, omit_defaults=True):
    webhook_id: str
    url: str
    created_at: float
    owner: TenantId | None = None
    """The tenant whose jobs it covers and whose secret signs. None: the hub's own, which covers all jobs."""
    events: tuple[FactKind, ...] = ENDINGS
    name: str = ""


class SigningSecret(msgspec.Struct, frozen=True, omit_defaults=True):
    """Stored in plain form, because every delivery is signed with it."""

    secret: str
    created_at: float
    old_secret: str | None = None
    """The secret before the last rotation. Deliveries are signed with both until `old_until`."""
    old_until: float | None = None


class DeliveryStatus(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


class Delivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact for one webhook. Each attempt builds the body anew from the job."""

    job_id: JobId
    number: int
    """The number of the fact."""
    webhook_id: str
    owner: TenantId | None
    """The tenant that sees it and whose secret signs. None: the hub's operators."""
    url: str
    kind: FactKind
    round: int
    created_at: float
    next_at: float
    status: DeliveryStatus = DeliveryStatus.PENDING
    attempts: int = 0
    tries: int = 0
    """Attempts since the creation or the last manual retry. The limit applies to these."""
    claimed_until: float | None = None
    """Until this time the hub that is sending it owns the delivery. Then another hub may take it."""
    last_at: float | None = None
    last_status: int | None = None
    last_error: str | None = None
    ended_at: float | None = None

    @property
    def delivery_id(self) -> str:
        """Equal for every attempt from every hub, so a receiver recognises repeats."""
        return f"{self.job_id}_{self.number}_{self.webhook_id}"
