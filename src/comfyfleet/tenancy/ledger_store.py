"""The central store with tenants' databases beside it: one `Store` to the engine, by the protocol of docs/ledger.md.

A tenant that was set up has its jobs, results and credits in the database of its pool; the central store
holds the dispatch and a stub of the record. Every step is taken here in its order, and what a crash leaves
undone is found by the relay (`outbox_relay.py`) and the reconciler. For everybody else this is the central
store, and whatever is not said here is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from msgspec import UNSET

from comfyfleet.model.dispatch import (
    AtRevision,
    Attempt,
    AttemptEnd,
    AttemptOutcome,
    Change,
    Dispatch,
    HeldBy,
    LeaseOffer,
    Phase,
    Readiness,
    Stop,
    Write,
    WriteResult,
)
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import Fact, FactDraft, FactKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, PollId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.model.ledger import HoldId
from comfyfleet.model.tenant import TenantState
from comfyfleet.policy import accounting
from comfyfleet.policy.accounting import hold_of
from comfyfleet.policy.fair_share import used_s
from comfyfleet.policy.lifecycle import cancelled
from comfyfleet.policy.tenants import terms_of
from comfyfleet.policy.terms import check_state
from comfyfleet.ports import Store
from comfyfleet.stores import failure_texts as texts
from comfyfleet.tenancy.database.port import AccountFrozen, PostingResult, RoundStart
from comfyfleet.tenancy.records import TenantRecords, stub_of
from comfyfleet.tenancy.settlement import Settler
from comfyfleet.tenancy.tenants import TenantDirectory, TenantLocation

_LOG = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""So long a report waits for its tenant's database to settle; then the relay does."""
_POLL_S = 2.0
"""So long a lease waits for its tenant's database, and with it others' leases of the same round."""
_HOLD_S = 3.0
"""So long nothing is leased of a tenant of whom something had to be given back."""
_MAX_JOINED = 10_000
_TRIES = 10


