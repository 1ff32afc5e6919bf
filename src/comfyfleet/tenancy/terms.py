"""Applies changed terms of a tenant to its open jobs and to its fair share of the fleet.

The hub that changes a tenant updates the central store at once; `FairShareSync.compare` finds what a crash
left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.tenant import Tenant, TenantTerms
from comfyfleet.paginator import record_pages
from comfyfleet.policy import tenants as policy
from comfyfleet.policy.tenants import terms_of
from comfyfleet.ports import FairShare, Store
from comfyfleet.tenancy.claims import Claim
from comfyfleet.tenancy.tenants import REMEMBER_S, Tenants

_PAGE = 200

ReapplyTerms = Callable[[JobId, Tenant], Awaitable[None]]


class TermsReview:
    def __init__(
        self,
        central: Store,
        tenants: Tenants,
        reapply_terms: ReapplyTerms,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._central = central
        self._tenants = tenants
        self._reapply_terms = reapply_terms
        self._sleep = sleep

    async def review(self, tenant: Tenant, claim: Claim) -> Tenant:
        # Then all jobs that other hubs accepted under the old terms are in the queue.
        await self._sleep(2 * REMEMBER_S)
        for phase in (Phase.QUEUED, Phase.LEASED):
            async for page in record_pages(self._central.records, tenant.tenant_id, phase, _PAGE):
                for stub in page:
                    await claim.renew_if_due()
                    await self._reapply_terms(stub.job_id, tenant)
        return await self._tenants.change(
            tenant.tenant_id, lambda found: policy.terms_reviewed(found, tenant.terms_number)
        )


class FairShareSync:
    def __init__(self, shares: FairShare) -> None:
        self._shares = shares

    async def put(self, tenant: Tenant) -> None:
        await self._shares.put_terms(terms_of(tenant))

    async def remove(self, tenant_id: TenantId) -> None:
        await self._shares.remove_terms(tenant_id)

    async def compare(self, tenants: Iterable[Tenant]) -> None:
        """`tenants` are all that exist: terms of others are removed."""
        known = {terms.tenant: terms for terms in await self._shares.terms()}
        for tenant in tenants:
            there = known.pop(tenant.tenant_id, None)
            if there is None or _lasting(there) != terms_of(tenant):
                await self.put(tenant)
        for tenant_id in known:
            await self.remove(tenant_id)


def _lasting(terms: TenantTerms) -> TenantTerms:
    """Without a short pause, which an unreachable database causes."""
    is_short = terms.held_until is not None and terms.held_until != float("inf")
    return TenantTerms(terms.tenant, terms.weight, terms.max_leased) if is_short else terms
