"""Checks a store from outside, without opening, migrating or locking it. Each kind's checks are in its own
package.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode, to_install
from comfyfleet.stores.factory import check_address, sqlite_path


class StoreCheck(msgspec.Struct, frozen=True):
    store: str
    """Its location, without secrets."""
    problems: list[str]
    """Empty if the store is sound."""
    holds: dict[str, int] = {}
    settings: dict[str, Any] = {}


async def examine(url: str) -> StoreCheck:
    match kind_of(url):
        case "sqlite":
            from comfyfleet.stores.sqlite import maintenance

            path = sqlite_path(url)
            problems = await asyncio.to_thread(maintenance.check, path)
            holds, settings = await asyncio.to_thread(maintenance.describe, path)
            return StoreCheck(str(path), problems, holds, settings)
        case "redis":
            from comfyfleet.stores.redis.check import examine_redis

            return StoreCheck(**await examine_redis(url))
        case "postgresql":
            from comfyfleet.stores.postgres.check import examine_postgres

            return StoreCheck(**await examine_postgres(url))


async def is_there(url: str) -> bool:
    """Whether a store has been set up there. Does not create one."""
    match kind_of(url):
        case "sqlite":
            return sqlite_path(url).is_file()
        case "redis":
            from comfyfleet.stores.redis.check import has_fleet

            return await has_fleet(url)
        case "postgresql":
            from comfyfleet.stores.postgres.check import has_tables

            return await has_tables(url)


def kind_of(url: str) -> Literal["sqlite", "redis", "postgresql"]:
    """Refuses the kinds that end with their process."""
    scheme = urlsplit(url).scheme
    check_address(url)
    match scheme:
        case "sqlite":
            return "sqlite"
        case "redis" | "rediss":
            _require("hiredis", "redis")
            return "redis"
        case "postgresql" | "postgres":
            _require("psycopg", "postgres")
            return "postgresql"
    raise Refusal(
        RefusalCode.INVALID_REQUEST,
        f"a {scheme!r} store ends with its process: name a lasting one, such as sqlite:///fleet.db, "
        "redis://host or postgresql://host/database",
    )


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"this store needs {module}, which is not installed: {to_install(extra)}",
        )
