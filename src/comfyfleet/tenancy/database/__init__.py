"""Tenants' databases by their URL: SQLite files and PostgreSQL databases, one set of statements for both."""

from __future__ import annotations

from urllib.parse import urlsplit

from comfyfleet.model.errors import Refusal, RefusalCode, to_install
from comfyfleet.stores.factory import sqlite_path
from comfyfleet.tenancy.database.port import TenantDatabase


def open_tenant_database(url: str) -> TenantDatabase:
    """What it needs beside Python is imported only when its scheme is asked for."""
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
                    f"a tenant database in PostgreSQL needs {error.name}, which is not installed: "
                    f"{to_install('postgres')}",
                ) from error
            return PostgresTenantDatabase(url)
    # Not the whole URL: it may hold a password.
    raise Refusal(
        RefusalCode.INVALID_REQUEST,
        f"there is no tenant database for {scheme!r}: this version knows sqlite: and postgresql:",
    )
