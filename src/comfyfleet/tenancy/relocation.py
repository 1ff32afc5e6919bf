"""Moves a tenant to another database: freezes its account, copies and compares its rows, switches over.

Any hub may repeat the whole from the beginning: nobody reads the copied rows before the switch. Jobs that end
meanwhile wait in the central store to be settled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy import tenants as policy
from comfyfleet.policy.accounting import problems
from comfyfleet.tenancy.claims import Claim, lost
from comfyfleet.tenancy.database.executor import Row
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.tenant_rows import PARTS
from comfyfleet.tenancy.tenants import REMEMBER_S, Tenants

_PAGE = 50
"""Small, because each row may hold a payload."""
_ERASE_PAGE = 500


class TenantRelocation:
    def __init__(
        self, tenants: Tenants, databases: TenantDatabases, sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._tenants = tenants
        self._databases = databases
        self._sleep = sleep

    async def move(self, tenant: Tenant, claim: Claim) -> Tenant:
        """Raises `Fault` if the move has to start again."""
        assert tenant.moving_to is not None, "a relocation has a target"
        tenant_id = tenant.tenant_id
        source = await self._databases.database_of(tenant)
        target = await self._databases.get(tenant.moving_to)
        # Then hubs refuse submissions with a clear message, before the frozen account does.
        await claim.report_step("all hubs to learn of the move")
        await self._sleep(REMEMBER_S)
        await claim.renew_if_due()
        await _freeze(source, tenant_id, claim)
        # If this froze the target too, both names lead to the same database: nothing to copy or erase.
        is_copied = await target.fence_of(tenant_id) != claim.fence
        if is_copied:
            await _freeze(target, tenant_id, claim)
            await self._copy(tenant_id, source, target, claim)
            if await self._difference(tenant_id, source, target, claim) is not None:
                # An earlier attempt may have left old rows there.
                await erase_all(target, tenant_id, claim)
                await self._copy(tenant_id, source, target, claim)
                if (part := await self._difference(tenant_id, source, target, claim)) is not None:
                    raise Fault(
                        f"cannot move tenant {tenant_id!r}: its copied {part} differ from the original ones; "
                        "nothing is lost, and the hub tries again"
                    )
            await _check_ledger(tenant_id, source)
        await claim.renew_if_due()
        if not await target.unfreeze_account(tenant_id, claim.fence):
            raise lost(tenant_id)
        return await self._tenants.change(
            tenant_id, lambda found: policy.complete_move(found, tenant, is_copied=is_copied)
        )

    async def clean_up(self, tenant: Tenant, claim: Claim) -> Tenant:
        """Erases the old rows once nobody reads them any more."""
        assert tenant.moved_from is not None, "the tenant has moved"
        name = tenant.moved_from
        await self._sleep(2 * REMEMBER_S)
        await claim.renew_if_due()
        database = await self._databases.get(name)
        await _freeze(database, tenant.tenant_id, claim)
        await erase_all(database, tenant.tenant_id, claim)
        return await self._tenants.change(
            tenant.tenant_id, lambda found: policy.complete_cleanup(found, name)
        )

    async def _copy(
        self, tenant: TenantId, source: TenantDatabase, target: TenantDatabase, claim: Claim
    ) -> None:
        for part in PARTS:
            await claim.report_step(f"its {part} to be copied")
            last: Row | None = None
            while page := await source.rows_of(tenant, part, after=last, limit=_PAGE):
                await claim.renew_if_due()
                if not await target.import_rows(tenant, claim.fence, part, page):
                    raise lost(tenant)
                if len(page) < _PAGE:
                    break
                last = page[-1]

    async def _difference(
        self, tenant: TenantId, source: TenantDatabase, target: TenantDatabase, claim: Claim
    ) -> str | None:
        """The first part that differs."""
        for part in PARTS:
            await claim.report_step(f"its {part} to be compared")
            last: Row | None = None
            while True:
                await claim.renew_if_due()
                here = await source.rows_of(tenant, part, after=last, limit=_PAGE)
                if here != await target.rows_of(tenant, part, after=last, limit=_PAGE):
                    return part
                if len(here) < _PAGE:
                    break
                last = here[-1]
        return None


async def erase_all(database: TenantDatabase, tenant: TenantId, claim: Claim) -> None:
    while True:
        await claim.renew_if_due()
        erased = await database.erase(tenant, claim.fence, _ERASE_PAGE)
        if erased is None:
            raise lost(tenant)
        if not erased:
            return


async def _check_ledger(tenant: TenantId, database: TenantDatabase) -> None:
    try:
        wrong = problems(await database.ledger(tenant))
    except Refusal:
        # Too long to read as a whole; `_difference` has compared every entry.
        return
    if wrong:
        raise Fault(f"cannot move tenant {tenant!r}: its ledger is wrong ({wrong[0]}); correct it first")


async def _freeze(database: TenantDatabase, tenant: TenantId, claim: Claim) -> None:
    if not await database.freeze_account(tenant, claim.fence):
        raise lost(tenant)
