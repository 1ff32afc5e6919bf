"""Tenants: their settings, their terms of service, and their share of the fleet.

Virtual time is GPU-seconds divided by the tenant's weight. A lease is charged with an estimate, which the end of the
lease corrects. The formulas are here because every store applies them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from comfyfleet.model.bounds import Priority
from comfyfleet.model.ids import TenantId
from comfyfleet.model.ledger import Price
from comfyfleet.model.requirement import Isolation, LocationNeed

Bound = Annotated[int, Meta(ge=0, le=10**9)]
Wait = Annotated[float, Meta(gt=0, le=10 * 365 * 24 * 3600)]
Weight = Annotated[float, Meta(gt=0, le=1_000_000)]


class TenantState(StrEnum):
    ACTIVE = "active"
    SUSPENDED = "suspended"
    """No submits and no leases. Running jobs may end."""
    MOVING = "moving"
    """Its rows are being moved to another database. No submits until then."""
    LEAVING = "leaving"
    """The tenant and its resources are being deleted."""


class TenantCaps(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of a tenant. None: no limit."""

    max_waiting: Bound | None = None
    """Open jobs, running ones included."""
    max_running: Bound | None = None
    submits_per_minute: Bound | None = None
    max_priority: Priority | None = None
    max_nodes: Bound | None = None
    max_steps: Bound | None = None
    """Steps of any sampler in the graph."""
    max_pixels: Bound | None = None
    """Width × height of any picture in the graph."""
    max_batch: Bound | None = None
    """Batch size of any node in the graph."""


class Tenant(msgspec.Struct, frozen=True, omit_defaults=True):
    tenant_id: TenantId
    database: str = msgspec.field(name="pool")
    """The tenant database that holds its jobs, files and credits. Stored under its old name."""
    created_at: float
    name: str = ""
    state: TenantState = TenantState.ACTIVE
    price: Price | None = None
    """The price of a job. None: jobs are free."""
    weight: Weight = 1.0
    """Its share of the fleet relative to other tenants."""
    tier: int = 0
    """Added to the priority of each of its jobs."""
    isolation: Isolation = "none"
    """The minimum isolation of its jobs."""
    location: LocationNeed = LocationNeed()
    """Where its jobs must run, in addition to their own requirements."""
    allows_direct: bool = False
    """The central store may also hold its payloads, where direct workers read them."""
    node_classes: tuple[str, ...] | None = None
    """Patterns of the allowed classes. None: any."""
    denied_node_classes: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None
    """Patterns of the allowed models. None: any."""
    denied_models: tuple[str, ...] = ()
    caps: TenantCaps = TenantCaps()
    unrunnable_after: Wait | None = None
    """After so many seconds, waiting jobs that no known worker can run fail. None: the hub's setting."""
    terms_number: int = 0
    """Grows with each change of the terms. `judged_number` follows when waiting jobs were checked again."""
    judged_number: int = 0
    moving_to: str | None = None
    moving_since: float | None = None
    returns_to: TenantState = TenantState.ACTIVE
    """The state after the move."""
    moved_from: str | None = None
    """The old database, while its rows there are being deleted."""


DEFAULT_CHARGE_S = 10.0
"""What fair share counts for a lease if the workflow has no statistics, in GPU-seconds. Credits are not meant."""


class TenantTerms(msgspec.Struct, frozen=True, omit_defaults=True):
    tenant: TenantId
    weight: float = 1.0
    """Twice the weight gives twice the share while other tenants wait too."""
    max_leased: int | None = None
    """How many of its jobs may run at once. None: no limit."""
    held_until: float | None = None
    """None of its jobs is leased before this time. Infinity: until the terms change."""

    def __post_init__(self) -> None:
        assert 0 < self.weight < float("inf"), "a weight is a number above zero"
        assert self.max_leased is None or self.max_leased >= 0

    def is_held(self, now: float) -> bool:
        return self.held_until is not None and now < self.held_until


class TenantShare(msgspec.Struct, frozen=True):
    """A tenant's usage. Jobs are counted from the time when the first tenant of the fleet got terms."""

    tenant: TenantId
    virtual_time: float = 0.0
    """Never decreases."""
    credit: float = 0.0
    """An overcharge, which the next charges are reduced by."""
    waiting: int = 0
    leased: int = 0
    is_behind: bool = False
    """The tenant was held or at its cap and may have fallen behind without having to wait for others. Its next lease
    starts it anew. Until then it does not count as the least served tenant."""
    terms: TenantTerms | None = None

    @property
    def weight(self) -> float:
        return 1.0 if self.terms is None else self.terms.weight

    @property
    def is_open(self) -> bool:
        return self.waiting > 0 or self.leased > 0

    @property
    def is_at_cap(self) -> bool:
        return (
            self.terms is not None
            and self.terms.max_leased is not None
            and self.leased >= self.terms.max_leased
        )

    def is_excluded(self, now: float) -> bool:
        """None of its jobs may be leased now."""
        return self.terms is not None and (self.is_at_cap or self.terms.is_held(now))

    def charged(self, by: float) -> TenantShare:
        """Add virtual time. A negative amount becomes credit, so virtual time never decreases."""
        if by < 0:
            return msgspec.structs.replace(self, credit=self.credit - by)
        taken = max(0.0, by - self.credit)
        return msgspec.structs.replace(
            self, virtual_time=self.virtual_time + taken, credit=max(0.0, self.credit - by)
        )

    def started(self, at: float) -> TenantShare:
        return msgspec.structs.replace(self, virtual_time=max(self.virtual_time, at))


def start_among(others: Iterable[TenantShare], greatest: float) -> float:
    """The virtual time at which a tenant starts, so that it banks no credit while it is idle.

    This is the least virtual time of the tenants with running jobs; without any, of those with waiting jobs. A tenant
    that only waits does not count while others run, because no worker may ever fit it. If no tenant is open, it is
    the greatest virtual time, so that a tenant that was alone does not pay for that.
    """
    ranked = [((each.is_behind, each.leased == 0), each.virtual_time) for each in others if each.is_open]
    return min(ranked)[1] if ranked else greatest
