"""Suspends a tenant for the hub itself: servers die of what it submits. An operator resumes it like any other.

When that is so is policy's (`policy/deadly.py`); the change is the one an operator makes, and stands in the audit log
under the hub's name.
"""

from __future__ import annotations

from comfyfleet.hub.audit import Audit
from comfyfleet.model.access import AuditEntry
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import TenantState
from comfyfleet.policy.tenants import suspended
from comfyfleet.tenancy.shares import ShareKeeper
from comfyfleet.tenancy.tenants import Tenants


class Suspending:
    def __init__(self, tenants: Tenants, shares: ShareKeeper, audit: Audit) -> None:
        self._tenants = tenants
        self._shares = shares
        self._audit = audit

    async def suspend(self, tenant_id: TenantId) -> bool:
        """False: nobody set it up, or it does not work now anyway."""
        tenant = await self._tenants.newest(tenant_id)
        if tenant is None or tenant.state is not TenantState.ACTIVE:
            return False
        changed = await self._audit.operation(
            AuditEntry(0.0, "hub", None, "tenant_suspended", tenant_id, tenant_id),
            lambda: self._tenants.change(tenant_id, suspended),
            lambda _: None,
        )
        await self._shares.keep(changed)
        return True
