"""A store by its URL. What a store needs beside Python is imported only when its scheme is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from comfyfleet.model.errors import Refusal, RefusalCode, to_install
from comfyfleet.ports import Cabinet, Clock, Store
from comfyfleet.stores.checking import checked_store
from comfyfleet.stores.memory import MemoryStore

DATA_KEYS = "data_keys"
MASTER_KEYS = "master_keys"
"""Drawers of a store whose jobs are sealed."""


@runtime_checkable
class MayLose(Protocol):
    """A store whose server decides how much of it outlives a crash."""

    durability: Literal["durable", "everysec", "none"]
    can_lose: str
    """In words."""


def open_store(url: str | Store, clock: Clock) -> Store:
    """By its URL, or a store that somebody made: any object that keeps the contract (`comfyfleet.contract`)."""
    if not isinstance(url, str):
        return checked_store(url)
    check_address(url)
    return _OPENERS[urlsplit(url).scheme](url, clock)


def check_address(url: str) -> None:
    """Refuses a scheme nobody knows."""
    scheme = urlsplit(url).scheme
    if not scheme and "@" not in url:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{url!r} is no store's URL: a SQLite file is sqlite:///{url or 'fleet.db'}, a server "
            "redis://HOST:6379/0 or postgresql://USER@HOST/DATABASE",
        )
    if scheme not in _OPENERS:
        # Not the whole URL: it may hold a password.
        known = ", ".join(f"{each}:" for each in _OPENERS)
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"there is no store for {scheme!r}: this version knows {known}"
        )


def risk_of(store: Store) -> str:
    """What an operator must know of a store that is open and may lose jobs, and what to set. Empty: it keeps them."""
    if not isinstance(store, MayLose) or store.durability != "none":
        return ""
    return (
        f"this Redis can lose jobs that were acknowledged: {store.can_lose}, if it dies or is restarted. Set "
        "appendonly yes in its configuration (CONFIG SET appendonly yes, then CONFIG REWRITE), and appendfsync "
        "always to lose nothing at all"
    )


async def refuse_if_sealed(cabinet: Cabinet) -> None:
    """For whoever opens a store without keys: what is in it must not only open by them."""
    if await cabinet.listing(DATA_KEYS, limit=1):
        masters = ", ".join(repr(each.name) for each in await cabinet.listing(MASTER_KEYS))
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"the jobs in this store are sealed and this process has no key: give it [encryption] with the master key "
            f"{masters}, or let it work through a hub",
        )


def _memory(_url: str, clock: Clock) -> Store:
    return MemoryStore(clock)


def sqlite_path(url: str) -> Path:
    """The file a `sqlite:` URL names."""
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or parts.query or parts.fragment or not path:
        # What stands before an @ may be a password, meant for another kind of store.
        shown = "sqlite://…" if "@" in url else url
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{shown!r} names no file: write sqlite:///fleet.db (from here) or sqlite:////srv/fleet.db (from the root)",
        )
    return Path(path)


def _sqlite(url: str, clock: Clock) -> Store:
    from comfyfleet.stores.sqlite.store import SqliteStore

    return SqliteStore(sqlite_path(url), clock)


def _postgres(url: str, _clock: Clock) -> Store:
    try:
        from comfyfleet.stores.postgres import PostgresStore
    except ModuleNotFoundError as error:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"the PostgreSQL store needs {error.name}, which is not installed: {to_install('postgres')}",
        ) from error
    return PostgresStore(url)


def _python(url: str, clock: Clock) -> Store:
    """`python:MODULE:NAME`: a store that is no part of this package, made with a clock."""
    module, _, name = url.partition(":")[2].partition(":")
    wanted = f"{url!r} names no store: write python:MODULE:NAME, where NAME(clock) makes one"
    if not module or not name:
        raise Refusal(RefusalCode.INVALID_REQUEST, wanted)
    try:
        made = getattr(import_module(module), name)(clock)
    except Exception as error:
        # Whatever stands in somebody's module.
        raise Refusal(RefusalCode.INVALID_REQUEST, f"{wanted} ({type(error).__name__}: {error})") from error
    return checked_store(made)


def _redis(url: str, _clock: Clock) -> Store:
    try:
        from comfyfleet.stores.redis.store import RedisStore
    except ModuleNotFoundError as error:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"the Redis store needs {error.name}, which is not installed: {to_install('redis')}",
        ) from error
    return RedisStore(url)


_OPENERS: dict[str, Callable[[str, Clock], Store]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "postgresql": _postgres,
    "postgres": _postgres,
    "redis": _redis,
    "rediss": _redis,
    "python": _python,
}
