"""A tenant moves to another pool: its book is closed where it is, its rows are copied and compared, and one guarded
write says that it lives there now. Then what it left behind is erased.

Every step may be repeated, by this hub or another, from the beginning: rows that are there stay, and until the write
nobody reads them. Jobs that end meanwhile wait in the central store to be settled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy import tenants as policy
from comfyfleet.policy.accounting import problems
from comfyfleet.tenancy.claims import Claim, lost
from comfyfleet.tenancy.database.port import PARTS, Row, TenantDatabase
from comfyfleet.tenancy.database.registry import TenantDatabases
from comfyfleet.tenancy.tenants import REMEMBER_S, Tenants

_PAGE = 50
"""Rows at a time: each may hold a payload."""
_ERASE = 500


class TenantRelocation:
    def __init__(
        self, tenants: Tenants, pools: TenantDatabases, sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._tenants = tenants
        self._pools = pools
        self._sleep = sleep

    async def move(self, tenant: Tenant, claim: Claim) -> Tenant:
        """To where it says that it is going. Raises `Fault` where it has to be begun anew."""
        assert tenant.moving_to is not None, "whoever moves goes somewhere"
        tenant_id = tenant.tenant_id
        source, target = await self._pools.of(tenant), await self._pools.get(tenant.moving_to)
        # So that callers hear of it from their hubs, and not from a book that is closed.
        await claim.say("every hub to hear of it")
        await self._sleep(REMEMBER_S)
        await claim.keep()
        await _close(source, tenant_id, claim)
        # Closed there too, the other name leads to the same database: there is nothing to copy, and nothing to erase.
        is_copied = await target.fence_of(tenant_id) != claim.fence
        if is_copied:
            await _close(target, tenant_id, claim)
            await self._copy(tenant_id, source, target, claim)
            if await self._difference(tenant_id, source, target, claim) is not None:
                # What another attempt left long ago may be in the way.
                await erase_all(target, tenant_id, claim)
                await self._copy(tenant_id, source, target, claim)
                if (part := await self._difference(tenant_id, source, target, claim)) is not None:
                    raise Fault(
                        f"tenant {tenant_id!r} is not moved: its {part} in the other pool are not those it has; "
                        "nothing is lost, and it is tried again"
                    )
            await _check_ledger(tenant_id, source)
        await claim.keep()
        if not await target.unfreeze_account(tenant_id, claim.fence):
            raise lost(tenant_id)
        return await self._tenants.change(
            tenant_id, lambda found: policy.arrived(found, tenant, is_copied=is_copied)
        )

    async def tidy(self, tenant: Tenant, claim: Claim) -> Tenant:
        """Erases what it left behind, once nobody reads it any more."""
        assert tenant.moved_from is not None, "there is something to tidy"
        pool = tenant.moved_from
        await self._sleep(2 * REMEMBER_S)
        await claim.keep()
        database = await self._pools.get(pool)
        await _close(database, tenant.tenant_id, claim)
        await erase_all(database, tenant.tenant_id, claim)
        return await self._tenants.change(tenant.tenant_id, lambda found: policy.tidied(found, pool))

    async def _copy(
        self, tenant: TenantId, source: TenantDatabase, target: TenantDatabase, claim: Claim
    ) -> None:
        for part in PARTS:
            await claim.say(f"its {part} to be copied")
            last: Row | None = None
            while page := await source.rows_of(tenant, part, after=last, limit=_PAGE):
                await claim.keep()
                if not await target.take_rows(tenant, claim.fence, part, page):
                    raise lost(tenant)
                if len(page) < _PAGE:
                    break
                last = page[-1]

    async def _difference(
        self, tenant: TenantId, source: TenantDatabase, target: TenantDatabase, claim: Claim
    ) -> str | None:
        """The first part that is not the same on both sides."""
        for part in PARTS:
            await claim.say(f"its {part} to be compared")
            last: Row | None = None
            while True:
                await claim.keep()
                here = await source.rows_of(tenant, part, after=last, limit=_PAGE)
                if here != await target.rows_of(tenant, part, after=last, limit=_PAGE):
                    return part
                if len(here) < _PAGE:
                    break
                last = here[-1]
        return None


async def erase_all(database: TenantDatabase, tenant: TenantId, claim: Claim) -> None:
    while True:
        await claim.keep()
        erased = await database.erase(tenant, claim.fence, _ERASE)
        if erased is None:
            raise lost(tenant)
        if not erased:
            return


async def _check_ledger(tenant: TenantId, database: TenantDatabase) -> None:
    try:
        wrong = problems(await database.ledger(tenant))
    except Refusal:
        # Too long to be read as a whole; every entry was compared.
        return
    if wrong:
        raise Fault(f"tenant {tenant!r} is not moved: its book is wrong ({wrong[0]}); see to it first")


async def _close(database: TenantDatabase, tenant: TenantId, claim: Claim) -> None:
    if not await database.freeze_account(tenant, claim.fence):
        raise lost(tenant)
