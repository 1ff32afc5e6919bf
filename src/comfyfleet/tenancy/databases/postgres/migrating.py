"""The versions of the schema of tenants: as `stores/postgres/migrate.py` keeps those of a store, beside them.

All that is missing is applied in one transaction under an advisory lock of that transaction, so any number of processes
may start at once, and a failing step leaves the schema as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg

from comfyfleet.model.errors import Fault
from comfyfleet.stores.migrations import Migration, migrations_of
from comfyfleet.stores.postgres.pool import Connection

# "tenant" in ASCII: another number than a store takes, which may lie in the same database.
_LOCK = 0x74656E616E74


def known_migrations() -> list[Migration]:
    return migrations_of("comfyfleet.tenancy.databases.postgres")


async def migrate(connection: Connection, migrations: Sequence[Migration]) -> None:
    """Brings the schema up to date, or raises a fault and changes nothing."""
    if not _missing(await _applied(connection), migrations):
        return
    try:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            # Another process may have done it while this one waited for the lock.
            missing = _missing(await _applied(connection), migrations)
            if missing and missing[0] is migrations[0]:
                await connection.execute("CREATE SCHEMA IF NOT EXISTS comfyfleet_tenants")
                await connection.execute(
                    "CREATE TABLE IF NOT EXISTS comfyfleet_tenants.migrations (number integer PRIMARY KEY,"
                    " name text NOT NULL, checksum text NOT NULL,"
                    " applied_at timestamptz NOT NULL DEFAULT clock_timestamp())"
                )
            for each in missing:
                await connection.execute(each.sql)
                await connection.execute(
                    "INSERT INTO comfyfleet_tenants.migrations (number, name, checksum) VALUES (%s, %s, %s)",
                    (each.number, each.name, each.checksum),
                )
    except psycopg.Error as error:
        raise Fault(
            f"PostgreSQL refused to set up the tables of tenants and nothing was changed: {error}; "
            "the user of the URL needs the right to create in this database (or a schema "
            "`comfyfleet_tenants` of its own)"
        ) from error


async def _applied(connection: Connection) -> dict[int, str]:
    # Asked of the catalogue itself: `to_regclass` may answer from what this connection remembers.
    cursor = await connection.execute(
        "SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
        "WHERE n.nspname = 'comfyfleet_tenants' AND c.relname = 'migrations'"
    )
    if await cursor.fetchone() is None:
        return {}
    cursor = await connection.execute("SELECT number, checksum FROM comfyfleet_tenants.migrations")
    return dict(await cursor.fetchall())


def _missing(applied: dict[int, str], migrations: Sequence[Migration]) -> list[Migration]:
    newest = migrations[-1].number
    if applied and max(applied) > newest:
        raise Fault(
            f"the tables of tenants in this database are of version {max(applied)}, this program knows {newest}: "
            "they were made by a newer ComfyFleet; upgrade this one"
        )
    for each in migrations:
        if applied.get(each.number, each.checksum) != each.checksum:
            raise Fault(
                f"migration {each.number:04d}_{each.name} was applied to this database from another text than this "
                "program has: one of the two was changed by hand; use the release that set the database up, or "
                "move its tenants to a fresh database"
            )
    return [each for each in migrations if each.number not in applied]
