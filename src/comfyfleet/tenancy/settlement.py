"""Settles ended jobs in the tenant database (T1) and marks them as settled in the central store (T2).

Both steps may be repeated by any hub: the database counts only the first. Before a round ends, the failure texts that
workers left in the central store move to the tenant database, because they cannot reach it. Two hubs may move the same
text at once.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from comfyfleet.model.dispatch import AtRevision, Change, Dispatch, Write
from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import FailureText
from comfyfleet.model.ids import WorkerId
from comfyfleet.paginator import documents_in
from comfyfleet.policy.accounting import deciding_attempt, hold_of, settled
from comfyfleet.ports import Store
from comfyfleet.stores import failure_texts as texts
from comfyfleet.stores.failure_texts import COLLECTION, PendingFailureText, left_in
from comfyfleet.tenancy.database.values import PostingResult, RoundEnd
from comfyfleet.tenancy.tenants import TenantDirectory, TenantLocation


class Settler:
    """`central` is the central store, not the `TenantLedgerStore`."""

    def __init__(self, central: Store, directory: TenantDirectory) -> None:
        self._central = central
        self._directory = directory
        self.pending_texts = PendingFailureTexts(central, directory)

    async def settle(self, dispatch: Dispatch) -> None:
        """Raises `Fault` while the tenant database is unreachable or does not know the round."""
        assert dispatch.has_tenant_database and dispatch.phase.is_final, "only the end of a round is settled"
        home = await self._directory.locate(dispatch.tenant)
        # A deleted tenant has nothing to settle.
        if home is not None:
            await self._end(home, dispatch)
        await self._mark(dispatch)

    async def _end(self, home: TenantLocation, dispatch: Dispatch) -> None:
        """T1"""
        central, hold_id = self._central, hold_of(dispatch)
        stub, attempts = await central.records.get(dispatch.job_id), await central.attempts(dispatch.job_id)
        if stub is None:
            raise Fault(f"cannot settle {hold_id}: the store has lost its record")
        deciding = deciding_attempt(dispatch, attempts)
        round_ = await home.database.open_round_of(hold_id, None if deciding is None else deciding.attempt_id)
        if round_ is None:
            if hold_id not in await home.database.phases([hold_id]):
                raise Fault(
                    f"the tenant database {home.tenant.database!r} does not know job {dispatch.job_id} (round "
                    f"{dispatch.round}) of tenant {dispatch.tenant!r}: was it restored from an older backup?"
                )
            return
        left = {texts.attempt_of_text(each) or "" for each in attempts if texts.is_text_pending(each)}
        await self.pending_texts.take(left)
        if (place := texts.attempt_of_text(stub)) is not None:
            found = await home.database.failures_of([dispatch.job_id])
            if place not in found and place not in left:
                raise Fault(f"the tenant database {home.tenant.database!r} has no failure text of {hold_id}")
            stub = texts.job_with(stub, found)
        decision = settled(
            dispatch,
            stub,
            attempts,
            round_.hold,
            round_.price,
            round_.job,
            round_.result,
            None if deciding is None else await self._rate(deciding.worker_id),
            await central.now(),
        )
        ended = await home.database.end_round(
            RoundEnd(
                f"settle {hold_id}",
                decision.settlement,
                decision.posting,
                dispatch.phase,
                decision.changes,
                decision.run,
            )
        )
        if ended.outcome is PostingResult.REFUSED:
            # Do not mark it: the tenant has moved since the round was read, and it must be settled there.
            raise Fault(
                f"the tenant database {home.tenant.database!r} has no hold {hold_id} any more: the tenant has moved"
            )

    async def _mark(self, dispatch: Dispatch) -> None:
        """T2. If the revision has changed, it is marked already or in another round."""
        change = Change(settled_at=await self._central.now())
        await self._central.write(Write(dispatch.job_id, AtRevision(dispatch.revision), change))

    async def _rate(self, worker_id: WorkerId) -> float | None:
        worker = await self._central.get_worker(worker_id)
        return None if worker is None else worker.capabilities.cost.rate_per_hour


_LOG = logging.getLogger(__name__)


class PendingFailureTexts:
    def __init__(self, central: Store, directory: TenantDirectory) -> None:
        self._central = central
        self._directory = directory

    async def get_many(self, attempt_ids: Collection[str]) -> dict[str, FailureText]:
        """The texts that are still in the central store."""
        found: dict[str, FailureText] = {}
        for each in attempt_ids:
            document = await self._central.documents.get(COLLECTION, each)
            if document is not None and (left := left_in(document.body)) is not None:
                found[each] = left.text
        return found

    async def take(self, attempt_ids: Collection[str]) -> None:
        """Call this before the round ends: afterwards the tenant database accepts no more texts for it."""
        for each in attempt_ids:
            document = await self._central.documents.get(COLLECTION, each)
            if document is not None and (left := left_in(document.body)) is not None:
                await self._take(document.name, left)

    async def take_all(self) -> None:
        """Leaves texts that are unreadable or whose tenant database is unreachable."""
        if not self._central.is_shared:
            return
        async for document in documents_in(self._central.documents, COLLECTION):
            attempt_id, left = document.name, left_in(document.body)
            if left is None:
                _LOG.info("the failure text of attempt %s is unreadable", attempt_id)
                continue
            try:
                tenant = await self._directory.tenants.get(left.tenant)
                if tenant is None or not self._directory.databases.is_unreachable(tenant.database):
                    await self._take(attempt_id, left)
            except Fault as fault:
                _LOG.info("cannot move the failure text of attempt %s, will retry: %s", attempt_id, fault)

    async def _take(self, attempt_id: str, left: PendingFailureText) -> None:
        home = await self._directory.locate(left.tenant) or await self._directory.locate_uncached(left.tenant)
        if home is not None and not await home.database.save_failure(
            left.hold_id, attempt_id, left.text, left.at
        ):
            newest = await self._directory.tenants.get_uncached(left.tenant)
            if newest is not None and newest.database != home.tenant.database:
                return  # The tenant has just moved: the next run finds it there.
            _LOG.info("the failure text of attempt %s is dropped: its round has ended", attempt_id)
        await self._central.documents.remove(COLLECTION, attempt_id)
