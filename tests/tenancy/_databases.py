"""An empty tenant database in PostgreSQL for a test."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from tests.servers.postgres_database import empty_database


def tenant_schema(config: pytest.Config) -> str:
    """The URL of a database without the tables of tenants."""
    parts = conninfo_to_dict(empty_database(config))
    url = f"postgresql://{parts['user']}@{parts['host']}:{parts['port']}/{parts['dbname']}"
    if "password" in parts:
        url = url.replace("@", f":{parts['password']}@", 1)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET client_min_messages = error")
        connection.execute("DROP SCHEMA IF EXISTS comfyfleet_tenants CASCADE")
    return url
