"""Is a store sound, and what does it hold? Asked without opening it: nothing is set up, raised or locked by it.

What each kind looks at is in its own folder; here is the choice by URL and what all of them answer.
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
    """Where it is, without any secret."""
    problems: list[str]
    """In words; nothing if it is sound."""
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
    """Whether somebody has set up a store there; to open one would do so."""
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
    """Of a store that outlives its process."""
    scheme = urlsplit(url).scheme
    # Says which are known, and what to install for this one.
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
        f"a store of the kind {scheme!r} is gone with its process: name one that stays, such as sqlite:///fleet.db, "
        "redis://host or postgresql://host/database",
    )


def _require(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"this store needs {module}, which is not installed: {to_install(extra)}",
        )
