"""The PostgreSQL store keeps the contract of stores."""

from __future__ import annotations

import pytest
from tests.contract._bench import MakeStore
from tests.contract.store_contract import StoreContract
from tests.servers.postgres_database import empty_database

from comfyfleet.stores.postgres import PostgresStore


class TestPostgresStore(StoreContract):
    @pytest.fixture
    def make_store(self, request: pytest.FixtureRequest) -> MakeStore:
        return lambda clock: PostgresStore(empty_database(request.config), clock_for_tests=clock)
