"""An empty database for a test, on one server for the whole run: started at first use, stopped at the end.

`COMFYFLEET_TEST_POSTGRES` may name another server; a database of its own is made there and dropped again.
"""

from __future__ import annotations

import asyncio
import os
import threading

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from tests.servers.postgres_server import CannotStart, PostgresServer

from comfyfleet.stores.postgres import PostgresStore

_DATABASE = pytest.StashKey[str]()
_EMPTYING = pytest.StashKey[str]()
"""What empties the tables that are there; none where there are none, or somebody else's."""


def empty_database(config: pytest.Config) -> str:
    """Its URL. Emptied here rather than made anew: that is ten times as fast."""
    url = config.stash.get(_DATABASE, None)
    if url is None:
        url = config.stash[_DATABASE] = _make_database(config)
    config.stash[_EMPTYING] = ""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET client_min_messages = error")
        connection.execute("DROP SCHEMA IF EXISTS comfyfleet CASCADE")
    return url


def emptied_database(config: pytest.Config) -> str:
    """As `empty_database`, for a test that changes no table of a store: they are there, and have been emptied. To make
    them takes forty times as long."""
    if not config.stash.get(_EMPTYING, ""):
        url = empty_database(config)
        # In a loop of its own: a test may call this from within one.
        making = threading.Thread(target=lambda: asyncio.run(_open_once(url)))
        making.start()
        making.join()
        config.stash[_EMPTYING] = _how_to_empty(url)
        return url
    with psycopg.connect(config.stash[_DATABASE]) as connection:
        connection.execute(config.stash[_EMPTYING].encode())
    return config.stash[_DATABASE]


async def _open_once(url: str) -> None:
    store = PostgresStore(url)
    await store.open()
    await store.close()


def _how_to_empty(url: str) -> str:
    """What a store that was just made has in its tables is kept beside them, and put back."""
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'comfyfleet' AND tablename <> 'migrations'"
        )
        tables = [name for (name,) in found]
        found = connection.execute("SELECT sequencename FROM pg_sequences WHERE schemaname = 'comfyfleet'")
        how = [f"ALTER SEQUENCE comfyfleet.{name} RESTART" for (name,) in found]
        connection.execute("DROP SCHEMA IF EXISTS first CASCADE")
        connection.execute("CREATE SCHEMA first")
        for name in tables:
            how.append(f"DELETE FROM comfyfleet.{name}")
            copied = connection.execute(f"CREATE TABLE first.{name} AS TABLE comfyfleet.{name}".encode())
            if copied.rowcount:
                how.append(f"INSERT INTO comfyfleet.{name} TABLE first.{name}")
    return "; ".join(how)


def _make_database(config: pytest.Config) -> str:
    base = os.environ.get("COMFYFLEET_TEST_POSTGRES")
    if base is None:
        try:
            server = PostgresServer()
            config.add_cleanup(server.stop)
            server.start()
        except CannotStart as reason:
            pytest.skip(f"no PostgreSQL: {reason}")
        base = server.url
    name = f"comfyfleet_test_{os.getpid()}"

    def drop() -> None:
        with psycopg.connect(base, autocommit=True) as connection:
            connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())

    drop()
    with psycopg.connect(base, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0".encode())
    # Cleaned up in reverse order: the database before its server.
    config.add_cleanup(drop)
    return make_conninfo(base, dbname=name)
