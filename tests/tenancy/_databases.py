"""An empty tenant database in PostgreSQL for a test."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.servers.postgres_database import empty_database


def tenant_schema(config: pytest.Config, *, is_second: bool = False) -> str:
    """The URL of a database without the tables of tenants. The second lies beside the first, on the same server."""
    url = address(empty_database(config))
    if is_second:
        url = _beside(url, config)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET client_min_messages = error")
        connection.execute("DROP SCHEMA IF EXISTS comfyfleet_tenants CASCADE")
    return url


def address(conninfo: str) -> str:
    """As a URL."""
    parts = conninfo_to_dict(conninfo)
    url = f"postgresql://{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    return url.replace("@", f":{parts['password']}@", 1) if "password" in parts else url


def _beside(url: str, config: pytest.Config) -> str:
    name = f"{url.rpartition('/')[2]}_second"
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,)).fetchone()
        if found is None:
            connection.execute(f"CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0".encode())
            config.add_cleanup(lambda: _drop(url, name))
    return f"{url}_second"


def _drop(url: str, name: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)".encode())
