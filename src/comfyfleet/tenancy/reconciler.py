"""Finds and repairs differences between the store and tenant databases after crashes or failovers.

It compares open rounds with dispatches in both directions; `policy/accounting.py` judges the differences.
Requests in progress differ too, so a finding counts only if a second comparison confirms it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from comfyfleet.model.dispatch import AtRevision, Dispatch, Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.ledger import HoldId
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.paginator import record_pages
from comfyfleet.policy.accounting import (
    Finding,
    FindingKind,
    check_dispatch,
    check_open_round,
    hold_of,
    problems,
)
from comfyfleet.ports import Clock
from comfyfleet.tenancy.claims import CLAIM_S, Claim, claim
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.ledger_store import TenantLedgerStore
from comfyfleet.tracing import BackgroundJob, log_failure

_LOG = logging.getLogger(__name__)

EVERY_S = 60.0
_CLAIM_AGAIN_S = 10.0
"""How often the other hubs try, in case the one with the claim has died."""
CLAIM = TenantId("-reconciler")
"""Not a valid tenant name."""
LOOK_AGAIN_S = 2.0
OLD_HOLD_S = 30 * 24 * 3600.0
_PAGE = 200
_OPEN = (Phase.QUEUED, Phase.LEASED)
_STAYING = (TenantState.ACTIVE, TenantState.SUSPENDED)


class Reconciler(BackgroundJob):
    """Every hub has one; each minute one of them runs."""

    def __init__(self, store: TenantLedgerStore, clock: Clock) -> None:
        super().__init__("reconciler")
        self._store = store
        self._clock = clock

    async def _run(self) -> None:
        while True:
            wait_s = EVERY_S
            try:
                found = await self.reconcile_if_due()
                wait_s = EVERY_S if found is not None else _CLAIM_AGAIN_S
                for finding in found or ():
                    _LOG.warning("%s: %s", finding.kind.value, finding.message)
            except Fault as fault:
                _LOG.warning("cannot compare the store with the tenant databases, will retry: %s", fault)
            except Exception:
                log_failure(_LOG, "the reconciler failed, will retry")
            await asyncio.sleep(wait_s)

    async def reconcile_if_due(self) -> list[Finding] | None:
        """None: another hub is reconciling, or did so within the last minute."""
        mine = await claim(self._store.central.documents, self._clock, CLAIM)
        if mine is None:
            return None
        try:
            found = await self.reconcile(ledgers=False, claim=mine)
        except BaseException:
            with contextlib.suppress(Fault):
                await mine.release()
            raise
        await mine.rest(EVERY_S - CLAIM_S / 3)
        return found

    async def reconcile(
        self, *, is_dry: bool = False, ledgers: bool = True, claim: Claim | None = None
    ) -> list[Finding]:
        """The findings, repaired unless `is_dry`. `ledgers`: check the sums too. Renews `claim`."""
        first = [each async for each in self._look(claim)]
        found = []
        if first:
            await asyncio.sleep(LOOK_AGAIN_S)
            known = set(first)
            found = [each async for each in self._look(claim) if each in known]
        if not is_dry:
            for each in found:
                await self._repair(each)
        if ledgers:
            found += [each async for each in self._ledgers()]
        return found

    async def _look(self, claim: Claim | None) -> AsyncIterator[Finding]:
        staying: dict[TenantId, Tenant] = {}
        for name, tenants in (await self._store.directory.tenants_by_database()).items():
            here = {each.tenant_id: each for each in tenants if each.state in _STAYING}
            staying |= here
            try:
                database = await self._store.directory.databases.get(name)
                async for finding in self._compare_rounds(
                    database, {each.tenant_id for each in tenants}, claim
                ):
                    yield finding
            except Fault as fault:
                _LOG.warning("cannot compare database %s with the store: %s", name, fault)
                continue
            for tenant in here.values():
                async for page in self._open_dispatches(tenant):
                    for finding in await self._compare_dispatches(tenant, page, claim):
                        yield finding
        # Once for all tenants: jobs that cannot be settled now are read only once.
        async for page in self._unconfirmed():
            for tenant_id in dict.fromkeys(each.tenant for each in page if each.tenant in staying):
                its = [each for each in page if each.tenant == tenant_id]
                for finding in await self._compare_dispatches(staying[tenant_id], its, claim):
                    yield finding

    async def _compare_rounds(
        self, database: TenantDatabase, tenants: set[str], claim: Claim | None
    ) -> AsyncIterator[Finding]:
        after: HoldId | None = None
        while True:
            if claim is not None:
                await claim.renew_if_due()
            page = await database.outbox(is_sent=True, after=after, limit=_PAGE)
            there = await self._store.central.load_many([each.hold_id.job_id for each in page])
            for entry, dispatch in zip(page, there, strict=True):
                kind = check_open_round(entry.hold_id, dispatch)
                if kind is not None and entry.tenant in tenants:
                    state = (
                        "nothing of it" if dispatch is None else f"{dispatch.phase} (round {dispatch.round})"
                    )
                    yield Finding(
                        kind,
                        entry.tenant,
                        f"{entry.hold_id} is open in its tenant's database, but the store has {state}",
                        entry.hold_id,
                    )
            if len(page) < _PAGE:
                return
            after = page[-1].hold_id

    async def _compare_dispatches(
        self, tenant: Tenant, dispatches: Sequence[Dispatch], claim: Claim | None
    ) -> list[Finding]:
        if not dispatches:
            return []
        if claim is not None:
            await claim.renew_if_due()
        try:
            database = await self._store.directory.databases.database_of(tenant)
            phases = await database.phases([hold_of(each) for each in dispatches])
        except Fault as fault:
            if not self._store.directory.databases.is_unreachable(tenant.database):
                _LOG.warning("cannot compare the jobs of tenant %s: %s", tenant.tenant_id, fault)
            return []
        found = []
        for dispatch in dispatches:
            hold_id = hold_of(dispatch)
            ended = phases.get(hold_id)
            kind = check_dispatch(dispatch, hold_id in phases, ended)
            if kind is not None:
                state = f"it is {ended.value}" if ended is not None else "there is no such round"
                found.append(
                    Finding(
                        kind,
                        tenant.tenant_id,
                        f"{hold_id} is {dispatch.phase.value} in the store, but in its tenant's database {state}",
                        hold_id,
                    )
                )
        return found

    async def _open_dispatches(self, tenant: Tenant) -> AsyncIterator[Sequence[Dispatch]]:
        """Pages of the tenant's open dispatches."""
        central = self._store.central
        for phase in _OPEN:
            async for stubs in record_pages(central.records, tenant.tenant_id, phase, _PAGE):
                yield _open_in_tenant_database(await central.load_many([each.job_id for each in stubs]))

    async def _unconfirmed(self) -> AsyncIterator[Sequence[Dispatch]]:
        """Pages of all tenants' ended dispatches that are not marked as settled."""
        after: JobId | None = None
        while page := await self._store.central.unsettled(_PAGE, after):
            yield page
            after = page[-1].job_id

    async def _ledgers(self) -> AsyncIterator[Finding]:
        now, databases = await self._store.central.now(), self._store.directory.databases
        for name, tenants in (await self._store.directory.tenants_by_database()).items():
            try:
                database = await databases.get(name)
                for hold in await database.open_holds(now - OLD_HOLD_S, _PAGE):
                    days = (now - hold.at) / 86_400
                    message = f"{hold.amount} credits have been held for {hold.hold_id} for {days:.0f} days"
                    yield Finding(FindingKind.OLD_HOLD, hold.tenant, message, hold.hold_id)
            except Fault as fault:
                for tenant in tenants:
                    yield Finding(FindingKind.UNSEEN, tenant.tenant_id, str(fault))
                continue
            for tenant in tenants:
                try:
                    # A tenant that is being moved may have no account here; any other must have one.
                    its = await databases.database_of(tenant) if tenant.state in _STAYING else database
                    for problem in await _wrong(its, tenant):
                        yield Finding(FindingKind.WRONG_LEDGER, tenant.tenant_id, problem)
                except Fault as fault:
                    yield Finding(FindingKind.UNSEEN, tenant.tenant_id, str(fault))

    async def _repair(self, finding: Finding) -> None:
        hold_id, store = finding.hold_id, self._store
        if hold_id is None or not finding.kind.mends_itself:
            return
        try:
            home = await store.directory.locate(finding.tenant)
            if home is None:
                return
            if finding.kind is FindingKind.UNSENT:
                await home.database.send_again(hold_id)
                store.on_relay_work()
                return
            dispatch = await store.central.load(hold_id.job_id)
            if dispatch is None or dispatch.round != hold_id.round:
                return
            if dispatch.phase.is_final:
                await store.settler.settle(dispatch)
            elif finding.kind in (FindingKind.OUTLIVED, FindingKind.UNKNOWN):
                phases = await home.database.phases([hold_id])
                if phases.get(hold_id, Phase.FAILED) is None:
                    # Open again, as after a relocation.
                    return
                await store.close_as(dispatch, AtRevision(dispatch.revision), phases.get(hold_id))
        except Fault as fault:
            _LOG.warning("cannot repair %s, will retry: %s", hold_id, fault)


def _open_in_tenant_database(dispatches: Sequence[Dispatch | None]) -> list[Dispatch]:
    return [
        each
        for each in dispatches
        if each is not None and each.has_tenant_database and not each.phase.is_final
    ]


async def _wrong(database: TenantDatabase, tenant: Tenant) -> list[str]:
    try:
        return problems(await database.ledger(tenant.tenant_id))
    except Refusal as refusal:
        return [refusal.message]
