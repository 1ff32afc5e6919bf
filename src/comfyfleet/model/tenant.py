"""Whose jobs they are: a tenant as an operator set it up. What is private to it lies in the database of its pool.

On which terms a tenant has its part of the fleet, and how much it has had of it so far.

Virtual time is GPU-seconds divided by the tenant's weight. A lease is charged with an estimate, which is put right when
it ends. What is computed with these numbers stands here, because every store computes it alike.
"""

from __future__ import annotations

from collections.abc import Iterable
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


DEFAULT_CHARGE_S = 10.0
"""What a lease is charged with where nothing is known of the workflow."""


class TenantTerms(msgspec.Struct, frozen=True, omit_defaults=True):
    tenant: TenantId
    weight: float = 1.0
    """Twice the weight, twice the part of the fleet while others wait too."""
    max_leased: int | None = None
    """So many of its jobs may run at once. None: as many as there are workers."""
    held_until: float | None = None
    """None of its jobs is leased before that time; infinity means until it is said otherwise."""

    def __post_init__(self) -> None:
        assert 0 < self.weight < float("inf"), "a weight is a number above zero"
        assert self.max_leased is None or self.max_leased >= 0

    def is_held(self, now: float) -> bool:
        return self.held_until is not None and now < self.held_until


class TenantShare(msgspec.Struct, frozen=True):
    """What a tenant has had, and has now. Jobs are counted from when the first tenant of the fleet got terms."""

    tenant: TenantId
    virtual_time: float = 0.0
    """Never falls."""
    credit: float = 0.0
    """What it was charged too much: deducted from what it is charged next."""
    waiting: int = 0
    leased: int = 0
    is_behind: bool = False
    """It was kept out, held or at its cap, and may have fallen behind through no wait of its own: with its next lease
    it starts anew, and until then nobody is measured by it."""
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

    def is_out(self, now: float) -> bool:
        """Nothing of it may be leased now."""
        return self.terms is not None and (self.is_at_cap or self.terms.is_held(now))

    def charged(self, by: float) -> TenantShare:
        """After so much more virtual time, or less: what is too much never makes it fall."""
        if by < 0:
            return msgspec.structs.replace(self, credit=self.credit - by)
        taken = max(0.0, by - self.credit)
        return msgspec.structs.replace(
            self, virtual_time=self.virtual_time + taken, credit=max(0.0, self.credit - by)
        )

    def started(self, at: float) -> TenantShare:
        return msgspec.structs.replace(self, virtual_time=max(self.virtual_time, at))


def start_among(others: Iterable[TenantShare], greatest: float) -> float:
    """The virtual time at which a tenant begins to take part: no credit is banked while it has nothing to do.

    That of the least served of those that are being served; where nobody is, of those that wait. One that waits for
    a worker that nobody has does not count while others run: it may wait for ever. Where nobody takes part, the
    greatest virtual time of all: those who were served before must not pay for having been alone.
    """
    ranked = [((each.is_behind, each.leased == 0), each.virtual_time) for each in others if each.is_open]
    return min(ranked)[1] if ranked else greatest
