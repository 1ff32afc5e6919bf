"""Tenants in the API, and the differences that reconciliation finds between the store and tenant databases."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from comfyfleet.model.bounds import Name, Names, Priority, Text
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ledger import HoldId, Price
from comfyfleet.model.requirement import Isolation, LocationNeed
from comfyfleet.model.tenant import Tenant, TenantCaps, TenantState, Wait, Weight
from comfyfleet.wire.bodies import LocationBody, converted
from comfyfleet.wire.route import ADMIN, OPERATORS, get_route, post_route, tagged
from comfyfleet.wire.views import view_of

TenantName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")]


class TenantBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    id: TenantName
    database: Name | UnsetType = UNSET
    """The tenant database for its jobs, files and credits: a name from the hub's settings. Default: `default`."""
    pool: Name | UnsetType = UNSET
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
    database: Name | UnsetType = UNSET
    """The tenant database to move to: a name from the hub's settings. Required."""
    pool: Name | UnsetType = UNSET


class DeleteQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    confirm: Name | None = None


class TenantView(msgspec.Struct, frozen=True):
    id: str
    database: str
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
    return view_of(TenantView, tenant, id=tenant.tenant_id, pool=tenant.database, waits_for=waits_for)


def database_in(body: TenantBody | MoveBody, default: str | None = None) -> str:
    """The tenant database that the body names, as `database` or as `pool`, the old name."""
    names = {each for each in (body.database, body.pool) if each is not UNSET}
    if len(names) > 1:
        why = "`database` and `pool` are the same, but name different databases; `pool` is the old name: leave it out"
        raise Refusal(RefusalCode.INVALID_REQUEST, why)
    name = names.pop() if names else default
    if name is None:
        raise Refusal(RefusalCode.INVALID_REQUEST, "`database` is missing: the name of a tenant database")
    return name


def asked_for(body: TenantBody | TenantChange) -> dict[str, Any]:
    """The fields of a tenant that the body contains."""
    found = {
        name: value for name in TenantChange.__struct_fields__ if (value := getattr(body, name)) is not UNSET
    }
    if "location" in found:
        found["location"] = converted(found["location"], LocationNeed)
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


RECONCILING = tagged(
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
