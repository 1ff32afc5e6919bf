"""What may become of a tenant: changed, suspended, moved to another pool, deleted.

Pure: each answers with the tenant as it is to be, or refuses.
"""

from __future__ import annotations

from typing import Any

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ledger import FlatPrice, Price, ServicePrice
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.policy import accounting

_AGAIN_S = 5.0


def changed(tenant: Tenant, fields: dict[str, Any]) -> Tenant:
    _check_stays(tenant)
    made = msgspec.structs.replace(tenant, **fields)
    check_terms(made)
    return made


def check_terms(tenant: Tenant) -> None:
    """What cannot be charged, or not be trusted, is not agreed upon."""
    if tenant.price is None:
        return
    if not isinstance(tenant.price, ServicePrice):
        accounting.ceiling(tenant.price, "")
    if tenant.allows_direct and is_told_by_worker(tenant.price):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            "a tenant that pays by what a run took or left cannot allow direct workers, which nobody checks: "
            "choose a flat price or one by service, or leave allows_direct out",
        )


def is_told_by_worker(price: Price) -> bool:
    """Whether what it comes to depends on what the run reports."""
    return not isinstance(price, FlatPrice | ServicePrice)


def suspended(tenant: Tenant) -> Tenant:
    _check_stays(tenant)
    if tenant.state is TenantState.MOVING:
        return msgspec.structs.replace(tenant, returns_to=TenantState.SUSPENDED)
    return msgspec.structs.replace(tenant, state=TenantState.SUSPENDED)


def resumed(tenant: Tenant) -> Tenant:
    _check_stays(tenant)
    if tenant.state is TenantState.MOVING:
        return msgspec.structs.replace(tenant, returns_to=TenantState.ACTIVE)
    return msgspec.structs.replace(tenant, state=TenantState.ACTIVE)


def leaving(tenant: Tenant, confirm: str | None) -> Tenant:
    if confirm != tenant.tenant_id:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"with tenant {tenant.tenant_id!r} go its jobs, files, keys and credits, for good: "
            f"say so with confirm={tenant.tenant_id}",
        )
    return msgspec.structs.replace(tenant, state=TenantState.LEAVING)


def check_open(tenant: Tenant) -> None:
    """Whether its book may be written to now."""
    _check_stays(tenant)
    if tenant.state is TenantState.MOVING:
        raise Refusal(
            RefusalCode.UNAVAILABLE,
            f"tenant {tenant.tenant_id!r} is being moved to the pool {tenant.moving_to!r}: try again in a moment",
            retry_after_s=_AGAIN_S,
        )


def _check_stays(tenant: Tenant) -> None:
    if tenant.state is TenantState.LEAVING:
        raise Refusal(
            RefusalCode.WRONG_PHASE,
            f"tenant {tenant.tenant_id!r} is being deleted: nothing of it can be changed",
        )
