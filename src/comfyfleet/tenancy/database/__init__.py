"""Tenant databases in SQLite files or PostgreSQL, with one set of SQL statements for both."""

from __future__ import annotations

from urllib.parse import urlsplit

from comfyfleet.model.errors import Refusal, RefusalCode, to_install
from comfyfleet.stores.factory import sqlite_path
from comfyfleet.tenancy.database.sql_database import TenantDatabase


def open_tenant_database(url: str) -> TenantDatabase:
    """Imports a database driver only for a URL that needs it."""
    match scheme := urlsplit(url).scheme:
        case "sqlite":
            from comfyfleet.tenancy.database.sqlite import SqliteTenantDatabase

            return SqliteTenantDatabase(sqlite_path(url))
        case "postgresql" | "postgres":
            try:
                from comfyfleet.tenancy.database.postgres import PostgresTenantDatabase
            except ModuleNotFoundError as error:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST,
                    f"a PostgreSQL tenant database needs {error.name}, which is not installed: "
                    f"{to_install('postgres')}",
                ) from error
            return PostgresTenantDatabase(url)
    # Do not show the whole URL: it may contain a password.
    raise Refusal(
        RefusalCode.INVALID_REQUEST,
        f"a tenant database URL cannot start with {scheme!r}: use sqlite: or postgresql:",
    )