class TenantLedgerStore:
    reaches_tenants = True

    def __init__(
        self, central: Store, homes: TenantDirectory, *, left_behind: Callable[[], None] = lambda: None
    ) -> None:
        """`left_behind` is called when something is left for the relay."""
        self.central = central
        self.homes = homes
        self.settler = Settler(central, homes)
        self.records = TenantRecords(central, homes, self.settler)
        self.left_behind = left_behind
        self._joined: dict[JobId, None] = {}
        """Jobs that were seen to have nothing of theirs apart."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.central, name)

    def as_store(self) -> Store:
        return cast(Store, self)

    # S1, S2, S3

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        home = await self._home(job.tenant)
        if home is None:
            return await self.central.enqueue(dispatch, job, facts)
        check_state(home.tenant)
        dispatch = msgspec.structs.replace(dispatch, has_tenant_database=True)
        opened = await self._open(home, job, dispatch)
        if opened.job_id != job.job_id:
            # The tenant has a job of the same reference: that one is the answer.
            known = await self.central.load(opened.job_id)
            return WriteResult(known or msgspec.structs.replace(dispatch, job_id=opened.job_id), ())
        try:
            return await self.send(home, dispatch, job, facts)
        except Fault as fault:
            # The job is taken, and paid for: it will come into the queue when the store is back.
            _LOG.warning("job %s waits in its tenant's database for the store: %s", job.job_id, fault)
            self.left_behind()
            return WriteResult(dispatch, ())

    async def _open(self, home: TenantLocation, job: Job, dispatch: Dispatch) -> Job:
        """S1. The job as it is known then."""
        price = home.tenant.price
        amount = 0 if price is None else accounting.ceiling(price, job.payload.requirements.service)
        now = await self.central.now()
        hold = accounting.reserve(HoldId(job.job_id, job.round), job.tenant, amount, now)
        try:
            opened = await home.database.open_round(
                RoundStart(job, hold, accounting.posting_of(hold), dispatch, price)
            )
        except AccountFrozen:
            raise
        except Fault as fault:
            raise unanswered(job.tenant, fault) from fault
        if opened.outcome is PostingResult.SHORT:
            raise accounting.credits_short(job.tenant, amount, opened.account)
        if opened.outcome is PostingResult.REFUSED or opened.job is None:
            raise Refusal(
                RefusalCode.WRONG_PHASE,
                f"round {job.round} of job {job.job_id} cannot begin: the one before it goes on, or has completed",
            )
        return opened.job

    async def send(
        self, home: TenantLocation, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]
    ) -> WriteResult | None:
        """S2 and S3, for a job that is in its tenant's database. Never brings back a round that has ended there."""
        hold_id = hold_of(dispatch)
        stub = stub_of(job, keeps_payload=home.tenant.allows_direct)
        written = await self.central.enqueue(dispatch, stub, facts)
        if written is not None and written.dispatch.round < dispatch.round:
            written = await self._next_round(written.dispatch, dispatch, facts)
        if written is not None:
            await self._mark_sent(home, hold_id)
        return written

    async def _mark_sent(self, home: TenantLocation, hold_id: HoldId) -> None:
        """S3. The job is in the queue, whatever happens here: whoever wrote it goes on to publish it."""
        try:
            await home.database.mark_sent(hold_id)
        except Exception as error:
            _LOG.warning(
                "job %s is in the queue, which its tenant's database learns later: %s", hold_id, error
            )
            self.left_behind()

    async def _next_round(
        self, there: Dispatch, dispatch: Dispatch, facts: Sequence[FactDraft]
    ) -> WriteResult | None:
        """The dispatch of an earlier round is still there, and goes on as the next."""
        changed = {
            name: getattr(dispatch, name)
            for name in Change.__struct_fields__
            if name not in ("lease", "attempts", "is_awaited")
        }
        write = Write(
            there.job_id,
            AtRevision(there.revision),
            Change(**changed, lease=None),
            # Leased still, where a failover has lost its end.
            attempt_end=None if there.lease is None else AttemptEnd(AttemptOutcome.RELEASED),
            facts=tuple(facts),
            job=_BEGUN_ANEW | {"round": dispatch.round},
        )
        return await self.central.write(write)

    # L1, L2

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        return await self._looked_at(await self.central.lease(job_id, offer))

    async def lease_next(self, offer: LeaseOffer) -> WriteResult | None:
        for _ in range(_TRIES):
            written = await self.central.lease_next(offer)
            looked_at = await self._looked_at(written)
            if written is None or looked_at is not None:
                return looked_at
        return None

    async def leased_by_poll(self, poll_id: PollId) -> Dispatch | None:
        dispatch = await self.central.leased_by_poll(poll_id)
        if dispatch is None or dispatch.lease is None or dispatch.lease.is_acknowledged:
            return dispatch
        # Its hub may have died before it looked.
        looked_at = await self._looked_at(WriteResult(dispatch, ()))
        return None if looked_at is None else dispatch

    async def _looked_at(self, written: WriteResult | None) -> WriteResult | None:
        if written is None or not written.dispatch.has_tenant_database:
            return written
        dispatch = written.dispatch
        try:
            home = await self._reached(dispatch.tenant)
            if home is None or home.tenant.state is TenantState.ACTIVE:
                job = None if home is None else await self._leasable(home, dispatch)
                if job is not None:
                    self.records.remember(job)
                    return written
                await self._drop(home, dispatch)
                return None
        except Fault as fault:
            _LOG.warning(
                "job %s is not leased: the database of its tenant is away: %s", dispatch.job_id, fault
            )
        await self._hold(dispatch.tenant)
        await self._give_back(dispatch)
        return None

    async def _reached(self, tenant_id: TenantId) -> TenantLocation | None:
        tenant = await self.homes.tenants.get(tenant_id)
        if tenant is not None and self.homes.pools.is_away(tenant.pool):
            # Whether it is back is found out by the relay: others' leases do not wait for that.
            raise Fault(f"the pool {tenant.pool!r} was away a moment ago")
        return await self.homes.of(tenant_id)

    async def _leasable(self, home: TenantLocation, dispatch: Dispatch) -> Job | None:
        try:
            async with asyncio.timeout(_POLL_S):
                return await home.database.leasable(hold_of(dispatch))
        except TimeoutError as slow:
            fault = Fault(f"the pool {home.tenant.pool!r} did not answer within {_POLL_S:g} s")
            self.homes.pools.note_away(home.tenant.pool, fault)
            raise fault from slow

    async def _hold(self, tenant_id: TenantId) -> None:
        """For a moment, before one is back in its lane: whoever leases next, here or at another hub, would only find it
        again."""
        # As it is now: one that was suspended at another hub a moment ago is held for longer than this.
        tenant = await self.homes.tenants.newest(tenant_id)
        if tenant is not None and (terms := terms_of(tenant)).held_until is None:
            until = await self.central.now() + _HOLD_S
            terms = msgspec.structs.replace(terms, held_until=until)
            await self.central.shares.put_terms(terms)

    async def _give_back(self, dispatch: Dispatch) -> None:
        """Uncharged and uncounted: no worker has heard of it, so what its worker was to stop for is done at once."""
        ref = dispatch.lease_ref()
        while (held := await self.central.load(ref.job_id)) is not None:
            if held.lease is None or held.lease_ref() != ref:
                return
            written = await self.central.write(_given_back(held, await self.central.now()))
            if written is not None:
                if written.dispatch.phase.is_final:
                    self.left_behind()
                return

    async def _drop(self, home: TenantLocation | None, dispatch: Dispatch) -> None:
        """What is over in the tenant's database, or was never there, does not run."""
        if home is not None:
            await self._check_lives_in(home)
        hold_id = hold_of(dispatch)
        phase = None if home is None else (await home.database.phases([hold_id])).get(hold_id)
        _LOG.error("job %s is not leased: its tenant's database says %s", hold_id, phase or "nothing of it")
        await self.close_as(dispatch, HeldBy(dispatch.lease_ref()), phase)

    async def close_as(
        self, dispatch: Dispatch, guard: HeldBy | AtRevision, phase: Phase | None
    ) -> WriteResult | None:
        """A dispatch that its tenant's database says has ended so; None: it does not know it."""
        now = await self.central.now()
        job: dict[str, Any] = {"phase": phase or Phase.FAILED, "completed_at": now}
        fact = FactDraft(FactKind((phase or Phase.FAILED).value), {"reason": "as its tenant's database says"})
        if phase is None:
            message = "its tenant's database does not know this job; it was not run, and nothing was charged"
            job["failure"] = Failure(FailureKind.UNKNOWN, message)
            fact = FactDraft(FactKind.FAILED, {"error": message})
        return await self.central.write(
            Write(
                dispatch.job_id,
                guard,
                Change(phase=phase or Phase.FAILED, lease=None, wake_at=None, settled_at=now),
                attempt_end=None
                if dispatch.lease is None
                else AttemptEnd(AttemptOutcome.RELEASED, used_s=used_s(dispatch.lease, now)),
                facts=(fact,),
                job=job,
            )
        )

    # K, T1, T2

    async def load(self, job_id: JobId) -> Dispatch | None:
        dispatch = await self.central.load(job_id)
        if dispatch is not None and not dispatch.has_tenant_database:
            self._joined[job_id] = None
            if len(self._joined) > _MAX_JOINED:
                del self._joined[next(iter(self._joined))]
        return dispatch

    async def write(self, write: Write) -> WriteResult | None:
        if write.job_id in self._joined:
            return await self.central.write(write)
        dispatch = await self.load(write.job_id)
        if dispatch is None or not dispatch.has_tenant_database:
            return await self.central.write(write)
        change = write.change
        if change.round is not UNSET:
            return await self._reopen(dispatch, write)
        if change.phase is not UNSET and change.phase.is_final:
            return await self._end(dispatch, write)
        if write.job is not None and "payload" in write.job:
            home = await self.homes.of(dispatch.tenant)
            if home is not None:
                await home.database.put_payload(hold_of(dispatch), write.job["payload"])
                if home.tenant.allows_direct:
                    # A worker on the store itself finds it there and nowhere else.
                    return await self.central.write(write)
        return await self._write_public(dispatch, write)

    async def _write_public(self, dispatch: Dispatch, write: Write) -> WriteResult | None:
        """What is private goes to the tenant's database first, and the rest to the central store."""
        public, text = _without_private(write), texts.text_of(write)
        home = None if text is None else await self.homes.of(dispatch.tenant)
        if text is None or home is None or dispatch.lease is None:
            return await self.central.write(public)
        if isinstance(write.guard, AtRevision) and write.guard.revision != dispatch.revision:
            # Decided on what is out of date: the lease may be another's by now.
            return None
        attempt_id, now = dispatch.lease_ref().attempt_id, await self.central.now()
        if not await home.database.keep_failure(hold_of(dispatch), attempt_id, text, now):
            await self._check_lives_in(home)
        written = await self.central.write(texts.without_text(public, attempt_id))
        return None if written is None else texts.told(written, write)

    async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]:
        """Raises `Fault` while what is told by them lies in a database that is away."""
        facts = await self.central.facts(job_id, after)
        if not any(map(texts.place_of, facts)):
            return facts
        found = await self.records.texts_of(job_id, {each for each in map(texts.place_of, facts) if each})
        return [texts.fact_with(fact, found) for fact in facts]

    async def attempts(self, job_id: JobId) -> list[Attempt]:
        """Also while the tenant's database is away, without what was said of them."""
        attempts = await self.central.attempts(job_id)
        wanted = {each for each in map(texts.place_of, attempts) if each}
        if not wanted:
            return attempts
        try:
            found = await self.records.texts_of(job_id, wanted)
        except Fault:
            return attempts
        return [texts.attempt_with(attempt, found) for attempt in attempts]

    async def finish_and_lease_next(
        self, write: Write, offer: LeaseOffer
    ) -> tuple[WriteResult | None, WriteResult | None]:
        if write.job_id in self._joined:
            written, leased = await self.central.finish_and_lease_next(write, offer)
            return written, await self._looked_at(leased)
        return await self.write(write), await self.lease_next(offer)

    async def _end(self, dispatch: Dispatch, write: Write) -> WriteResult | None:
        result = None if write.job is None else write.job.get("result")
        if result is not None and isinstance(write.guard, HeldBy):
            home = await self.homes.of(dispatch.tenant)
            if home is not None:
                attempt_id, now = write.guard.ref.attempt_id, await self.central.now()
                if not await home.database.stage(hold_of(dispatch), attempt_id, result, now):
                    await self._check_lives_in(home)
        written = await self._write_public(dispatch, write)
        if written is not None:
            await self._settle(written.dispatch)
        return written

    async def _check_lives_in(self, home: TenantLocation) -> None:
        """Of a round that is over, or never was, nothing counts. One that moved with its tenant goes on elsewhere."""
        tenant_id = home.tenant.tenant_id
        newest = await self.homes.tenants.newest(tenant_id)
        if newest is not None and newest.pool != home.tenant.pool:
            raise Fault(f"tenant {tenant_id!r} has just moved to pool {newest.pool!r}; report it once more")

    async def _settle(self, dispatch: Dispatch) -> None:
        """The end stands, whatever happens here."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self.settler.settle(dispatch)
        except Exception as error:
            _LOG.warning("job %s is settled when its tenant's database takes it: %s", dispatch.job_id, error)
            self.left_behind()

    async def _reopen(self, dispatch: Dispatch, write: Write) -> WriteResult | None:
        """A retry by hand: the next round begins in the tenant's database."""
        if write.guard != AtRevision(dispatch.revision):
            # Somebody was quicker. What was decided is out of date, and nothing is held for it.
            return None
        home = await self.homes.of(dispatch.tenant)
        if home is None:
            return await self.central.write(write)
        check_state(home.tenant)
        if dispatch.settled_at is None:
            await self.settler.settle(dispatch)
            return None
        job = await home.database.get(dispatch.job_id)
        if job is None:
            raise Refusal(RefusalCode.NOT_FOUND, f"job {dispatch.job_id} is not there any more")
        opening = msgspec.structs.replace(write.change.apply(dispatch), settled_at=None)
        begun = msgspec.structs.replace(job, **(_BEGUN_ANEW | {"round": opening.round}))
        await self._open(home, begun, opening)
        change = msgspec.structs.replace(write.change, settled_at=None)
        written = await self.central.write(_without_private(msgspec.structs.replace(write, change=change)))
        if written is None:
            # The relay was quicker, or the next try will be.
            there = await self.central.load(dispatch.job_id)
            return WriteResult(there, ()) if there is not None and there.round >= opening.round else None
        await self._mark_sent(home, hold_of(opening))
        return written

    async def _home(self, tenant: TenantId) -> TenantLocation | None:
        try:
            return await self.homes.of(tenant)
        except Fault as fault:
            raise away(tenant, fault) from fault


