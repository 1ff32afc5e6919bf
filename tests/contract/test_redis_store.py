"""The Redis store keeps the contract of stores, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests._examples import examples
from tests.servers.redis_fixtures import own_server, some_server, with_prefix

from comfyfleet.ports import Store
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.differential import play, steps
from comfyfleet.testing.contract.full_disk import FullDiskContract, NoRoom
from comfyfleet.testing.contract.job_transfer import JobTransferContract
from comfyfleet.testing.contract.leases import LeaseContract
from comfyfleet.testing.contract.store import StoreContract
from comfyfleet.testing.contract.store_bench import MakeStore, UsesBench


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture(scope="module")
def cluster_url() -> Iterator[str]:
    with own_server("--cluster-enabled", "yes", is_durable=False) as server:
        server.become_a_cluster()
        yield server.url


class RedisContract(StoreContract, JobTransferContract):
    @settings(
        max_examples=examples(25),
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )
    @given(day=st.lists(steps, min_size=60, max_size=100))
    def test_a_long_day_goes_as_on_the_memory_store(
        self, make_store: MakeStore, day: list[tuple[Any, ...]]
    ) -> None:
        """Short days show little here: the bounds of the index must have had time to grow stale."""
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(play(make_store, day))
        finally:
            loop.close()


class OnOneServer:
    @pytest.fixture
    def make_store(self, server_url: str) -> MakeStore:
        return lambda clock: RedisStore(with_prefix(server_url), winding=clock)


class TestRedisStore(OnOneServer, RedisContract):
    pass


class OnACluster:
    """Every key of a fleet carries one hash tag, so a cluster keeps it on one shard."""

    @pytest.fixture
    def make_store(self, cluster_url: str) -> MakeStore:
        return lambda clock: RedisStore(with_prefix(cluster_url), winding=clock)


class TestRedisStoreOnACluster(OnACluster, LeaseContract, JobTransferContract, UsesBench):
    """Keys are named in one place: what leases and moves jobs names most of them. All of it is a slow test."""


@pytest.mark.slow
class TestRedisStoreOnAClusterInFull(OnACluster, RedisContract):
    pass


class TestRedisStoreOutOfMemory(FullDiskContract):
    @pytest.fixture
    def make_store(self) -> Iterator[MakeStore]:
        with own_server(is_durable=False) as server:
            yield lambda clock: RedisStore(server.url, winding=clock)

    @pytest.fixture
    def no_room(self) -> NoRoom:
        @asynccontextmanager
        async def no_room(store: Store) -> AsyncIterator[None]:
            assert isinstance(store, RedisStore)
            await store.diagnose("CONFIG", "SET", "maxmemory", "100kb")
            yield
            await store.diagnose("CONFIG", "SET", "maxmemory", "0")

        return no_room
