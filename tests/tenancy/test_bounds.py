"""What hubs do beside their jobs is bounded, whoever's database is away: one compares, looks end, lists answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from tests.engine.test_several_engines import SharedStore
from tests.tenancy._tenant_services import ACME, BORG, Fleet, one_fleet

from comfyfleet.engine.job_list import records_of
from comfyfleet.hub.tenants import maintenance
from comfyfleet.hub.tenants.maintenance import TenantMaintenance
from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.ledger import HoldId
from comfyfleet.model.tenant import Tenant, TenantState
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy import outbox_relay, reconciler
from comfyfleet.tenancy.claims import Claim, claim, waits_for
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.terms import FairShareSync
from comfyfleet.testing.time import ManualClock


class Watched:
    """A database whose reads are counted, and that may be away."""

    def __init__(self, inner: TenantDatabase) -> None:
        self._inner = inner
        self.is_away = False
        self.compared = 0

    def __getattr__(self, name: str) -> Any:
        if self.is_away and name != "close":
            raise Fault("the database is away")
        return getattr(self._inner, name)

    async def outbox(self, *, is_sent: bool, after: HoldId | None, limit: int) -> Any:
        self.compared += is_sent
        return await self._inner.outbox(is_sent=is_sent, after=after, limit=limit)


async def test_of_two_hubs_one_compares_the_store_with_the_databases_each_minute(tmp_path: Path) -> None:
    clock, opened = ManualClock(), list[Watched]()
    store = SharedStore(clock)
    databases = {"first": f"sqlite:///{tmp_path}/first.db"}

    def opening(url: str) -> TenantDatabase:
        opened.append(Watched(open_tenant_database(url)))
        return cast(TenantDatabase, opened[-1])

    async with (
        Fleet(store, clock, databases, open_database=opening) as one,
        Fleet(store, clock, databases, open_database=opening, seed=1) as other,
    ):
        await one.tenant(granted=100)
        await other.submit()
        for minute in (1, 2, 3):
            await one.tenant_services.reconciler.reconcile_if_due()
            await other.tenant_services.reconciler.reconcile_if_due()
            assert sum(each.compared for each in opened) == minute
            await clock.advance(reconciler.EVERY_S)
        # A hub that died in the middle is replaced by another.
        assert await claim(store.documents, clock, reconciler.CLAIM) is not None
        await other.tenant_services.reconciler.reconcile_if_due()
        assert sum(each.compared for each in opened) == 3
        await clock.advance(reconciler.EVERY_S)
        await other.tenant_services.reconciler.reconcile_if_due()
        assert sum(each.compared for each in opened) == 4


async def test_a_look_at_unsettled_ends_is_bounded_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_relay, "_PAGE", 2)
    monkeypatch.setattr(outbox_relay, "PAGES", 2)
    clock = ManualClock()
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        await fleet.tenant(granted=1000)
        jobs = [await fleet.submit() for _ in range(11)]
        settle, asked = fleet.tenant_services.ledger_store.settler.settle, list[JobId]()

        async def away(_: Dispatch) -> None:
            raise Fault("the database is away")

        monkeypatch.setattr(fleet.tenant_services.ledger_store.settler, "settle", away)
        for job_id in jobs:
            await fleet.engine.cancel(job_id)
        read, pages = fleet.central.unsettled, list[int]()

        async def counted(limit: int, after: JobId | None = None) -> list[Dispatch]:
            pages.append(limit)
            return await read(limit, after)

        async def noted(dispatch: Dispatch) -> None:
            asked.append(dispatch.job_id)
            await settle(dispatch)

        monkeypatch.setattr(fleet.central, "unsettled", counted)
        await fleet.relay.run_once()
        assert len(pages) == 2, "however many there are"
        monkeypatch.setattr(fleet.tenant_services.ledger_store.settler, "settle", noted)
        for _ in range(12):
            await fleet.relay.run_once()
        assert sorted(asked) == sorted(jobs), "each once, and none is forgotten"
        await fleet.check()


async def test_the_dead_letter_is_listed_while_one_database_is_away(tmp_path: Path) -> None:
    clock, opened = ManualClock(), dict[str, Watched]()
    databases = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}

    def opening(url: str) -> TenantDatabase:
        opened[url] = Watched(open_tenant_database(url))
        return cast(TenantDatabase, opened[url])

    async with Fleet(MemoryStore(clock), clock, databases, open_database=opening) as fleet:
        await fleet.tenant(ACME, granted=100)
        await fleet.tenant(BORG, granted=100, database="second")
        await fleet.worker()
        for tenant in (ACME, BORG):
            await fleet.submit(tenant)
            await fleet.fail(await fleet.take())
        opened[databases["first"]].is_away = True
        dead = await fleet.engine.dead_letter()
        jobs = await records_of(fleet.engine.store.records, [each.job_id for each in dead])
        assert [job.phase for job in jobs] == [Phase.FAILED, Phase.FAILED]
        said = {job.tenant: job.failure for job in jobs}
        reached, away = said[BORG], said[ACME]
        assert reached is not None and reached.message == "it broke"
        assert away is not None and away.kind is FailureKind.INVALID_WORKFLOW


class Nobody:
    """Stands for whoever moves, deletes and judges: it is told of each tenant, and ends when it is let."""

    def __init__(self) -> None:
        self.begun: list[TenantId] = []
        self.let = asyncio.Event()

    async def move(self, tenant: Tenant, _: Claim) -> Tenant:
        self.begun.append(tenant.tenant_id)
        await self.let.wait()
        raise Fault("the database is away")


async def test_few_tenants_are_seen_to_at_a_time_and_each_has_its_turn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(maintenance, "AT_ONCE", 2)
    clock, relocation = ManualClock(), Nobody()
    async with one_fleet(MemoryStore(clock), clock, tmp_path) as fleet:
        names = [TenantId(name) for name in "abcde"]
        for name in names:
            moving = Tenant(name, "first", 1.0, state=TenantState.MOVING, moving_to="second")
            await fleet.tenant_services.tenants.create(moving)
        unused = cast(Any, None)
        tenant_maintenance = TenantMaintenance(
            fleet.central.documents,
            clock,
            fleet.tenant_services.tenants,
            cast(Any, relocation),
            unused,
            unused,
            FairShareSync(fleet.central.fair_share),
            unused,
            look_s=0.01,
        )
        tenant_maintenance.start()
        try:
            async with asyncio.timeout(60):
                while len(relocation.begun) < 2:
                    await asyncio.sleep(0.001)
                assert await waits_for(fleet.central.documents, names[0]) is None
                relocation.let.set()
                while set(relocation.begun) != set(names):
                    await asyncio.sleep(0.001)
        finally:
            await tenant_maintenance.close()
        assert relocation.begun[:5] == names, "none is begun again before all had their turn"
        said = await waits_for(fleet.central.documents, names[0])
        assert said is not None and "the database is away" in said, "whoever asks is told what it waits for"
