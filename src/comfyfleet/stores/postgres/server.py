"""What a PostgreSQL must be and do before jobs are entrusted to it."""

from __future__ import annotations

from comfyfleet.model.errors import Fault
from comfyfleet.stores.postgres.pool import Connection

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
