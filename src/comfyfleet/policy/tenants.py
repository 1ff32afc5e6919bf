"""What may become of a tenant: changed, suspended, moved to another pool, deleted.

Pure: each answers with the tenant as it is to be, or refuses.

Which workers a tenant may know by name. Of all others it learns how many there are and why they do not take its job.

A worker that is listed for a tenant is that tenant's to know. So is one that holds or held a job of it, since the name
stands in that job. Everything else about the fleet is the operator's (docs/decisions/0032).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from comfyfleet.model.calls import WorkerMismatch
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkerId
from comfyfleet.model.ledger import ServicePrice
from comfyfleet.model.tenant import Tenant, TenantState, TenantTerms
from comfyfleet.model.worker import TenantAccess
from comfyfleet.policy import accounting

_RETRY_S = 5.0
_JUDGED_BY = (
    "tier",
    "isolation",
    "location",
    "allows_direct",
    "node_classes",
    "denied_node_classes",
    "models",
    "denied_models",
    "caps",
)


def changed(tenant: Tenant, fields: dict[str, Any]) -> Tenant:
    _check_stays(tenant)
    made = replace(tenant, **fields)
    check_terms(made)
    if any(getattr(made, name) != getattr(tenant, name) for name in _JUDGED_BY):
        made = replace(made, terms_number=made.terms_number + 1)
    return made


def judged(tenant: Tenant, number: int) -> Tenant:
    """Its waiting jobs were judged by the terms of that number."""
    return replace(tenant, judged_number=max(tenant.judged_number, number))


def check_terms(tenant: Tenant) -> None:
    """What cannot be charged, or not be trusted, is not agreed upon."""
    if tenant.price is None:
        return
    if not isinstance(tenant.price, ServicePrice):
        accounting.ceiling(tenant.price, "")
    if tenant.allows_direct and accounting.is_told_by_worker(tenant.price):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            "a tenant that pays by what a run took or left cannot allow direct workers, which nobody checks: "
            "choose a flat price or one by service, or leave allows_direct out",
        )


def suspended(tenant: Tenant) -> Tenant:
    _check_stays(tenant)
    if tenant.state is TenantState.MOVING:
        return replace(tenant, returns_to=TenantState.SUSPENDED)
    return replace(tenant, state=TenantState.SUSPENDED)


def resumed(tenant: Tenant) -> Tenant:
    _check_stays(tenant)
    if tenant.state is TenantState.MOVING:
        return replace(tenant, returns_to=TenantState.ACTIVE)
    return replace(tenant, state=TenantState.ACTIVE)


def terms_of(tenant: Tenant) -> TenantTerms:
    """How the fleet is shared out to it. Of one that is suspended or on its way nothing is leased."""
    held_until = None if tenant.state is TenantState.ACTIVE else float("inf")
    return TenantTerms(tenant.tenant_id, tenant.weight, tenant.caps.max_running, held_until)


def moving(tenant: Tenant, pool: str, now: float) -> Tenant:
    """On its way to another pool; on its way back, if it is not there yet and its own is named."""
    _check_stays(tenant)
    if tenant.state is TenantState.MOVING:
        if pool == tenant.moving_to:
            return tenant
        if pool != tenant.pool:
            raise Refusal(
                RefusalCode.WRONG_PHASE,
                f"tenant {tenant.tenant_id!r} is on its way to the pool {tenant.moving_to!r}: wait for it, or call it "
                f"back by naming {tenant.pool!r}",
            )
        return replace(tenant, moving_to=pool, moving_since=now, moved_from=tenant.moving_to)
    if pool == tenant.pool:
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"tenant {tenant.tenant_id!r} lies in the pool {pool!r} already"
        )
    if tenant.moved_from is not None:
        raise Refusal(
            RefusalCode.UNAVAILABLE,
            f"what tenant {tenant.tenant_id!r} left in the pool {tenant.moved_from!r} is still being erased: "
            "try again in a moment",
            retry_after_s=_RETRY_S,
        )
    return replace(
        tenant, state=TenantState.MOVING, returns_to=tenant.state, moving_to=pool, moving_since=now
    )


def arrived(tenant: Tenant, as_begun: Tenant, *, is_copied: bool) -> Tenant:
    """`as_begun`: as whoever moved it found it. What was called back or done by another since then stays as it is."""
    is_same = tenant.state is TenantState.MOVING and tenant.moving_since == as_begun.moving_since
    if not is_same or tenant.moving_to is None:
        raise Refusal(RefusalCode.WRONG_PHASE, f"tenant {tenant.tenant_id!r} is not on this way any more")
    return replace(
        tenant,
        pool=tenant.moving_to,
        state=tenant.returns_to,
        moving_to=None,
        moving_since=None,
        moved_from=tenant.pool if is_copied else tenant.moved_from,
    )


def tidied(tenant: Tenant, pool: str) -> Tenant:
    """Nothing of it is left in that pool."""
    return replace(tenant, moved_from=None) if tenant.moved_from == pool else tenant


def leaving(tenant: Tenant, confirm: str | None) -> Tenant:
    if confirm != tenant.tenant_id:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"with tenant {tenant.tenant_id!r} go its jobs, files, keys and credits, for good: "
            f"say so with confirm={tenant.tenant_id}",
        )
    return replace(tenant, state=TenantState.LEAVING)


def check_open(tenant: Tenant) -> None:
    """Whether its book may be written to now."""
    _check_stays(tenant)
    if tenant.state is TenantState.MOVING:
        raise Refusal(
            RefusalCode.UNAVAILABLE,
            f"tenant {tenant.tenant_id!r} is being moved to the pool {tenant.moving_to!r}: try again in a moment",
            retry_after_s=_RETRY_S,
        )


def _check_stays(tenant: Tenant) -> None:
    if tenant.state is TenantState.LEAVING:
        raise Refusal(
            RefusalCode.WRONG_PHASE,
            f"tenant {tenant.tenant_id!r} is being deleted: nothing of it can be changed",
        )


ANOTHER = WorkerId("another worker")


def is_known_to(access: TenantAccess, tenant: TenantId | None) -> bool:
    """None: an operator, who knows all of them."""
    return tenant is None or (tenant in access.allowed and tenant not in access.denied)


def name_for(worker_id: WorkerId, access: TenantAccess, tenant: TenantId | None) -> WorkerId:
    return worker_id if is_known_to(access, tenant) else ANOTHER


def asker_of(tenant: TenantId) -> TenantId | None:
    """For whom an answer about a job of this tenant is written. Where nobody set up tenants, it is the operator."""
    return None if tenant == DEFAULT_TENANT else tenant


def merged(reasons: Iterable[WorkerMismatch]) -> tuple[WorkerMismatch, ...]:
    """Workers without a name are told together where their reasons are the same."""
    found: dict[tuple[WorkerId, tuple[str, ...]], WorkerMismatch] = {}
    for each in reasons:
        key = (each.worker_id, each.reasons)
        before = found.get(key)
        if before is None or each.worker_id != ANOTHER:
            found[key] = each
        else:
            found[key] = WorkerMismatch(ANOTHER, each.reason, each.reasons, before.count + 1)
    return tuple(found.values())
