"""Who is to be told of a job's facts over HTTP, and how far the telling is: webhooks, their secrets, deliveries.

A webhook comes with a job or stands for all jobs of a tenant. A delivery is one fact for one webhook; whether and when
it is tried again is `policy/webhook_delivery.py`'s.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import JobId, TenantId

ENDINGS = (FactKind.COMPLETED, FactKind.FAILED, FactKind.CANCELLED)
"""What is told unless more is asked for."""

OF_THE_JOB = "job"
"""In place of the id of a webhook: the one that came with the job."""


class Webhook(msgspec.Struct, frozen=True, omit_defaults=True):
    url: str
    events: tuple[FactKind, ...] = ENDINGS


class WebhookSubscription(msgspec.Struct, frozen=True, omit_defaults=True):
    webhook_id: str
    url: str
    created_at: float
    owner: TenantId | None = None
    """Whose jobs it hears of, and whose secret signs. None: the hub's own, which hears of everybody's."""
    events: tuple[FactKind, ...] = ENDINGS
    name: str = ""


class SigningSecret(msgspec.Struct, frozen=True, omit_defaults=True):
    """Kept as it is, not as a digest: every delivery is signed with it."""

    secret: str
    created_at: float
    old_secret: str | None = None
    """The one before the last rotation …"""
    old_until: float | None = None
    """… and until when deliveries are signed with it too."""


class DeliveryStatus(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"


class Delivery(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact for one webhook. What is sent is made anew from the job for each attempt."""

    job_id: JobId
    number: int
    """Of the fact."""
    webhook_id: str
    owner: TenantId | None
    """Who sees it, and whose secret signs. None: the hub's operators."""
    url: str
    kind: FactKind
    round: int
    created_at: float
    next_at: float
    status: DeliveryStatus = DeliveryStatus.PENDING
    attempts: int = 0
    tries: int = 0
    """Attempts since it was made or was last asked for again: what bounds them counts these."""
    claimed_until: float | None = None
    """Some hub is sending it; one that died is not waited for any longer than this."""
    last_at: float | None = None
    last_status: int | None = None
    last_error: str | None = None
    ended_at: float | None = None

    @property
    def delivery_id(self) -> str:
        """The same for every attempt and from every hub: by it a receiver knows a repeat."""
        return f"{self.job_id}_{self.number}_{self.webhook_id}"
