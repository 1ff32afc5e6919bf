"""Changes of a tenant, and which workers a tenant may know by name. Pure: each function returns a value or refuses.

A tenant knows the workers that list it, and those that hold or held one of its jobs. Of all others it learns only
their number and their reasons (docs/decisions/0032).
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


def terms_reviewed(tenant: Tenant, number: int) -> Tenant:
    """The waiting jobs have been checked with the terms of this number."""
    return replace(tenant, judged_number=max(tenant.judged_number, number))


def check_terms(tenant: Tenant) -> None:
    """Refuse prices that cannot be charged or verified."""
    if tenant.price is None:
        return
    if not isinstance(tenant.price, ServicePrice):
        accounting.ceiling(tenant.price, "")
    if tenant.allows_direct and accounting.depends_on_worker_report(tenant.price):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            "a tenant with a price by usage cannot allow direct workers, because no hub verifies their reports: "
            "choose a flat price or one by service, or leave out allows_direct",
        )


def suspended(tenant: Tenant) -> Tenant:
    return _in_state(tenant, TenantState.SUSPENDED)


def resumed(tenant: Tenant) -> Tenant:
    return _in_state(tenant, TenantState.ACTIVE)


def _in_state(tenant: Tenant, state: TenantState) -> Tenant:
    """A tenant that is being moved gets the state after the move."""
    _check_stays(tenant)
    if tenant.state is TenantState.MOVING:
        return replace(tenant, returns_to=state)
    return replace(tenant, state=state)


def terms_of(tenant: Tenant) -> TenantTerms:
    """The terms for fair share. Only jobs of an active tenant are leased."""
    held_until = None if tenant.state is TenantState.ACTIVE else float("inf")
    return TenantTerms(tenant.tenant_id, tenant.weight, tenant.caps.max_running, held_until)


def start_move(tenant: Tenant, database: str, now: float) -> Tenant:
    """Start a move to another database, or cancel a running move by naming the current one."""
    _check_stays(tenant)
    if tenant.state is TenantState.MOVING:
        if database == tenant.moving_to:
            return tenant
        if database != tenant.database:
            raise Refusal(
                RefusalCode.WRONG_PHASE,
                f"tenant {tenant.tenant_id!r} is being moved to the database {tenant.moving_to!r}: wait, or cancel the "
                f"move by naming {tenant.database!r}",
            )
        return replace(tenant, moving_to=database, moving_since=now, moved_from=tenant.moving_to)
    if database == tenant.database:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"tenant {tenant.tenant_id!r} is already in the database {database!r}",
        )
    if tenant.moved_from is not None:
        raise Refusal(
            RefusalCode.UNAVAILABLE,
            f"the rows of tenant {tenant.tenant_id!r} in the database {tenant.moved_from!r} are still being deleted: "
            "try again in a moment",
            retry_after_s=_RETRY_S,
        )
    return replace(
        tenant, state=TenantState.MOVING, returns_to=tenant.state, moving_to=database, moving_since=now
    )


def complete_move(tenant: Tenant, as_begun: Tenant, *, is_copied: bool) -> Tenant:
    """Complete a move. `as_begun` is the tenant at its start: a move that was cancelled or completed is refused."""
    is_same = tenant.state is TenantState.MOVING and tenant.moving_since == as_begun.moving_since
    if not is_same or tenant.moving_to is None:
        raise Refusal(RefusalCode.WRONG_PHASE, f"this move of tenant {tenant.tenant_id!r} is over")
    return replace(
        tenant,
        database=tenant.moving_to,
        state=tenant.returns_to,
        moving_to=None,
        moving_since=None,
        moved_from=tenant.database if is_copied else tenant.moved_from,
    )


def complete_cleanup(tenant: Tenant, database: str) -> Tenant:
    """The old database has no more rows of the tenant."""
    return replace(tenant, moved_from=None) if tenant.moved_from == database else tenant


def start_deletion(tenant: Tenant, confirm: str | None) -> Tenant:
    if confirm != tenant.tenant_id:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"this deletes tenant {tenant.tenant_id!r} with its jobs, files, keys and credits for ever: "
            f"confirm it with confirm={tenant.tenant_id}",
        )
    return replace(tenant, state=TenantState.LEAVING)


def check_open(tenant: Tenant) -> None:
    """Refuse writes to the ledger of a tenant that is being moved or deleted."""
    _check_stays(tenant)
    if tenant.state is TenantState.MOVING:
        raise Refusal(
            RefusalCode.UNAVAILABLE,
            f"tenant {tenant.tenant_id!r} is being moved to the database {tenant.moving_to!r}: try again in a moment",
            retry_after_s=_RETRY_S,
        )


def _check_stays(tenant: Tenant) -> None:
    if tenant.state is TenantState.LEAVING:
        raise Refusal(
            RefusalCode.WRONG_PHASE,
            f"tenant {tenant.tenant_id!r} is being deleted and cannot be changed",
        )


ANOTHER = WorkerId("another worker")


def is_known_to(access: TenantAccess, tenant: TenantId | None) -> bool:
    """Whether the tenant may know the worker's name. None: an operator, who knows all."""
    return tenant is None or (tenant in access.allowed and tenant not in access.denied)


def name_for(worker_id: WorkerId, access: TenantAccess, tenant: TenantId | None) -> WorkerId:
    return worker_id if is_known_to(access, tenant) else ANOTHER


def reader_of(tenant: TenantId) -> TenantId | None:
    """The reader of an answer about a job of this tenant. Without tenants it is the operator (None)."""
    return None if tenant == DEFAULT_TENANT else tenant


def merged(reasons: Iterable[WorkerMismatch]) -> tuple[WorkerMismatch, ...]:
    """Merge workers without a name that have the same reasons."""
    found: dict[tuple[WorkerId, tuple[str, ...]], WorkerMismatch] = {}
    for each in reasons:
        key = (each.worker_id, each.reasons)
        before = found.get(key)
        if before is None or each.worker_id != ANOTHER:
            found[key] = each
        else:
            found[key] = WorkerMismatch(ANOTHER, each.reason, each.reasons, before.count + 1)
    return tuple(found.values())
