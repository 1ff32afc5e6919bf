"""One `Store` for the engine over the central store and the tenant databases (protocol: docs/ledger.md).

The tenant database has jobs, results and credits; the central store has the dispatch and a stub of the
record. The outbox relay and the reconciler finish what a crash interrupts. All other calls go to the central
store.
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
from comfyfleet.model.recent import RecentDict
from comfyfleet.model.tenant import TenantState
from comfyfleet.policy import accounting
from comfyfleet.policy.accounting import hold_of
from comfyfleet.policy.fair_share import used_s
from comfyfleet.policy.lifecycle import cancelled
from comfyfleet.policy.tenants import terms_of
from comfyfleet.policy.terms import check_state
from comfyfleet.ports import Store
from comfyfleet.stores import failure_texts as texts
from comfyfleet.tenancy.database.values import AccountFrozen, PostingResult, RoundStart
from comfyfleet.tenancy.records import TenantRecords, stub_of
from comfyfleet.tenancy.settlement import Settler
from comfyfleet.tenancy.tenants import TenantDirectory, TenantLocation

_LOG = logging.getLogger(__name__)

_SETTLE_TIMEOUT_S = 5.0
"""After that, the relay settles the job."""
_LEASE_TIMEOUT_S = 2.0
"""Short, because other leases of the same matching pass wait too."""
_PAUSE_S = 3.0
"""How long a tenant gets no leases after its database was unreachable."""
_MAX_CENTRAL_JOBS = 10_000


class TenantLedgerStore:
    reaches_tenants = True

    def __init__(self, central: Store, directory: TenantDirectory) -> None:
        self.central = central
        self.directory = directory
        self.settler = Settler(central, directory)
        self.records = TenantRecords(central, directory, self.settler)
        self.on_relay_work: Callable[[], None] = lambda: None
        """Called when there is work for the relay."""
        self._central_jobs: RecentDict[JobId, None] = RecentDict(_MAX_CENTRAL_JOBS)
        """Known jobs without a tenant database."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.central, name)

    def as_store(self) -> Store:
        return cast(Store, self)

    # Begin a round: steps S1, S2, S3 of docs/ledger.md

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        home = await self._locate(job.tenant)
        if home is None:
            return await self.central.enqueue(dispatch, job, facts)
        check_state(home.tenant)
        dispatch = msgspec.structs.replace(dispatch, has_tenant_database=True)
        opened = await self._open_round(home, job, dispatch)
        if opened.job_id != job.job_id:
            # The tenant has a job with this reference already: answer with that one.
            known = await self.central.load(opened.job_id)
            return WriteResult(known or msgspec.structs.replace(dispatch, job_id=opened.job_id), ())
        try:
            return await self.send(home, dispatch, job, facts)
        except Fault as fault:
            # The job is accepted and its credits are held. The relay enqueues it when the store is back.
            _LOG.warning(
                "cannot enqueue job %s, will retry from its tenant's database: %s", job.job_id, fault
            )
            self.on_relay_work()
            return WriteResult(dispatch, ())

    async def _open_round(self, home: TenantLocation, job: Job, dispatch: Dispatch) -> Job:
        """S1. Answers the job as the database has it."""
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
            raise _unconfirmed(job.tenant, fault) from fault
        if opened.outcome is PostingResult.SHORT:
            raise accounting.credits_short(job.tenant, amount, opened.account)
        if opened.outcome is PostingResult.REFUSED or opened.job is None:
            raise Refusal(
                RefusalCode.WRONG_PHASE,
                f"round {job.round} of job {job.job_id} cannot start: the one before it is open or has completed",
            )
        return opened.job

    async def send(
        self, home: TenantLocation, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]
    ) -> WriteResult | None:
        """S2 and S3. Never revives a round that has ended in the tenant database."""
        hold_id = hold_of(dispatch)
        stub = stub_of(job, keeps_payload=home.tenant.allows_direct)
        written = await self.central.enqueue(dispatch, stub, facts)
        if written is not None and written.dispatch.round < dispatch.round:
            written = await self._next_round(written.dispatch, dispatch, facts)
        if written is not None:
            await self._mark_sent(home, hold_id)
        return written

    async def _mark_sent(self, home: TenantLocation, hold_id: HoldId) -> None:
        """S3. Never raises: the job is in the queue, and the caller must publish that."""
        try:
            await home.database.mark_sent(hold_id)
        except Exception as error:
            _LOG.warning(
                "cannot mark job %s as sent in its tenant's database, will retry: %s", hold_id, error
            )
            self.on_relay_work()

    async def _next_round(
        self, there: Dispatch, dispatch: Dispatch, facts: Sequence[FactDraft]
    ) -> WriteResult | None:
        """Turns the dispatch of the round before into the next round."""
        changed = {
            name: getattr(dispatch, name)
            for name in Change.__struct_fields__
            if name not in ("lease", "attempts", "is_awaited")
        }
        write = Write(
            there.job_id,
            AtRevision(there.revision),
            Change(**changed, lease=None),
            # A failover may have lost the end of the lease.
            attempt_end=None if there.lease is None else AttemptEnd(AttemptOutcome.RELEASED),
            facts=tuple(facts),
            job=_NEW_ROUND | {"round": dispatch.round},
        )
        return await self.central.write(write)

    # L1, L2

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        return await self._check_lease(await self.central.lease(job_id, offer))

    async def leased_by_poll(self, poll_id: PollId) -> Dispatch | None:
        dispatch = await self.central.leased_by_poll(poll_id)
        if dispatch is None or dispatch.lease is None or dispatch.lease.is_acknowledged:
            return dispatch
        # The hub that leased it may have died before it checked.
        checked = await self._check_lease(WriteResult(dispatch, ()))
        return None if checked is None else dispatch

    async def _check_lease(self, written: WriteResult | None) -> WriteResult | None:
        if written is None or not written.dispatch.has_tenant_database:
            return written
        dispatch = written.dispatch
        try:
            home = await self._reachable(dispatch.tenant)
            if home is None or home.tenant.state is TenantState.ACTIVE:
                job = None if home is None else await self._leasable(home, dispatch)
                if job is not None:
                    self.records.remember(job)
                    return written
                await self._drop(home, dispatch)
                return None
        except Fault as fault:
            _LOG.warning(
                "job %s is not leased: cannot reach its tenant's database: %s", dispatch.job_id, fault
            )
        await self._pause(dispatch.tenant)
        await self._release(dispatch)
        return None

    async def _reachable(self, tenant_id: TenantId) -> TenantLocation | None:
        tenant = await self.directory.tenants.get(tenant_id)
        if tenant is not None and self.directory.databases.is_unreachable(tenant.database):
            # The relay finds out when it is back; other leases do not wait for that.
            raise Fault(f"the tenant database {tenant.database!r} was unreachable a moment ago")
        return await self.directory.locate(tenant_id)

    async def _leasable(self, home: TenantLocation, dispatch: Dispatch) -> Job | None:
        try:
            async with asyncio.timeout(_LEASE_TIMEOUT_S):
                return await home.database.leasable(hold_of(dispatch))
        except TimeoutError as slow:
            fault = Fault(
                f"the tenant database {home.tenant.database!r} did not answer within {_LEASE_TIMEOUT_S:g} s"
            )
            self.directory.databases.mark_unreachable(home.tenant.database, fault)
            raise fault from slow

    async def _pause(self, tenant_id: TenantId) -> None:
        """Call this before the job is back in its lane: the next lease would take the same job."""
        # Read it again: another hub may just have suspended the tenant, which lasts longer.
        tenant = await self.directory.tenants.get_uncached(tenant_id)
        if tenant is not None and (terms := terms_of(tenant)).held_until is None:
            until = await self.central.now() + _PAUSE_S
            terms = msgspec.structs.replace(terms, held_until=until)
            await self.central.fair_share.put_terms(terms)

    async def _release(self, dispatch: Dispatch) -> None:
        """Undoes the lease, without charge. No worker has the job, so a pending stop takes effect at once."""
        ref = dispatch.lease_ref()
        while (held := await self.central.load(ref.job_id)) is not None:
            if held.lease is None or held.lease_ref() != ref:
                return
            written = await self.central.write(_released(held, await self.central.now()))
            if written is not None:
                if written.dispatch.phase.is_final:
                    self.on_relay_work()
                return

    async def _drop(self, home: TenantLocation | None, dispatch: Dispatch) -> None:
        """Ends a job that has ended in the tenant database or is unknown there."""
        if home is not None:
            await self._check_not_moved(home)
        hold_id = hold_of(dispatch)
        phase = None if home is None else (await home.database.phases([hold_id])).get(hold_id)
        _LOG.error("job %s is not leased: in its tenant's database it is %s", hold_id, phase or "unknown")
        await self.close_as(dispatch, HeldBy(dispatch.lease_ref()), phase)

    async def close_as(
        self, dispatch: Dispatch, guard: HeldBy | AtRevision, phase: Phase | None
    ) -> WriteResult | None:
        """Ends the dispatch with its phase in the tenant database (None: unknown there)."""
        now = await self.central.now()
        job: dict[str, Any] = {"phase": phase or Phase.FAILED, "completed_at": now}
        fact = FactDraft(
            FactKind((phase or Phase.FAILED).value), {"reason": "it has ended in its tenant's database"}
        )
        if phase is None:
            message = "the tenant's database does not know this job; it did not run, and nothing was charged"
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

    # End a round: steps K, T1, T2 of docs/ledger.md

    async def load(self, job_id: JobId) -> Dispatch | None:
        dispatch = await self.central.load(job_id)
        if dispatch is not None and not dispatch.has_tenant_database:
            self._central_jobs[job_id] = None
        return dispatch

    async def write(self, write: Write) -> WriteResult | None:
        if write.job_id in self._central_jobs:
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
            home = await self.directory.locate(dispatch.tenant)
            if home is not None:
                await home.database.put_payload(hold_of(dispatch), write.job["payload"])
                if home.tenant.allows_direct:
                    # Direct workers read the payload from the central store.
                    return await self.central.write(write)
        return await self._write_public(dispatch, write)

    async def _write_public(self, dispatch: Dispatch, write: Write) -> WriteResult | None:
        """Writes private data to the tenant database first, then the rest to the central store."""
        public, text = _without_private(write), texts.text_of(write)
        home = None if text is None else await self.directory.locate(dispatch.tenant)
        if text is None or home is None or dispatch.lease is None:
            return await self.central.write(public)
        if isinstance(write.guard, AtRevision) and write.guard.revision != dispatch.revision:
            # The decision is outdated: another worker may have the lease now.
            return None
        attempt_id, now = dispatch.lease_ref().attempt_id, await self.central.now()
        if not await home.database.save_failure(hold_of(dispatch), attempt_id, text, now):
            await self._check_not_moved(home)
        written = await self.central.write(texts.without_text(public, attempt_id))
        return None if written is None else texts.with_texts(written, write)

    async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]:
        """Raises `Fault` while it cannot read their texts in the tenant database."""
        facts = await self.central.facts(job_id, after)
        if not any(map(texts.attempt_of_text, facts)):
            return facts
        found = await self.records.texts_of(
            job_id, {each for each in map(texts.attempt_of_text, facts) if each}
        )
        return [texts.fact_with(fact, found) for fact in facts]

    async def attempts(self, job_id: JobId) -> list[Attempt]:
        """Without their failure texts while the tenant database is unreachable."""
        attempts = await self.central.attempts(job_id)
        wanted = {each for each in map(texts.attempt_of_text, attempts) if each}
        if not wanted:
            return attempts
        try:
            found = await self.records.texts_of(job_id, wanted)
        except Fault:
            return attempts
        return [texts.attempt_with(attempt, found) for attempt in attempts]

    async def _end(self, dispatch: Dispatch, write: Write) -> WriteResult | None:
        result = None if write.job is None else write.job.get("result")
        if result is not None and isinstance(write.guard, HeldBy):
            home = await self.directory.locate(dispatch.tenant)
            if home is not None:
                attempt_id, now = write.guard.ref.attempt_id, await self.central.now()
                if not await home.database.stage(hold_of(dispatch), attempt_id, result, now):
                    await self._check_not_moved(home)
        written = await self._write_public(dispatch, write)
        if written is not None:
            await self._settle(written.dispatch)
        return written

    async def _check_not_moved(self, home: TenantLocation) -> None:
        """Raises `Fault` if the round is missing here because the tenant has moved."""
        tenant_id = home.tenant.tenant_id
        newest = await self.directory.tenants.get_uncached(tenant_id)
        if newest is not None and newest.database != home.tenant.database:
            raise Fault(f"tenant {tenant_id!r} has just moved to database {newest.database!r}; report again")

    async def _settle(self, dispatch: Dispatch) -> None:
        """Never raises: the job has ended in the central store."""
        try:
            async with asyncio.timeout(_SETTLE_TIMEOUT_S):
                await self.settler.settle(dispatch)
        except Exception as error:
            _LOG.warning(
                "cannot settle job %s in its tenant's database, will retry: %s", dispatch.job_id, error
            )
            self.on_relay_work()

    async def _reopen(self, dispatch: Dispatch, write: Write) -> WriteResult | None:
        """A manual retry: the next round starts in the tenant database."""
        if write.guard != AtRevision(dispatch.revision):
            # The decision is outdated: hold no credits for it.
            return None
        home = await self.directory.locate(dispatch.tenant)
        if home is None:
            return await self.central.write(write)
        check_state(home.tenant)
        if dispatch.settled_at is None:
            await self.settler.settle(dispatch)
            return None
        job = await home.database.get(dispatch.job_id)
        if job is None:
            raise Refusal(RefusalCode.NOT_FOUND, f"job {dispatch.job_id} is gone from its tenant's database")
        opening = msgspec.structs.replace(write.change.apply(dispatch), settled_at=None)
        renewed = msgspec.structs.replace(job, **(_NEW_ROUND | {"round": opening.round}))
        await self._open_round(home, renewed, opening)
        change = msgspec.structs.replace(write.change, settled_at=None)
        written = await self.central.write(_without_private(msgspec.structs.replace(write, change=change)))
        if written is None:
            # The relay may have written it first.
            there = await self.central.load(dispatch.job_id)
            return WriteResult(there, ()) if there is not None and there.round >= opening.round else None
        await self._mark_sent(home, hold_of(opening))
        return written

    async def _locate(self, tenant: TenantId) -> TenantLocation | None:
        try:
            return await self.directory.locate(tenant)
        except Fault as fault:
            raise _unreachable(tenant, fault) from fault


