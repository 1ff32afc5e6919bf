"""Tenants, hubs and workers for random days: what they may do, and what must hold whatever they did.

Hubs die and lose answers as told (`_breaking.py`); time is wound by hand. What was answered to a caller or a worker is
written down here, and compared with what the databases say.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from tests.engine.test_several_engines import SharedStore
from tests.tenancy._breaking import Crash, Fate, Turns, fated_database, fated_store
from tests.tenancy._tenant_services import Fleet

from comfyfleet.model.calls import Completion, FailureReport, LeasedJob, Release
from comfyfleet.model.dispatch import Dispatch, LeaseRef, Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, TenantId, WorkerId
from comfyfleet.model.job import Job, JobResult, OutputFile
from comfyfleet.model.ledger import FlatPrice, HoldId, OutputPrice, Price
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy import accounting
from comfyfleet.ports import Clock, Store
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.testing.time import ManualClock

WORKERS = (WorkerId("gpu-a"), WorkerId("gpu-b"))
PRICES: tuple[Price | None, ...] = (FlatPrice(10), FlatPrice(80), OutputPrice(5, 4, base=1), None)
RULES: dict[str, Any] = {
    "max_attempts": 2,
    "max_failures_before_block": 1000,
    "cooldown_s": 1.0,
    "keep_completed_s": 1.0,
    "keep_failed_s": 1.0,
}
_MANY = 1000
_ROUNDS_TO_REST = 30
_LOOKS = 40


class LeapingClock(ManualClock):
    """No timer fires by itself: what is due is done when a day says so."""

    def leap(self, seconds: float) -> None:
        self._now += seconds


class SharedMemory:
    """A store that outlives the hubs on it."""

    def __init__(self) -> None:
        self._store: SharedStore | None = None

    def opened(self, clock: Clock) -> Store:
        self._store = self._store or SharedStore(clock)
        return self._store


class Sent(NamedTuple):
    """What a relay brought to the store, and may bring again when it is far too late."""

    dispatch: Dispatch
    stub: Job


class Hub(Fleet):
    """A process that may die."""

    def __init__(
        self, store: Store, clock: Clock, databases: dict[str, str], seed: int, sent: list[Sent]
    ) -> None:
        self.fate = Fate()
        self.real = store

        def opened(url: str) -> TenantDatabase:
            return fated_database(open_tenant_database(url), self.fate)

        super().__init__(
            _Copying(store, self.fate, sent), clock, databases, open_database=opened, seed=seed, **RULES
        )

    async def die(self) -> None:
        self.fate.is_dead = True
        with contextlib.suppress(Crash):
            await self.engine.close()
        with contextlib.suppress(Crash):
            await self.tenant_services.close()
        await self.real.close()


class _Copying:
    """A fated store that writes down what is enqueued."""

    def __init__(self, store: Store, fate: Fate, sent: list[Sent]) -> None:
        self._fated = fated_store(store, fate)
        self._sent = sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fated, name)

    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[Any]) -> Any:
        if dispatch.has_tenant_database:
            self._sent.append(Sent(dispatch, job))
        return await self._fated.enqueue(dispatch, job, facts)


class Town:
    """`make_store` opens the one central store; where several processes may, there are two hubs."""

    def __init__(self, make_store: Callable[[Clock], Store], databases: dict[str, str], day: int) -> None:
        self.clock = LeapingClock(1_000_000.0 + day * 1_000_000)
        self._make_store = make_store
        self._databases = databases
        self._seeds = itertools.count(day * 10_000)
        self.hubs: list[Hub] = []
        self.tenants = [TenantId(f"tenant-{day}-{place}") for place in range(len(PRICES))]
        self.sent: list[Sent] = []
        self.granted = dict.fromkeys(self.tenants, 0)
        self.taken: list[JobId] = []
        """Jobs whose submit was answered."""
        self.leases: list[LeasedJob] = []
        self.reported: dict[str, JobResult] = {}
        """What attempts were about to leave, or left."""
        self.ends: dict[HoldId, Phase] = {}
        """Rounds whose worker was told how they ended."""
        self.revived: set[JobId] = set()
        self._ledgers: dict[str, TenantDatabase] = {}
        self._grants = itertools.count(1)

    # beginning and end

    async def begin(self) -> None:
        await self._open_hub(0)
        if self.central.is_shared:
            await self._open_hub(1)
        for place, (tenant_id, price) in enumerate(zip(self.tenants, PRICES, strict=True)):
            name = list(self._databases)[place % len(self._databases)]
            await self.hubs[0].tenant_services.tenants.create(
                Tenant(tenant_id, name, self.clock.now(), price=price)
            )
        for name, url in self._databases.items():
            self._ledgers[name] = open_tenant_database(url)
            await self._ledgers[name].open()
        for tenant in await self.hubs[0].tenant_services.tenants.list_all():
            await self._ledgers[tenant.database].create_account(tenant.tenant_id)

    async def end(self) -> None:
        for hub in self.hubs:
            await hub.die()
        for ledger in self._ledgers.values():
            await ledger.close()

    async def _open_hub(self, place: int) -> None:
        hub = Hub(self._make_store(self.clock), self.clock, self._databases, next(self._seeds), self.sent)
        await hub.__aenter__()
        for worker in WORKERS:
            await hub.worker(worker)
        self.hubs[place : place + 1] = [hub]

    @property
    def central(self) -> Store:
        return self.hubs[0].real

    def book_of(self, tenant: TenantId) -> TenantDatabase:
        return self._ledgers[list(self._databases)[self.tenants.index(tenant) % len(self._databases)]]

    def hub(self, number: int) -> Hub:
        return self.hubs[number % len(self.hubs)]

    # one after the other, or all at once

    async def do(self, work: Coroutine[Any, Any, None]) -> None:
        """A refusal, a fault and the death of a hub are ways to end; nothing else is."""
        with contextlib.suppress(Refusal, Fault, Crash):
            await work
        await self.rise()

    async def do_at_once(
        self, works: Sequence[Coroutine[Any, Any, None]], order: Sequence[tuple[int, int]] | None
    ) -> None:
        """`order`: call by call; None: as it comes."""
        turns = None if order is None else Turns(order)
        for hub in self.hubs:
            hub.fate.turns = turns
        try:
            if turns is None:
                ended = await asyncio.gather(*works, return_exceptions=True)
            else:
                ended = await turns.play(works)
        finally:
            for hub in self.hubs:
                hub.fate.turns = None
        for each in ended:
            if isinstance(each, BaseException) and not isinstance(each, Refusal | Fault | Crash):
                raise each
        await self.rise()

    async def rise(self) -> None:
        """Whoever died is started anew."""
        for place, hub in enumerate(self.hubs):
            if hub.fate.is_dead:
                await hub.die()
                await self._open_hub(place)

    # what callers do

    async def grant(self, tenant: TenantId, amount: int) -> None:
        given = accounting.grant(f"grant-{next(self._grants)}", tenant, amount, self.clock.now())
        await self.book_of(tenant).grant(given, accounting.posting_of(given))
        self.granted[tenant] += amount

    async def submit(self, hub: Hub, tenant: TenantId, reference: str | None = None) -> None:
        self.taken.append(await hub.submit(tenant, reference=reference))

    async def submit_alone(self, hub: Hub, tenant: TenantId) -> None:
        """With nobody else about: refused only if the account does not cover it."""
        before = await self.book_of(tenant).account(tenant)
        price = PRICES[self.tenants.index(tenant)]
        amount = 0 if price is None else accounting.ceiling(price, "comfyui")
        try:
            await self.submit(hub, tenant)
            assert before.available >= amount, "spent what was not there"
        except Refusal as refusal:
            assert (refusal.code is RefusalCode.CREDITS_SHORT) == (before.available < amount), refusal
            raise

    async def cancel(self, hub: Hub, number: int) -> None:
        if self.taken:
            await hub.engine.cancel(self.taken[number % len(self.taken)])

    async def cancel_the_next(self, hub: Hub) -> None:
        """What another is about to submit, as soon as it can be seen: its submit need not be over."""
        before = len(self.sent)
        for _ in range(_LOOKS):
            if len(self.sent) > before and await hub.central.load(self.sent[-1].dispatch.job_id) is not None:
                await hub.engine.cancel(self.sent[-1].dispatch.job_id)
                return
            await hub.central.counts()

    async def retry(self, hub: Hub, number: int) -> None:
        if self.taken:
            await hub.engine.retry(self.taken[number % len(self.taken)])

    async def pause(self, hub: Hub, number: int) -> None:
        if self.taken:
            await hub.engine.pause(self.taken[number % len(self.taken)])

    async def resume(self, hub: Hub, number: int) -> None:
        if self.taken:
            await hub.engine.resume(self.taken[number % len(self.taken)])

    # what workers do

    async def take(self, hub: Hub, worker: WorkerId, *, is_alone: bool = False) -> bool:
        try:
            leased = await hub.poll(worker)
        except Refusal as refusal:
            if refusal.code is not RefusalCode.NOT_FOUND:
                raise
            await hub.worker(worker)
            leased = await hub.poll(worker)
        if leased is None:
            return False
        hold_id = HoldId(leased.ref.job_id, leased.ref.round)
        assert hold_id not in self.ends, f"{hold_id} was told to have ended, and runs again"
        if is_alone:
            assert await self._phase(hold_id) is None, f"{hold_id} runs and has ended for its tenant"
        self.leases.append(leased)
        await hub.engine.heartbeat(worker, [leased.ref])
        return True

    async def complete(self, hub: Hub, number: int, outputs: int) -> None:
        if not self.leases:
            return
        ref = self.leases[number % len(self.leases)].ref
        files = tuple(OutputFile("2", "images", f"{place}.png") for place in range(outputs))
        result = self.reported.setdefault(ref.attempt_id, JobResult({"2": {"by": ref.attempt_id}}, files))
        settled = await hub.engine.complete(Completion(ref, result, 1.0))
        assert settled.phase is Phase.COMPLETED or settled.will_retry
        self._told(ref, settled.phase)

    async def fail(self, hub: Hub, number: int, kind: FailureKind) -> None:
        if not self.leases:
            return
        ref = self.leases[number % len(self.leases)].ref
        settled = await hub.engine.fail(FailureReport(ref, Failure(kind, "it broke")))
        if settled.phase is Phase.FAILED:
            self._told(ref, settled.phase)

    async def release(self, hub: Hub, number: int) -> None:
        """As it was told to, or because it leaves."""
        if not self.leases:
            return
        ref = self.leases[number % len(self.leases)].ref
        self._told(ref, (await hub.engine.release(Release(ref, "cancelled"))).phase)

    def _told(self, ref: LeaseRef, phase: Phase) -> None:
        hold_id = HoldId(ref.job_id, ref.round)
        if phase.is_final:
            assert self.ends.setdefault(hold_id, phase) is phase, f"{hold_id} ended twice"

    # what time and processes do

    async def pass_time(self, seconds: float) -> None:
        self.clock.leap(seconds)
        for hub in self.hubs:
            await self.do(hub.engine.sweep())

    async def relay(self, hub: Hub, *, at_once: bool = True) -> None:
        await hub.relay.run_once(at_once=at_once)

    async def reconcile(self, hub: Hub) -> None:
        await hub.tenant_services.reconciler.reconcile()

    async def come_late(self, number: int) -> None:
        """A relay that was held up beyond its life inserts what has long been purged."""
        late = [each for each in self.sent if await self.central.load(each.dispatch.job_id) is None]
        if late:
            dispatch, stub = late[number % len(late)]
            self.revived.add(dispatch.job_id)
            await self.central.enqueue(dispatch, stub, ())

    # what must hold

    async def _phase(self, hold_id: HoldId) -> Phase | str | None:
        for ledger in self._ledgers.values():
            found = await ledger.phases([hold_id])
            if hold_id in found:
                return found[hold_id]
        return "unknown"

    async def check(self) -> None:
        """At any time."""
        known: set[JobId] = set()
        for tenant in self.tenants:
            ledger = await self.book_of(tenant).ledger(tenant)
            assert accounting.problems(ledger) == []
            holds = [each.hold_id for each in ledger.holds]
            known.update(each.job_id for each in holds)
            there = await self.central.load_many([each.job_id for each in holds])
            for hold_id, dispatch in zip(holds, there, strict=True):
                self._check_sides(hold_id, ledger.endings.get(hold_id), dispatch)
        assert known.issuperset(self.taken), "what was taken is nowhere"
        await self._check_sent()

    async def _check_sent(self) -> None:
        """What is open and was sent is in the store: nothing was purged before its end was settled."""
        for ledger in self._ledgers.values():
            entries = await ledger.outbox(is_sent=True, after=None, limit=_MANY)
            mine = [each.hold_id for each in entries if each.tenant in self.tenants]
            for hold_id, dispatch in zip(
                mine, await self.central.load_many([each.job_id for each in mine]), strict=True
            ):
                assert dispatch is not None, f"{hold_id} is open and gone from the store"

    def _check_sides(self, hold_id: HoldId, ended: str | None, dispatch: Dispatch | None) -> None:
        if ended is not None and hold_id in self.ends:
            assert self.ends[hold_id] == ended, f"{hold_id} is {ended}, its worker was told otherwise"
        if dispatch is None or hold_id.job_id in self.revived:
            return
        if dispatch.round != hold_id.round:
            assert dispatch.round > hold_id.round or ended is None, (
                f"{hold_id} has ended, and the store is behind"
            )
            return
        if ended is not None:
            assert dispatch.phase == ended, f"{hold_id} is {ended}, and {dispatch.phase} in the store"
        elif dispatch.settled_at is not None:
            raise AssertionError(f"{hold_id} is marked as settled and is not")

    async def come_to_rest(self) -> None:
        for hub in self.hubs:
            hub.fate.disarm()
        for _ in range(_ROUNDS_TO_REST):
            for hub in self.hubs:
                await self.do(self.relay(hub))
            await self.do(self.reconcile(self.hubs[0]))
            for number in range(len(self.taken)):
                await self.do(self.resume(self.hubs[0], number))
            while await self._take_any():
                await self.do(self.complete(self.hubs[0], -1, 1))
            await self.pass_time(61.0)
            await self.check()
            if await self._is_quiet():
                return
        raise AssertionError(f"it never comes to rest: {await self._left()}")

    async def _take_any(self) -> bool:
        with contextlib.suppress(Refusal, Fault):
            return await self.take(self.hubs[0], WORKERS[0], is_alone=True)
        return False

    async def _is_quiet(self) -> bool:
        return not await self._left() and not await self.central.unsettled(_MANY)

    async def _left(self) -> list[Any]:
        found: list[Any] = []
        for ledger in self._ledgers.values():
            holds = await ledger.open_holds(float("inf"), _MANY)
            found += [each for each in holds if each.tenant in self.tenants]
        return found

    async def check_at_rest(self) -> None:
        await self.check()
        found = await self.hubs[0].tenant_services.reconciler.reconcile(is_dry=True)
        assert found == []
        for hold_id, phase in self.ends.items():
            assert await self._phase(hold_id) is phase
        for tenant in self.tenants:
            await self._check_money(tenant)

    async def _check_money(self, tenant: TenantId) -> None:
        database, price = self.book_of(tenant), PRICES[self.tenants.index(tenant)]
        ledger = await database.ledger(tenant)
        assert ledger.account.held == 0
        spent = 0
        for settlement in ledger.settlements:
            if ledger.endings[settlement.hold_id] != Phase.COMPLETED:
                continue
            job = await database.get(settlement.hold_id.job_id)
            assert job is not None and job.round == settlement.hold_id.round, "what completed is not retried"
            result = job.result
            assert result is not None, f"{settlement.hold_id} completed, and its result is lost"
            assert result == self.reported[result.outputs["2"]["by"]], "somebody else's result"
            cost = {0: 10, 1: 80, 2: 1 + 5 * min(4, len(result.files)), 3: 0}[PRICES.index(price)]
            assert settlement.consumed == cost
            spent += cost
        assert ledger.account.balance == self.granted[tenant] - spent
