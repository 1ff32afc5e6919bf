"""Tenants in the API, and the differences that reconciliation finds between the store and tenant databases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from comfyfleet.model.ledger import HoldId, Price
from comfyfleet.model.requirement import Isolation, LocationNeed
from comfyfleet.model.tenant import Tenant, TenantCaps, TenantState, Wait, Weight
from comfyfleet.wire.bodies import LocationBody, Name, Names, Priority
from comfyfleet.wire.route import ADMIN, OPERATORS, get_route, of_noun, post_route

TenantName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")]
Text = Annotated[str, Meta(max_length=256)]


class TenantBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    id: TenantName
    pool: Name = "default"
    """The tenant database for its jobs, files and credits: a name from the hub's settings."""
    name: Text = ""
    price: Price | None = None
    """How jobs are priced. Default: they cost nothing."""
    weight: Weight = 1.0
    tier: Priority = 0
    isolation: Isolation = "none"
    location: LocationBody = LocationBody()
    allows_direct: bool = False
    node_classes: Names | None = None
    denied_node_classes: Names = ()
    models: Names | None = None
    denied_models: Names = ()
    caps: TenantCaps = TenantCaps()
    unrunnable_after: Wait | None = None
    """Seconds after which a waiting job that no known worker can run fails. Default: the hub's setting."""


class TenantChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields that are left out stay as they are. Lists and caps are replaced as a whole."""

    name: Text | UnsetType = UNSET
    price: Price | UnsetType | None = UNSET
    """How jobs are priced; null: they cost nothing. Open rounds keep the price with which they began."""
    weight: Weight | UnsetType = UNSET
    tier: Priority | UnsetType = UNSET
    isolation: Isolation | UnsetType = UNSET
    location: LocationBody | UnsetType = UNSET
    allows_direct: bool | UnsetType = UNSET
    node_classes: Names | UnsetType | None = UNSET
    denied_node_classes: Names | UnsetType = UNSET
    models: Names | UnsetType | None = UNSET
    denied_models: Names | UnsetType = UNSET
    caps: TenantCaps | UnsetType = UNSET
    unrunnable_after: Wait | UnsetType | None = UNSET


class MoveBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pool: Name


class DeleteQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    confirm: Name | None = None


class TenantView(msgspec.Struct, frozen=True):
    id: str
    pool: str
    state: TenantState
    created_at: float
    name: str
    price: Price | None
    weight: float
    tier: int
    isolation: Isolation
    location: LocationNeed
    allows_direct: bool
    node_classes: tuple[str, ...] | None
    denied_node_classes: tuple[str, ...]
    models: tuple[str, ...] | None
    denied_models: tuple[str, ...]
    caps: TenantCaps
    moving_to: str | None = None
    unrunnable_after: float | None = None
    waits_for: str | None = None
    """What a move or deletion of the tenant is waiting for."""


class TenantList(msgspec.Struct, frozen=True):
    tenants: tuple[TenantView, ...]
    cursor: str | None = None


def view(tenant: Tenant, waits_for: str | None = None) -> TenantView:
    own = ("id", "waits_for")
    fields = {name: getattr(tenant, name) for name in TenantView.__struct_fields__ if name not in own}
    return TenantView(id=tenant.tenant_id, **fields, waits_for=waits_for)


def asked_for(body: TenantBody | TenantChange) -> dict[str, Any]:
    """The fields of a tenant that the body contains."""
    found = {
        name: value for name in TenantChange.__struct_fields__ if (value := getattr(body, name)) is not UNSET
    }
    if "location" in found:
        found["location"] = LocationNeed(found["location"].region, found["location"].compliance)
    return found


class FindingView(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: str
    tenant: str
    message: str
    mends_itself: bool
    """Whether the hub can repair it. Otherwise an operator has to."""
    job_id: str | None = None
    round: int | None = None


class FindingList(msgspec.Struct, frozen=True):
    findings: tuple[FindingView, ...]
    is_mended: bool
    """Whether the repairs were made. A dry run changes nothing."""


def finding_view(
    kind: str, tenant: str, message: str, mends_itself: bool, hold_id: HoldId | None
) -> FindingView:
    job_id, number = (None, None) if hold_id is None else hold_id
    return FindingView(kind, tenant, message, mends_itself, job_id, number)


def finding_list(found: Iterable[FindingView], *, is_mended: bool) -> FindingList:
    return FindingList(tuple(found), is_mended)


RECONCILING = of_noun(
    "tenants",
    get_route(
        "look_for_differences",
        "/api/reconcile",
        "Compare the store with the tenant databases and check every ledger; changes nothing",
        OPERATORS,
        FindingList,
    ),
    post_route(
        "reconcile",
        "/api/reconcile",
        "Compare and repair what can be repaired automatically; hubs do this every minute",
        ADMIN,
        FindingList,
    ),
)
