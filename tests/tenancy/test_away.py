"""A tenant's PostgreSQL is really stopped: its submits are refused, others do not notice, its running jobs settle when
it is back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.servers.postgres_server import CannotStart, PostgresServer
from tests.tenancy._tenant_services import ACME, BORG, Fleet

from comfyfleet.engine.system import SystemClock
from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import JobId
from comfyfleet.model.ledger import Account
from comfyfleet.stores.sqlite.store import SqliteStore

# Generous: a machine that others use too. What is meant is that nobody waits for a database that is not his.
AT_ONCE_S = 2.0
BACK_WITHIN_S = 60.0


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """To be mistreated, so a server of its own."""
    try:
        server = PostgresServer()
        server.start()
    except CannotStart as reason:
        pytest.skip(f"no PostgreSQL: {reason}")
    yield server
    server.stop()


@pytest.fixture
async def fleet(server: PostgresServer, tmp_path: Path) -> AsyncIterator[Fleet]:
    """Acme lives on the server, Borg in a file."""
    clock = SystemClock()
    databases = {"first": server.url, "second": f"sqlite:///{tmp_path}/second.db"}
    async with Fleet(SqliteStore(tmp_path / "fleet.db", clock), clock, databases) as fleet:
        await fleet.tenant(ACME, granted=100)
        await fleet.tenant(BORG, granted=1000, database="second")
        await fleet.worker()
        async with fleet.tenant_services.background_tasks(fleet.engine.admit):
            yield fleet


@asynccontextmanager
async def at_once() -> AsyncIterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < AT_ONCE_S


async def refused(fleet: Fleet) -> RefusalCode:
    with pytest.raises(Refusal) as told:
        await fleet.submit(ACME)
    return told.value.code


async def others_go_on(fleet: Fleet, times: int) -> None:
    for _ in range(times):
        async with at_once():
            job_id = await fleet.submit(BORG)
        async with at_once():
            leased = await fleet.take()
        assert leased.ref.job_id == job_id
        async with at_once():
            await fleet.complete(leased)


async def told_until_heard(fleet: Fleet, leased: LeasedJob) -> None:
    """As an agent does."""
    async with asyncio.timeout(BACK_WITHIN_S):
        while True:
            try:
                await fleet.engine.heartbeat(leased.worker_id, [leased.ref])
                return await fleet.complete(leased)
            except Fault:
                await asyncio.sleep(0.1)


async def taken_when_back(fleet: Fleet) -> LeasedJob:
    async with asyncio.timeout(BACK_WITHIN_S):
        while (leased := await fleet.poll()) is None:
            await asyncio.sleep(0.1)
    return leased


async def leases_of(fleet: Fleet, *jobs: JobId) -> int:
    return sum([len(await fleet.central.attempts(job_id)) for job_id in jobs])


async def test_a_database_that_is_down_is_felt_by_its_own_tenants_alone(
    fleet: Fleet, server: PostgresServer
) -> None:
    await fleet.submit(ACME)
    running = await fleet.take()
    # In front of all the others.
    waiting = [await fleet.submit(ACME, priority=10) for _ in range(3)]
    server.kill()
    async with asyncio.timeout(AT_ONCE_S):
        assert await refused(fleet) is RefusalCode.UNAVAILABLE
    began = time.monotonic()
    await others_go_on(fleet, 10)
    with pytest.raises(Fault):
        await fleet.complete(running)
    await others_go_on(fleet, 10)
    # One look now and then, not one for each poll.
    assert await leases_of(fleet, *waiting) <= 3 * (1 + (time.monotonic() - began))
    server.start()
    await told_until_heard(fleet, running)
    for _ in waiting:
        await fleet.complete(await taken_when_back(fleet))
    assert await fleet.account(ACME) == Account(ACME, 60)
    assert await fleet.account(BORG) == Account(BORG, 800)
    await fleet.check(ACME, BORG)
    await fleet.submit(ACME)


async def test_what_is_cancelled_while_the_database_is_down_is_refunded_when_it_is_back(
    fleet: Fleet, server: PostgresServer
) -> None:
    job_id = await fleet.submit(ACME)
    server.kill()
    await fleet.engine.cancel(job_id)
    server.start()
    async with asyncio.timeout(BACK_WITHIN_S):
        while await fleet.central.unsettled(1):
            await asyncio.sleep(0.1)
    assert await fleet.account(ACME) == Account(ACME, 100)
    await fleet.check(ACME)


async def test_a_database_that_does_not_answer_is_given_up_and_others_wait_for_it_once(
    fleet: Fleet, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.tenancy.database.registry.ANSWER_S", 1.0)
    monkeypatch.setattr("comfyfleet.tenancy.ledger_store._LEASE_TIMEOUT_S", 0.5)
    await fleet.submit(ACME, priority=10)
    with server.stopped():
        async with asyncio.timeout(AT_ONCE_S * 2):
            assert await refused(fleet) is RefusalCode.UNAVAILABLE
        await others_go_on(fleet, 10)
    await fleet.complete(await taken_when_back(fleet))
    async with asyncio.timeout(BACK_WITHIN_S):
        while (await fleet.account(ACME)).held:
            await asyncio.sleep(0.1)
    await fleet.check(ACME, BORG)
