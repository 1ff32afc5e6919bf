"""Applies migrations in order, once each, with checksums, and checks the server before use.

All missing migrations are one transaction under an advisory lock, so any number of processes may start at
once, and a failure changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import psycopg

from comfyfleet.model.errors import Fault
from comfyfleet.stores.migrations import Migration, migrations_of
from comfyfleet.stores.postgres.connections import Connection


class Schema(NamedTuple):
    """Tables that are migrated together."""

    name: str
    lock: int
    """The advisory lock of their migrations."""


# The number is "comfy" in ASCII.
JOBS = Schema("comfyfleet", 0x636F6D6679)

_TABLE = """
CREATE TABLE IF NOT EXISTS {schema}.migrations (number integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp())
"""


def known_migrations() -> list[Migration]:
    return migrations_of("comfyfleet.stores.postgres")


async def migrate(connection: Connection, migrations: Sequence[Migration], schema: Schema = JOBS) -> None:
    """Migrates the schema, or raises a fault and changes nothing."""
    if not await missing_migrations(connection, migrations, schema):
        return
    try:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (schema.lock,))
            # Another process may have migrated while this one waited for the lock.
            missing = await missing_migrations(connection, migrations, schema)
            if missing and missing[0] is migrations[0]:
                await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema.name}".encode())
                await connection.execute(_TABLE.format(schema=schema.name).encode())
            for each in missing:
                await connection.execute(each.sql)
                await connection.execute(
                    f"INSERT INTO {schema.name}.migrations (number, name, checksum) VALUES (%s, %s, %s)".encode(),
                    (each.number, each.name, each.checksum),
                )
    except psycopg.Error as error:
        raise Fault(
            f"PostgreSQL refused to set up the tables of ComfyFleet, and nothing was changed: {error}; the user in "
            f"the URL needs the right to create in this database (or to own a schema `{schema.name}`)"
        ) from error


async def missing_migrations(
    connection: Connection, migrations: Sequence[Migration], schema: Schema = JOBS
) -> list[Migration]:
    applied = await _applied(connection, schema)
    newest = migrations[-1].number
    if applied and max(applied) > newest:
        raise Fault(
            f"the tables of ComfyFleet in this database have version {max(applied)}, this program knows {newest}: "
            "they were made by a newer ComfyFleet; upgrade this one"
        )
    for each in migrations:
        if applied.get(each.number, each.checksum) != each.checksum:
            raise Fault(
                f"migration {each.number:04d}_{each.name} was applied to this database from another text than this "
                "program has: one of the two was edited; use the release that set the database up, or move its "
                "jobs to a new database"
            )
    return [each for each in migrations if each.number not in applied]


async def _applied(connection: Connection, schema: Schema) -> dict[int, str]:
    # From the catalogue: `to_regclass` may answer from this connection's cache.
    cursor = await connection.execute(
        "SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = %s AND c.relname = 'migrations'",
        (schema.name,),
    )
    if await cursor.fetchone() is None:
        return {}
    cursor = await connection.execute(f"SELECT number, checksum FROM {schema.name}.migrations".encode())
    return dict(await cursor.fetchall())


MIN_VERSION = 130000


async def check_server(connection: Connection, address: str) -> None:
    cursor = await connection.execute(
        "SELECT current_setting('server_version_num')::int, current_setting('server_encoding'),"
        " current_setting('synchronous_commit')"
    )
    row = await cursor.fetchone()
    assert row is not None, "a SELECT without FROM has one row"
    version, encoding, synchronous = row
    if version < MIN_VERSION:
        raise Fault(
            f"PostgreSQL at {address} is of version {version // 10000}; "
            f"ComfyFleet needs {MIN_VERSION // 10000} or newer"
        )
    if encoding != "UTF8":
        raise Fault(
            f"the database at {address} is encoded in {encoding}; ComfyFleet needs one made with ENCODING 'UTF8'"
        )
    if synchronous == "off":
        raise Fault(
            f"PostgreSQL at {address} answers before it has written (synchronous_commit = off), so acknowledged jobs "
            "could be lost; set it to on for this user or database (ALTER DATABASE … SET synchronous_commit = on)"
        )
