"""The schema of the PostgreSQL store is set up once, whoever comes first, and never by the wrong program."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import msgspec
import psycopg
import pytest
from tests.servers.postgres_database import empty_database
from tests.stores._postgres import fill_table

from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.stores.migrations import Migration
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.postgres.connections import Connection, ConnectionPool
from comfyfleet.stores.postgres.schema import known_migrations, migrate

OPEN_AT_A_WORD = """
import asyncio, sys
from comfyfleet.stores.migrations import Migration
from comfyfleet.stores.postgres import PostgresStore

async def main():
    store = PostgresStore(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.readline()
    await store.open()
    print((await store.table()).version, flush=True)
    await store.close()

asyncio.run(main())
"""


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request.config)


@pytest.fixture
async def connection(url: str) -> AsyncIterator[Connection]:
    async with await ConnectionPool(url).connect() as connection:
        yield connection


async def _applied(connection: Connection) -> list[tuple[int, str]]:
    cursor = await connection.execute("SELECT number, checksum FROM comfyfleet.migrations ORDER BY number")
    return [(number, checksum) for number, checksum in await cursor.fetchall()]


def _open_at_once(url: str, count: int) -> list[tuple[int, str]]:
    command = [sys.executable, "-c", OPEN_AT_A_WORD, url]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0] for process in processes]
    return [(process.returncode, answer) for process, answer in zip(processes, answers, strict=True)]


async def test_four_processes_that_start_at_once_set_the_schema_up_once(
    url: str, connection: Connection
) -> None:
    assert await asyncio.to_thread(_open_at_once, url, 4) == [(0, "0\n")] * 4
    assert await _applied(connection) == [(each.number, each.checksum) for each in known_migrations()]


async def test_opening_again_changes_nothing(url: str, connection: Connection) -> None:
    for _ in range(2):
        store = PostgresStore(url)
        await store.open()
        if (await store.table()).version == 0:
            await fill_table(store)
        assert (await store.table()).version == 4
        await store.close()
        await store.close()
    assert len(await _applied(connection)) == len(known_migrations())


async def test_a_later_migration_is_applied_to_what_is_there(connection: Connection) -> None:
    known = known_migrations()
    await migrate(connection, known)
    newer = Migration(known[-1].number + 1, "more", "CREATE TABLE comfyfleet.more (x int)")
    await migrate(connection, [*known, newer])
    await migrate(connection, [*known, newer])
    assert (await _applied(connection))[-1] == (newer.number, newer.checksum)
    await connection.execute("SELECT x FROM comfyfleet.more")


async def test_a_schema_made_by_a_newer_program_is_refused(url: str, connection: Connection) -> None:
    await migrate(connection, known_migrations())
    await connection.execute(
        "INSERT INTO comfyfleet.migrations (number, name, checksum) VALUES (9999, 'future', 'x')"
    )
    store = PostgresStore(url)
    with pytest.raises(Fault, match=r"version 9999.*newer ComfyFleet; upgrade"):
        await store.open()
    await store.close()


async def test_a_migration_whose_text_was_changed_is_refused(connection: Connection) -> None:
    known = known_migrations()
    await migrate(connection, known)
    changed = msgspec.structs.replace(known[0], sql=known[0].sql + "-- harmless?")
    with pytest.raises(Fault, match=r"0001_first was applied .* from another text"):
        await migrate(connection, [changed, *known[1:]])


async def test_a_migration_that_fails_leaves_the_schema_as_it_was(connection: Connection) -> None:
    known = known_migrations()
    number = known[-1].number
    await migrate(connection, known)
    good = Migration(number + 1, "good", "CREATE TABLE comfyfleet.good (x int)")
    bad = Migration(number + 2, "bad", "CREATE TABLE comfyfleet.bad (x int); SELECT 1/0")
    with pytest.raises(Fault, match=r"nothing was changed.*division by zero"):
        await migrate(connection, [*known, good, bad])
    assert len(await _applied(connection)) == len(known)
    with pytest.raises(psycopg.errors.UndefinedTable):
        await connection.execute("SELECT x FROM comfyfleet.good")


async def test_a_server_that_answers_before_it_has_written_is_refused(url: str) -> None:
    store = PostgresStore(psycopg.conninfo.make_conninfo(url, options="-c synchronous_commit=off"))
    with pytest.raises(Fault, match="synchronous_commit = off"):
        await store.open()
    await store.close()


async def test_a_server_that_is_not_there_is_a_fault_that_names_it_without_the_password() -> None:
    store = PostgresStore("postgresql://somebody:secret@127.0.0.1:1/fleet")
    with pytest.raises(Fault, match=r"cannot reach PostgreSQL at 127\.0\.0\.1:1/fleet") as caught:
        await store.open()
    assert "secret" not in str(caught.value)
    await store.close()


def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(Refusal, match="postgresql://user@host"):
        PostgresStore("postgresql://[")