_NEW_ROUND: dict[str, Any] = {
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


def _released(dispatch: Dispatch, now: float) -> Write:
    change = Change(
        phase=Phase.QUEUED,
        standing=Readiness.PAUSED if dispatch.stop is Stop.PAUSE else Readiness.IN_LANE,
        lease=None,
        pause_requested_at=None,
        retry_requested_at=None,
    )
    job: dict[str, Any] = {"phase": Phase.QUEUED}
    fact = FactDraft(FactKind.RELEASED, {"reason": "the tenant's database is unreachable"})
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


def _unreachable(tenant: str, fault: Fault) -> Refusal:
    _LOG.warning("cannot accept jobs of tenant %s: %s", tenant, fault)
    return Refusal(
        RefusalCode.UNAVAILABLE,
        f"cannot reach the database of tenant {tenant!r}; the job was not accepted and nothing was charged. "
        "Try again later; the hub's log has the cause",
    )


def _unconfirmed(tenant: str, fault: Fault) -> Refusal:
    _LOG.warning("a job of tenant %s may or may not have been accepted: %s", tenant, fault)
    return Refusal(
        RefusalCode.UNAVAILABLE,
        f"the database of tenant {tenant!r} did not confirm the job. Submit it again with the same reference or "
        "Idempotency-Key: it will be accepted once. The hub's log has the cause",
    )
