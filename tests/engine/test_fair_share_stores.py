"""Fair share is the store's: it holds on each of them, and for several engines on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine._shares import Demand, SharedFleet
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.ports import Store
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.time import ManualClock

ANN, BOB = TenantId("ann"), TenantId("bob")


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Store:
    match request.param:
        case "sqlite":
            return SqliteStore(tmp_path / "fleet.db", clock)
        case "redis":
            return RedisStore(with_prefix(request.getfixturevalue("redis_url")), winding=clock)
    return PostgresStore(emptied_database(request.config), clock_for_tests=clock)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def test_gpu_seconds_follow_the_weights(store: Store, clock: ManualClock) -> None:
    demands = [Demand(ANN, 2.0, 1.0), Demand(BOB, 10.0, 3.0)]
    async with SharedFleet(store, clock, 2) as fleet:
        for demand in demands:
            await store.fair_share.put_terms(TenantTerms(demand.tenant, demand.weight))
        await fleet.run(demands, 400.0)
    assert fleet.part_of(BOB) == pytest.approx(0.75, rel=0.05)
