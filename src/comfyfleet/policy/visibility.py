"""Which workers a tenant may know by name. Of all others it learns how many there are and why they do not take its job.

A worker that is listed for a tenant is that tenant's to know. So is one that holds or held a job of it, since the name
stands in that job. Everything else about the fleet is the operator's (docs/decisions/0032).
"""

from __future__ import annotations

from collections.abc import Iterable

from comfyfleet.model.calls import MissingFor
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkerId
from comfyfleet.model.worker import TenantAccess

ANOTHER = WorkerId("another worker")


def is_known_to(access: TenantAccess, tenant: TenantId | None) -> bool:
    """None: an operator, who knows all of them."""
    return tenant is None or (tenant in access.allowed and tenant not in access.denied)


def name_for(worker_id: WorkerId, access: TenantAccess, tenant: TenantId | None) -> WorkerId:
    return worker_id if is_known_to(access, tenant) else ANOTHER


def asker_of(tenant: TenantId) -> TenantId | None:
    """For whom an answer about a job of this tenant is written. Where nobody set up tenants, it is the operator."""
    return None if tenant == DEFAULT_TENANT else tenant


def merged(reasons: Iterable[MissingFor]) -> tuple[MissingFor, ...]:
    """Workers without a name are told together where their reasons are the same."""
    found: dict[tuple[WorkerId, tuple[str, ...]], MissingFor] = {}
    for each in reasons:
        key = (each.worker_id, each.reasons)
        before = found.get(key)
        if before is None or each.worker_id != ANOTHER:
            found[key] = each
        else:
            found[key] = MissingFor(ANOTHER, each.reason, each.reasons, before.count + 1)
    return tuple(found.values())
