"""Checks a store from outside, without opening, migrating or locking it. Each store has its own checks."""

from __future__ import annotations

import asyncio
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.stores.factory import check_address, require_driver, sqlite_path


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
            require_driver("redis")
            return "redis"
        case "postgresql" | "postgres":
            require_driver("postgres")
            return "postgresql"
    raise Refusal(
        RefusalCode.INVALID_REQUEST,
        f"a {scheme!r} store ends with its process: name a lasting one, such as sqlite:///fleet.db, "
        "redis://host or postgresql://host/database",
    )
