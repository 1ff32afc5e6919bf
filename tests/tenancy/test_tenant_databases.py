"""Tenant databases keep their contract, on a SQLite file and on PostgreSQL, and refuse what would spoil a book."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import psycopg
import pytest
from tests.tenancy._databases import tenant_schema

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.testing.contract.ledger_driver import LedgerDriver
from comfyfleet.testing.contract.tenants import Connect, TenantDatabaseContract
from comfyfleet.testing.time import ManualClock

# Each would falsify a book; the database itself says no.
SPOILS = [
    "UPDATE {}postings SET balance = 1",
    "DELETE FROM {}postings",
    "DELETE FROM {}settlements",
    "UPDATE {}settlements SET consumed = 0",
    "UPDATE {}accounts SET held = balance + 1",
    "UPDATE {}accounts SET held = -1",
    "UPDATE {}rounds SET outbox = 'sent' WHERE phase <> 'open'",
]


async def keep_a_book(connect: Connect) -> None:
    database = connect()
    await database.open()
    driver = LedgerDriver(database)
    await driver.grant(100)
    await driver.end(await driver.submit(80), Phase.COMPLETED, 30)
    await database.close()


class TestSqliteTenantDatabase(TenantDatabaseContract):
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "tenants one.db"

    @pytest.fixture
    def connect(self, file: Path) -> Connect:
        return lambda: open_tenant_database(f"sqlite:///{file}")

    @pytest.mark.parametrize("spoil", SPOILS)
    async def test_the_file_itself_refuses_what_would_falsify_the_book(
        self, file: Path, connect: Connect, spoil: str
    ) -> None:
        await keep_a_book(connect)
        database = sqlite3.connect(file)
        with pytest.raises(sqlite3.IntegrityError):
            database.execute(spoil.format(""))
        database.close()

    async def test_a_folder_that_is_not_there_is_told_of(self, tmp_path: Path) -> None:
        database = open_tenant_database(f"sqlite:///{tmp_path}/nowhere/tenants.db")
        with pytest.raises(Fault, match="Check the path"):
            await database.open()
        await database.close()

    async def test_the_file_of_a_store_is_not_taken_for_one_of_tenants(
        self, file: Path, connect: Connect
    ) -> None:
        store = SqliteStore(file, ManualClock())
        await store.open()
        await store.close()
        database = connect()
        with pytest.raises(Fault, match="another migration 1"):
            await database.open()
        await database.close()


class TestPostgresTenantDatabase(TenantDatabaseContract):
    @pytest.fixture
    def address(self, request: pytest.FixtureRequest) -> str:
        return tenant_schema(request.config)

    @pytest.fixture
    def connect(self, address: str) -> Connect:
        return lambda: open_tenant_database(address)

    @pytest.mark.parametrize("spoil", SPOILS)
    async def test_the_database_itself_refuses_what_would_falsify_the_book(
        self, address: str, connect: Connect, spoil: str
    ) -> None:
        await keep_a_book(connect)
        with psycopg.connect(address) as connection, pytest.raises(psycopg.Error):
            connection.execute(spoil.format("comfyfleet_tenants.").encode())

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ("UPDATE comfyfleet_tenants.migrations SET checksum = 'x'", "from another text"),
            ("INSERT INTO comfyfleet_tenants.migrations VALUES (99, 'later', 'x')", "newer ComfyFleet"),
        ],
    )
    async def test_tables_of_another_version_are_refused(
        self, address: str, connect: Connect, change: str, said: str
    ) -> None:
        await keep_a_book(connect)
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(change.encode())
        with pytest.raises(Fault, match=said):
            await connect().open()

    async def test_a_server_that_is_away_is_told_of_without_the_password(self) -> None:
        with pytest.raises(Fault, match="cannot reach PostgreSQL") as fault:
            await open_tenant_database("postgresql://me:secret@127.0.0.1:1/database").open()
        assert "secret" not in str(fault.value)

    async def test_tenants_may_lie_beside_a_store_in_one_database(
        self, address: str, connect: Connect
    ) -> None:
        store = PostgresStore(address)
        await store.open()
        await keep_a_book(connect)
        await store.close()
        again = PostgresStore(address)
        await again.open()
        assert (await again.counts()).waiting == 0
        await again.close()


def test_another_kind_of_address_is_refused_without_repeating_it() -> None:
    with pytest.raises(Refusal, match="'redis'") as refused:
        open_tenant_database("redis://:secret@host")
    assert "secret" not in refused.value.message


def modes(folder: Path) -> set[int]:
    return {each.stat().st_mode & 0o777 for each in folder.iterdir()}


async def test_a_new_file_is_its_owners_alone(tmp_path: Path) -> None:
    database = open_tenant_database(f"sqlite:///{tmp_path}/tenants.db")
    await database.open()
    try:
        assert await asyncio.to_thread(modes, tmp_path) == {0o600}
    finally:
        await database.close()
