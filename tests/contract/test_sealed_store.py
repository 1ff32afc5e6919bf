"""A sealed store keeps the contract of stores, whichever store lies inside, and so does a sealed tenant database."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix
from tests.tenancy._databases import tenant_schema

from comfyfleet.ports import Clock, Store
from comfyfleet.stores.crypto.keyring import Keyring, MasterKeys
from comfyfleet.stores.crypto.store import encrypted_store
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.database.encrypted import encrypted_database
from comfyfleet.testing.contract.job_transfer import JobTransferContract
from comfyfleet.testing.contract.settlement import SettlementContract
from comfyfleet.testing.contract.state import StateContract
from comfyfleet.testing.contract.store import StoreContract
from comfyfleet.testing.contract.store_bench import MakeStore, UsesBench
from comfyfleet.testing.contract.tenants import Connect, TenantDatabaseContract
from comfyfleet.testing.time import ManualClock

MASTERS = MasterKeys({"k1": bytes(32)}, "k1")


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with some_server() as url:
        yield url


def encrypted(store: Store, clock: Clock) -> Store:
    return encrypted_store(store, Keyring(store.documents, clock, lambda: MASTERS))


class SealedContract(StoreContract, JobTransferContract):
    # A digest of the plain payload would confirm a guess of it.
    keeps_digests = False


class ShortSealedContract(StateContract, SettlementContract, JobTransferContract, UsesBench):
    """What is sealed is the same whichever store lies inside: the whole contract is played over memory, and over the
    others with the slow tests."""

    keeps_digests = False


class TestSealedMemoryStore(SealedContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda clock: encrypted(MemoryStore(clock), clock)


class OverSqlite:
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        numbers = itertools.count()
        return lambda clock: encrypted(SqliteStore(tmp_path / f"fleet-{next(numbers)}.db", clock), clock)


class TestSealedSqliteStore(OverSqlite, ShortSealedContract):
    pass


@pytest.mark.slow
class TestSealedSqliteStoreInFull(OverSqlite, SealedContract):
    pass


class OverRedis:
    @pytest.fixture
    def make_store(self, server_url: str) -> MakeStore:
        return lambda clock: encrypted(RedisStore(with_prefix(server_url), winding=clock), clock)


class TestSealedRedisStore(OverRedis, ShortSealedContract):
    pass


@pytest.mark.slow
class TestSealedRedisStoreInFull(OverRedis, SealedContract):
    pass


class OverPostgres:
    @pytest.fixture
    def make_store(self, request: pytest.FixtureRequest) -> MakeStore:
        return lambda clock: encrypted(
            PostgresStore(emptied_database(request.config), clock_for_tests=clock), clock
        )


class TestSealedPostgresStore(OverPostgres, ShortSealedContract):
    pass


@pytest.mark.slow
class TestSealedPostgresStoreInFull(OverPostgres, SealedContract):
    # Random days are slow here, and what is sealed is the same as on the others.
    test_the_same_day_goes_as_on_the_memory_store = None  # type: ignore[assignment]


def _keyring() -> Keyring:
    return Keyring(MemoryDocumentStore(), ManualClock(), lambda: MASTERS)


class TestSealedSqliteTenantDatabase(TenantDatabaseContract):
    @pytest.fixture
    def connect(self, tmp_path: Path) -> Connect:
        keyring = _keyring()
        return lambda: encrypted_database(open_tenant_database(f"sqlite:///{tmp_path}/tenants.db"), keyring)


class TestSealedPostgresTenantDatabase(TenantDatabaseContract):
    @pytest.fixture
    def connect(self, request: pytest.FixtureRequest) -> Connect:
        address, keyring = tenant_schema(request.config), _keyring()
        return lambda: encrypted_database(open_tenant_database(address), keyring)
