"""T1 and T2: what ended in the central store is settled in the tenant's database, and then marked as settled. Both may
be repeated by whoever comes by: the database takes in the first copy only."""

from __future__ import annotations

from comfyfleet.model.dispatch import AtRevision, Change, Dispatch, Write
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import WorkerId
from comfyfleet.policy.accounting import deciding_attempt, hold_of, settled
from comfyfleet.ports import Store
from comfyfleet.stores import failure_texts as texts
from comfyfleet.tenancy.database.port import PostingResult, RoundEnd
from comfyfleet.tenancy.failure_texts import PendingFailureTexts
from comfyfleet.tenancy.tenants import TenantDirectory, TenantLocation


class Settler:
    """`central` is the store itself, not the one around it."""

    def __init__(self, central: Store, homes: TenantDirectory) -> None:
        self._central = central
        self._homes = homes
        self.left_texts = PendingFailureTexts(central, homes)

    async def settle(self, dispatch: Dispatch) -> None:
        """Raises `Fault` while the tenant's database is away, or has never heard of the round."""
        assert dispatch.has_tenant_database and dispatch.phase.is_final, "only the end of a round is settled"
        home = await self._homes.of(dispatch.tenant)
        # Of a tenant that was deleted nothing is left to be settled.
        if home is not None:
            await self._end(home, dispatch)
        await self._mark(dispatch)

    async def _end(self, home: TenantLocation, dispatch: Dispatch) -> None:
        """T1"""
        central, hold_id = self._central, hold_of(dispatch)
        stub, attempts = await central.records.get(dispatch.job_id), await central.attempts(dispatch.job_id)
        if stub is None:
            raise Fault(
                f"the store has no record of {hold_id} any more: it cannot be settled by what became of it"
            )
        deciding = deciding_attempt(dispatch, attempts)
        round_ = await home.database.open_round_of(hold_id, None if deciding is None else deciding.attempt_id)
        if round_ is None:
            if hold_id not in await home.database.phases([hold_id]):
                raise Fault(
                    f"the pool {home.tenant.pool!r} does not know job {dispatch.job_id} (round {dispatch.round}) of "
                    f"tenant {dispatch.tenant!r}, which ended here: was it set back to an older state?"
                )
            return
        left = {texts.place_of(each) or "" for each in attempts if texts.is_left(each)}
        await self.left_texts.take(left)
        if (place := texts.place_of(stub)) is not None:
            said = await home.database.failures_of([dispatch.job_id])
            if place not in said and place not in left:
                raise Fault(f"the pool {home.tenant.pool!r} does not have what was said of {hold_id}")
            stub = texts.job_with(stub, said)
        verdict = settled(
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
                verdict.settlement,
                verdict.posting,
                dispatch.phase,
                verdict.changes,
                verdict.run,
            )
        )
        if ended.outcome is PostingResult.REFUSED:
            # Marked as settled it would be nobody's: its rows went elsewhere since they were read here.
            raise Fault(
                f"the pool {home.tenant.pool!r} has no hold for {hold_id} any more: settled where its tenant is now"
            )

    async def _mark(self, dispatch: Dispatch) -> None:
        """T2. Where somebody has written it since, it is marked already, or has begun another round."""
        change = Change(settled_at=await self._central.now())
        await self._central.write(Write(dispatch.job_id, AtRevision(dispatch.revision), change))

    async def _rate(self, worker_id: WorkerId) -> float | None:
        worker = await self._central.get_worker(worker_id)
        return None if worker is None else worker.capabilities.cost.rate_per_hour
