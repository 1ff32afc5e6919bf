"""Whose jobs they are: a tenant as an operator set it up. What is private to it lies in the database of its pool."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from comfyfleet.model.ids import TenantId
from comfyfleet.model.ledger import Price
from comfyfleet.model.requirement import Isolation, LocationNeed

Bound = Annotated[int, Meta(ge=0, le=10**9)]
Wait = Annotated[float, Meta(gt=0, le=10 * 365 * 24 * 3600)]
Weight = Annotated[float, Meta(gt=0, le=1_000_000)]


class TenantState(StrEnum):
    ACTIVE = "active"
    SUSPENDED = "suspended"
    """Nothing new is taken, and nothing of it is leased. What runs may end."""
    MOVING = "moving"
    """Its rows are on their way to another pool: nothing is taken until they are there."""
    LEAVING = "leaving"
    """It is being deleted, with everything of its own."""


class TenantCaps(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The most it may ask for. None: no bound of its own."""

    max_waiting: Bound | None = None
    """Open jobs: those that run are among them."""
    max_running: Bound | None = None
    submits_per_minute: Bound | None = None
    max_priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    max_nodes: Bound | None = None
    max_steps: Bound | None = None
    """Of any sampler in the graph."""
    max_pixels: Bound | None = None
    """Width × height of any picture the graph asks for."""
    max_batch: Bound | None = None
    """Pictures at once, as any node of the graph asks for."""


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True):
    tenant_id: TenantId
    pool: str
    """Where its jobs, files and credits lie."""
    created_at: float
    name: str = ""
    state: TenantState = TenantState.ACTIVE
    price: Price | None = None
    """What a job costs. None: nothing."""
    weight: Weight = 1.0
    """Its share of the fleet beside others'."""
    tier: int = 0
    """Added to the priority of each of its jobs."""
    isolation: Isolation = "none"
    """The least that its jobs ask for."""
    location: LocationNeed = LocationNeed()
    """Where its jobs must run, whatever they ask for."""
    allows_direct: bool = False
    """Its payloads may lie in the central store too, where workers without a hub read them."""
    node_classes: tuple[str, ...] | None = None
    """The only ones it may use, as patterns. None: any."""
    denied_node_classes: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    """The only ones it may use, as patterns. None: any."""
    denied_models: tuple[str, ...] = ()
    caps: TenantCaps = TenantCaps()
    unrunnable_after: Wait | None = None
    """Waiting jobs that no known worker can run fail after so many seconds. None: as the hub's setting says."""
    terms_number: int = 0
    """Grows with each change of what its jobs are judged by …"""
    judged_number: int = 0
    """… and this follows, once those that waited were judged again."""
    moving_to: str | None = None
    moving_since: float | None = None
    returns_to: TenantState = TenantState.ACTIVE
    """What it is again once it has been moved."""
    moved_from: str | None = None
    """Where what it left behind is still being erased."""