_BEGUN_ANEW: dict[str, Any] = {
    "phase": Phase.QUEUED,
    "result": None,
    "failure": None,
    "completed_at": None,
    "started_at": None,
    "worker_id": None,
    "prompt_id": None,
    "is_late": False,
}
_PRIVATE = frozenset({"payload", "result"})


def _given_back(dispatch: Dispatch, now: float) -> Write:
    change = Change(
        phase=Phase.QUEUED,
        standing=Readiness.PAUSED if dispatch.stop is Stop.PAUSE else Readiness.IN_LANE,
        lease=None,
        pause_requested_at=None,
        retry_requested_at=None,
    )
    job: dict[str, Any] = {"phase": Phase.QUEUED}
    fact = FactDraft(FactKind.RELEASED, {"reason": "the tenant's database is away"})
    if dispatch.stop is Stop.PAUSE:
        fact = FactDraft(FactKind.PAUSED)
    elif dispatch.stop is Stop.CANCEL:
        change, job = cancelled(dispatch), {"phase": Phase.CANCELLED, "completed_at": now}
        reason = dispatch.cancel_reason
        fact = FactDraft(FactKind.CANCELLED, {"reason": reason} if reason else None)
    return Write(
        dispatch.job_id,
        AtRevision(dispatch.revision),
        change,
        attempt_end=AttemptEnd(AttemptOutcome.RELEASED, used_s=0.0),
        facts=(fact,),
        job=job,
    )


def _without_private(write: Write) -> Write:
    if write.job is None or _PRIVATE.isdisjoint(write.job):
        return write
    public = {name: value for name, value in write.job.items() if name not in _PRIVATE}
    return msgspec.structs.replace(write, job=public)


def away(tenant: str, fault: Fault) -> Refusal:
    _LOG.warning("nothing is taken for tenant %s: %s", tenant, fault)
    return Refusal(
        RefusalCode.UNAVAILABLE,
        f"the database of tenant {tenant!r} cannot be reached, so nothing is taken for it; nothing was charged. "
        "Try again later; whoever runs this hub finds more in its log",
    )


def unanswered(tenant: str, fault: Fault) -> Refusal:
    _LOG.warning("whether a job of tenant %s was taken is not known: %s", tenant, fault)
    return Refusal(
        RefusalCode.UNAVAILABLE,
        f"the database of tenant {tenant!r} did not take the job, or did not say so. Submit it again under the same "
        "reference or Idempotency-Key, then it is taken once; whoever runs this hub finds more in its log",
    )
