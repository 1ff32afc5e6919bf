"""A fleet with tenants: an engine on a store with databases beside it, time wound by hand, workers that do as told."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.engine._rig import graph, offers

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Completion, FailureReport, LeasedJob, Poll, RegisterWorker
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, PollId, TenantId, WorkerId
from comfyfleet.model.job import JobResult, OutputFile, Submission
from comfyfleet.model.ledger import Account, FlatPrice, Price
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy import accounting
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Clock, Store
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.outbox_relay import OutboxRelay
from comfyfleet.tenancy.services import TenantServices
from comfyfleet.testing.time import ManualClock, SeededRandom

ACME, BORG = TenantId("acme"), TenantId("borg")
WORKER = WorkerId("gpu")
PRICE = FlatPrice(10)


class Fleet:
    """One process: its engine and its tenant services. A test runs the relay by hand."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        databases: dict[str, str],
        *,
        open_database: Callable[[str], TenantDatabase] = open_tenant_database,
        around: Callable[[TenantDatabase], TenantDatabase] | None = None,
        seed: int = 0,
        **rules: Any,
    ) -> None:
        """Two of them on one store are given different seeds, or they make the same ids."""
        self.clock = clock
        self.central = store
        self.tenant_services = TenantServices(store, clock, databases, open_database, around=around)
        self.engine = Engine(
            self.tenant_services.store, rules=Rules(**rules), clock=clock, rng=SeededRandom(seed)
        )
        self.relay = OutboxRelay(self.tenant_services.ledger_store, self.engine.admit)
        self._polls = itertools.count(1)
        self._seed = seed

    async def __aenter__(self) -> Fleet:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()
        await self.tenant_services.close()

    async def tenant(
        self,
        tenant: TenantId = ACME,
        *,
        granted: int = 0,
        price: Price | None = PRICE,
        database: str = "first",
        **more: Any,
    ) -> Tenant:
        made = await self.tenant_services.tenants.create(
            Tenant(tenant, database, self.clock.now(), price=price, **more)
        )
        opened = await self.tenant_services.databases.get(database)
        await opened.create_account(tenant)
        if granted:
            given = accounting.grant("first", tenant, granted, self.clock.now())
            await opened.grant(given, accounting.posting_of(given))
        return made

    async def worker(self, worker: WorkerId = WORKER, *kinds: str, slots: int = 10) -> WorkerId:
        await self.engine.register(RegisterWorker(worker, offers(*(kinds or ("KSampler",))), slots))
        return worker

    async def submit(self, tenant: TenantId = ACME, **options: Any) -> JobId:
        return (await self.engine.submit(Submission(graph(), tenant=tenant, **options))).job_id

    async def poll(self, worker: WorkerId = WORKER) -> LeasedJob | None:
        return await self.engine.poll(Poll(worker, PollId(f"poll-{self._seed}-{next(self._polls)}"), 0))

    async def take(self, worker: WorkerId = WORKER) -> LeasedJob:
        leased = await self.poll(worker)
        assert leased is not None, "no job was found"
        await self.engine.heartbeat(worker, [leased.ref])
        return leased

    async def complete(self, leased: LeasedJob, outputs: int = 1) -> None:
        files = tuple(OutputFile("2", "images", f"x_{number}.png") for number in range(outputs))
        await self.engine.complete(Completion(leased.ref, JobResult({"2": {}}, files), 1.0))

    async def fail(self, leased: LeasedJob, kind: FailureKind = FailureKind.INVALID_WORKFLOW) -> None:
        await self.engine.fail(FailureReport(leased.ref, Failure(kind, "it broke")))

    async def account(self, tenant: TenantId = ACME) -> Account:
        home = await self.tenant_services.directory.locate(tenant)
        assert home is not None
        return await home.database.account(tenant)

    async def check(self, *tenants: TenantId) -> None:
        """Every book is right, and nothing is left between the databases."""
        for tenant in tenants or (ACME,):
            home = await self.tenant_services.directory.locate(tenant)
            assert home is not None
            assert accounting.problems(await home.database.ledger(tenant)) == []
        assert await self.central.unsettled(10) == []


@asynccontextmanager
async def one_fleet(store: Store, clock: ManualClock, folder: Path, **rules: Any) -> AsyncIterator[Fleet]:
    databases = {name: f"sqlite:///{folder}/{name}.db" for name in ("first", "second")}
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(Fleet(store, clock, databases, **rules))
