"""The terms of a tenant have changed: its waiting jobs are judged by them, page by page, by one hub at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy import tenants as policy
from comfyfleet.ports import Store
from comfyfleet.tenancy.claims import Claim
from comfyfleet.tenancy.tenants import REMEMBER_S, Tenants

_PAGE = 200

JudgeAgain = Callable[[JobId, Tenant], Awaitable[None]]


class TermsJudge:
    """`judge_again` is the engine's."""

    def __init__(
        self,
        central: Store,
        tenants: Tenants,
        judge_again: JudgeAgain,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._central = central
        self._tenants = tenants
        self._judge_again = judge_again
        self._sleep = sleep

    async def judge(self, tenant: Tenant, claim: Claim) -> Tenant:
        """Every job that another hub took by the old terms is in the queue by then."""
        await self._sleep(2 * REMEMBER_S)
        for phase in (Phase.QUEUED, Phase.LEASED):
            after: JobId | None = None
            while True:
                page = await self._central.records.listing(
                    tenant=tenant.tenant_id, phase=phase, limit=_PAGE, after=after
                )
                for stub in page:
                    await claim.keep()
                    await self._judge_again(stub.job_id, tenant)
                if len(page) < _PAGE:
                    break
                after = page[-1].job_id
        return await self._tenants.change(
            tenant.tenant_id, lambda found: policy.judged(found, tenant.terms_number)
        )
