"""What the central store must know of tenants to share the fleet out: their weights, their caps, and who is held.

It follows from what an operator said of them. Whoever changes a tenant says it here at once; what was missed, because a
hub died in between, is found by comparing.
"""

from __future__ import annotations

from collections.abc import Iterable

from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.model.terms import TenantTerms
from comfyfleet.policy.tenants import terms_of
from comfyfleet.ports import Shares


class ShareKeeper:
    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    async def keep(self, tenant: Tenant) -> None:
        await self._shares.put_terms(terms_of(tenant))

    async def forget(self, tenant_id: TenantId) -> None:
        await self._shares.remove_terms(tenant_id)

    async def compare(self, tenants: Iterable[Tenant]) -> None:
        """All there are."""
        known = {terms.tenant: terms for terms in await self._shares.terms()}
        for tenant in tenants:
            there = known.pop(tenant.tenant_id, None)
            if there is None or _lasting(there) != terms_of(tenant):
                await self.keep(tenant)
        for tenant_id in known:
            await self.forget(tenant_id)


def _lasting(terms: TenantTerms) -> TenantTerms:
    """Without a hold that ends by itself: its database is away for a moment."""
    is_short = terms.held_until is not None and terms.held_until != float("inf")
    return TenantTerms(terms.tenant, terms.weight, terms.max_leased) if is_short else terms
