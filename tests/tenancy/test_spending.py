"""Two processes spend at the same instant, a hundred times: of two submits of 80 against 100 one is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.servers.postgres_database import empty_database
from tests.servers.redis_fixtures import some_server, with_prefix
from tests.tenancy._databases import address, tenant_schema
from tests.tenancy._spending import spend_at_once, spender

from comfyfleet.model.ids import TenantId
from comfyfleet.model.ledger import Account
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.testing.contract.ledger_driver import LedgerDriver

TIMES = 100


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'tenants.db'}"
    return tenant_schema(request.config)


async def test_two_submits_of_80_against_100_from_two_processes_one_is_accepted(url: str) -> None:
    async with AsyncExitStack() as stack:
        # Both set the database up, too, at the same time.
        spenders = [await stack.enter_async_context(spender("_spender", url)) for _ in range(2)]
        assert [await each.answer() for each in spenders] == ["ready", "ready"]
        database = open_tenant_database(url)
        await database.open()
        stack.push_async_callback(database.close)
        driver = LedgerDriver(database, "grant")
        tenants = [TenantId(f"tenant-{number:03d}") for number in range(TIMES)]
        for tenant in tenants:
            await driver.grant(100, tenant)
        for tenant in tenants:
            for each in spenders:
                each.spend(tenant, 80)
            assert sorted([await each.answer() for each in spenders]) == ["done", "short"]
            assert await database.account(tenant) == Account(tenant, 100, 80)
        await driver.check(*tenants)


async def test_a_process_that_is_killed_while_it_spends_leaves_a_book_that_is_right(url: str) -> None:
    tenant = TenantId("acme")
    database = open_tenant_database(url)
    await database.open()
    driver = LedgerDriver(database, "grant")
    await driver.grant(100_000, tenant)
    accepted = 0
    for answers in (1, 7, 20):
        async with spender("_spender", url) as killed:
            assert await killed.answer() == "ready"
            for _ in range(2000):
                killed.spend(tenant, 3)
            for _ in range(answers):
                assert await killed.answer() == "done"
            killed.kill()
        accepted += answers
        await driver.check(tenant)
        ledger = await database.ledger(tenant)
        assert len(ledger.holds) >= accepted, "what was answered is there"
        accepted = len(ledger.holds)
        # One more may have been on its way to the server when its process died.
        sent = await database.outbox(is_sent=False, after=None, limit=1000)
        assert len(sent) >= min(accepted, 1000)
    assert accepted < 6000, "nobody was killed before the end"
    await database.close()


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.mark.parametrize("pair", ["redis+postgresql", "postgresql+sqlite"])
async def test_two_submits_of_80_against_100_from_two_hubs_one_is_accepted(
    pair: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    central, apart = pair.split("+")
    database = f"sqlite:///{tmp_path / 'tenants.db'}" if apart == "sqlite" else tenant_schema(request.config)
    if central == "redis":
        store = with_prefix(request.getfixturevalue("redis_url"))
    else:
        store = address(empty_database(request.config))
    assert await spend_at_once(store, database, TIMES) == []
