"""The Redis store keeps the contract of stores, on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contract._bench import MakeStore
from tests.contract.store_contract import StoreContract
from tests.servers.redis_fixtures import own_server, some_server, with_prefix

from comfyfleet.ports import Clock
from comfyfleet.stores.redis.store import RedisStore


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    with own_server("--cluster-enabled", "yes", is_durable=False) as server:
        server.become_a_cluster()
        yield server.url


class TestRedisStore(StoreContract):
    """Every key of a fleet carries one hash tag, so a cluster keeps it on one shard."""

    @pytest.fixture(params=["server_url", "cluster_url"])
    def make_store(self, request: pytest.FixtureRequest) -> MakeStore:
        url: str = request.getfixturevalue(request.param)

        def make(clock: Clock) -> RedisStore:
            return RedisStore(with_prefix(url), winding=clock)

        return make
