"""The kill loop with credits: many tenants in several databases, and engines with their relays, workers, the store and
the databases' PostgreSQL are killed. When all is quiet, every book is read and compared with what callers were told.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager

import msgspec
import psycopg
from tests.servers.postgres_server import PostgresServer

from chaos import kill_loop
from chaos.callers import execution_of, made_of
from chaos.checker import Finding, check
from chaos.kill_loop import QUIET_WITHIN_S, Loop, Teller, set_up
from chaos.logs import Line, Role, read_logs
from chaos.payers import payer_process, tenant_of
from chaos.setting import Setting
from chaos.stage import Actor, Stage
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Job
from comfyfleet.model.ledger import FlatPrice, Ledger, Outcome
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy import accounting
from comfyfleet.stores.factory import open_store
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.services import TenantServices

PRICE, GRANTED = 3, 1_000_000
_MANY = 1_000
_POLL_S = 0.5

Told = tuple[str | None, str | None]
"""Which execution a result is, or what became of the job instead, and what the result was made from."""


class Size(kill_loop.Size, frozen=True):
    tenants: int = 50
    databases: int = msgspec.field(default=4, name="pools")
    """The last of them is a file; the others lie on one PostgreSQL."""
    database_kills: int = msgspec.field(default=0, name="pool_kills")


def planned(size: Size) -> dict[Role, int]:
    return {**kill_loop.planned(size), "database": size.database_kills}


class Audited(msgspec.Struct, frozen=True):
    finding: Finding
    kills: dict[Role, int]
    settled: int = 0
    consumed: int = 0
    refunded: int = 0
    wrong: tuple[str, ...] = ()


def run(size: Size, seed: int, tell: Teller) -> Audited:
    with Stage(size.store, size.engines) as stage, _databases(stage, size) as server:
        asyncio.run(_set_up(stage.setting, size))
        set_up(stage, size)
        arguments = (seed, size.jobs, size.window, size.longest_s, size.tenants)
        caller = stage.add("caller", "caller", payer_process, *arguments)
        _CreditLoop(stage, caller, size, random.Random(seed), tell, server).run()
        tell("all is quiet: the books are read")
        cancelled = {line.job for line in read_logs(stage.setting.logs) if line.what == "cancelled"}
        kill_loop.read_again(stage)
        lines = [line for line in read_logs(stage.setting.logs) if line.job not in cancelled]
        finding = check(lines)
        audited = asyncio.run(_audit(stage, size, read_logs(stage.setting.logs)))
        if audited.wrong or not finding.is_clean:
            print(f"not clean: the logs are kept in {stage.keep_logs()}", file=sys.stderr)
        return msgspec.structs.replace(audited, finding=finding)


@contextmanager
def _databases(stage: Stage, size: Size) -> Iterator[PostgresServer]:
    server = PostgresServer(is_durable=True)
    server.start()
    try:
        urls = {"database-0": f"sqlite:///{stage.setting.folder / 'tenants.db'}"}
        with psycopg.connect(server.url, autocommit=True) as connection:
            for number in range(1, size.databases):
                connection.execute(f"CREATE DATABASE tenants_{number}".encode())
                urls[f"database-{number}"] = f"{server.url.rpartition('/')[0]}/tenants_{number}"
        stage.setting = msgspec.structs.replace(stage.setting, databases=urls)
        yield server
    finally:
        server.stop()


class _CreditLoop(Loop):
    def __init__(
        self,
        stage: Stage,
        caller: Actor,
        size: Size,
        rng: random.Random,
        tell: Teller,
        server: PostgresServer,
    ) -> None:
        super().__init__(stage, caller, size, rng, tell, planned(size))
        self._databases = server
        self._databases_are_up = True

    def _strike(self, kind: Role) -> bool:
        if kind != "database":
            return super()._strike(kind)
        if not self._databases_are_up:
            return False
        self._databases_are_up = False
        self._stage.note("killing", role="database", value="databases")
        self._databases.kill()
        self._stage.kills["database"] = self._stage.kills.get("database", 0) + 1
        self._later(self._chance.uniform(0.0, 3.0), self._start_databases)
        return True

    def _start_databases(self) -> None:
        self._databases.start()
        self._stage.note("up", role="database", value="databases")
        self._databases_are_up = True


# the books


async def _set_up(setting: Setting, size: Size) -> None:
    async with AsyncExitStack() as stack:
        tenant_services = await _opened(setting, stack)
        for number in range(size.tenants):
            tenant, name = tenant_of(number), f"database-{number % size.databases}"
            await tenant_services.tenants.create(Tenant(tenant, name, 1.0, price=FlatPrice(PRICE)))
            given = accounting.grant("first", tenant, GRANTED, 1.0)
            await (await tenant_services.databases.get(name)).grant(given, accounting.posting_of(given))


async def _opened(setting: Setting, stack: AsyncExitStack) -> TenantServices:
    clock = SystemClock()
    store = open_store(setting.url, clock)
    await store.open()
    stack.push_async_callback(store.close)
    tenant_services = TenantServices(store, clock, setting.databases)
    stack.push_async_callback(tenant_services.close)
    return tenant_services


async def _audit(stage: Stage, size: Size, lines: list[Line]) -> Audited:
    told = {
        line.job: (line.value, line.made) for line in lines if line.what == "seen" and line.job and line.value
    }
    async with AsyncExitStack() as stack:
        tenant_services = await _opened(stage.setting, stack)
        wrong = await _left(tenant_services)
        wrong += [
            f"{each.kind.value}: {each.message}"
            for each in await tenant_services.reconciler.reconcile(is_dry=True)
        ]
        settled = consumed = 0
        known: set[str] = set()
        for number in range(size.tenants):
            home = await tenant_services.directory.locate(tenant_of(number))
            assert home is not None
            ledger = await home.database.ledger(tenant_of(number))
            wrong += await _wrong(ledger, home.database, told)
            known |= {each.hold_id.job_id for each in ledger.holds}
            settled += len(ledger.settlements)
            consumed += sum(each.outcome is Outcome.CONSUMED for each in ledger.settlements)
        acknowledged = {line.job for line in lines if line.what == "acknowledged" and line.job}
        wrong += [f"{job} was acknowledged and is in no book" for job in sorted(acknowledged - known)]
    return Audited(Finding(), stage.kills, settled, consumed, settled - consumed, tuple(wrong[:20]))


async def _left(tenant_services: TenantServices) -> list[str]:
    """What is still open when everything has had its time."""
    deadline = time.monotonic() + QUIET_WITHIN_S
    while True:
        found = [
            f"{each.job_id} is not settled"
            for each in await tenant_services.ledger_store.central.unsettled(_MANY)
        ]
        for name in tenant_services.databases.names:
            for hold in await (await tenant_services.databases.get(name)).open_holds(float("inf"), _MANY):
                found.append(f"{hold.hold_id} is held")
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_S)


async def _wrong(ledger: Ledger, database: TenantDatabase, told: Mapping[str, Told]) -> list[str]:
    """Where a book does not add up, or says otherwise than callers were told."""
    tenant, completed = ledger.account.tenant, 0
    found = [f"{tenant}: {each}" for each in accounting.problems(ledger)]
    holds = [each.hold_id for each in ledger.holds]
    jobs: dict[JobId, Job] = {}
    for first in range(0, len(holds), _MANY):
        jobs |= await database.get_many([each.job_id for each in holds[first : first + _MANY]])
    for hold_id, phase in ledger.endings.items():
        job = jobs.get(hold_id.job_id)
        if job is None or job.round != hold_id.round:
            continue
        if phase == Phase.COMPLETED:
            completed += 1
            value = "no result" if job.result is None else execution_of(job.result)
            made = made_of(job.result)
        else:
            value, made = f"not completed: {phase}", None
        if told.get(hold_id.job_id) != (value, made):
            was = told.get(hold_id.job_id)
            found.append(f"{hold_id}: its caller was told {was}, its book says {(value, made)}")
    if ledger.account.balance != GRANTED - PRICE * completed:
        found.append(f"{tenant} has {ledger.account.balance} after {completed} that completed")
    return found
