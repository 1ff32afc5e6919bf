"""The PostgreSQL store keeps the contract of stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psycopg
import pytest
from tests.servers.postgres_database import emptied_database, empty_database

from comfyfleet.ports import Store
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.testing.contract.full_disk import FullDiskContract, NoRoom
from comfyfleet.testing.contract.job_transfer import JobTransferContract
from comfyfleet.testing.contract.store import StoreContract
from comfyfleet.testing.contract.store_bench import MakeStore

# As the server meets it: in the middle of a transaction, with some of the rows written.
_FILL = """
CREATE OR REPLACE FUNCTION comfyfleet.no_room() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$;
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'comfyfleet' LOOP
        EXECUTE format('CREATE TRIGGER no_room AFTER INSERT OR UPDATE OR DELETE ON comfyfleet.%I '
            'FOR EACH ROW EXECUTE FUNCTION comfyfleet.no_room()', name);
    END LOOP;
END $$;
"""
_CLEAR = "DROP FUNCTION comfyfleet.no_room() CASCADE"


@pytest.fixture
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    return lambda clock: PostgresStore(emptied_database(request.config), clock_for_tests=clock)


# The days of the differential test are thousands of transactions, and others may want the machine too.
class TestPostgresStore(StoreContract, JobTransferContract):
    pass


class TestPostgresStoreOnAFullDisk(FullDiskContract):
    @pytest.fixture
    def make_store(self, database: str) -> MakeStore:
        return lambda clock: PostgresStore(database, clock_for_tests=clock)

    @pytest.fixture
    def database(self, request: pytest.FixtureRequest) -> str:
        return empty_database(request.config)

    @pytest.fixture
    def no_room(self, database: str) -> NoRoom:
        def run(statement: str) -> None:
            with psycopg.connect(database, autocommit=True) as connection:
                connection.execute("SET client_min_messages = error")
                connection.execute(statement.encode())

        @asynccontextmanager
        async def no_room(_: Store) -> AsyncIterator[None]:
            run(_FILL)
            yield
            run(_CLEAR)

        return no_room
