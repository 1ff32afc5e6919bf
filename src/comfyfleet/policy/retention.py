"""How long each kind of record is kept, in one place: days from the moment when nothing more happens to it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

DAY_S = 86400.0

Days = Annotated[float, Meta(ge=1 / 24)]
"""An hour at least: what is on its way must find what it is about."""


class Retention(msgspec.Struct, frozen=True):
    completed_days: Days = 1.0
    """Jobs with everything that is kept with them: payload, result, facts, attempts, reference."""
    cancelled_days: Days = 1.0
    failed_days: Days = 7.0
    """The dead letter."""
    delivered_days: Days = 1.0
    """What was sent to webhooks …"""
    undelivered_days: Days = 7.0
    """… and what was given up."""
    offline_workers_days: Days = 7.0
    files_days: Days = 7.0
    """From the moment it was made; a file that an open job brings stays."""
    audit_days: Days = 90.0
    """What operators did …"""
    audit_jobs_days: Days = 7.0
    """… and what callers did to jobs."""
    events_days: Days = 30.0
    """In tenants' databases: which events of the store were taken in. Settlements say the same, and stay."""


RULES = {
    "completed_days": "keep_completed_s",
    "cancelled_days": "keep_cancelled_s",
    "failed_days": "keep_failed_s",
    "delivered_days": "keep_delivered_s",
    "undelivered_days": "keep_undelivered_s",
    "offline_workers_days": "keep_offline_workers_s",
}
"""What the engine's rules call those that they have."""
