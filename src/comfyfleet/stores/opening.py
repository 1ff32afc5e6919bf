"""A store by its URL. What a store needs beside Python is imported only when its scheme is asked for."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.ports import Clock, Store
from comfyfleet.stores.memory import MemoryStore


def open_store(url: str, clock: Clock) -> Store:
    scheme = urlsplit(url).scheme
    opener = _OPENERS.get(scheme)
    if opener is None:
        # Not the whole URL: it may hold a password.
        known = ", ".join(f"{each}:" for each in _OPENERS)
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"there is no store for {scheme!r}: this version knows {known}"
        )
    return opener(url, clock)


def _memory(_url: str, clock: Clock) -> Store:
    return MemoryStore(clock)


def _sqlite(url: str, clock: Clock) -> Store:
    from comfyfleet.stores.sqlite.store import SqliteStore

    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or parts.query or parts.fragment or not path:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{url!r} names no file: write sqlite:///fleet.db (from here) or sqlite:////srv/fleet.db (from the root)",
        )
    return SqliteStore(path, clock)


def _postgres(url: str, _clock: Clock) -> Store:
    try:
        from comfyfleet.stores.postgres import PostgresStore
    except ModuleNotFoundError as error:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"the PostgreSQL store needs {error.name}, which is not installed: install comfyfleet[postgres]",
        ) from error
    return PostgresStore(url)


def _redis(url: str, _clock: Clock) -> Store:
    try:
        from comfyfleet.stores.redis.store import RedisStore
    except ModuleNotFoundError as error:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"the Redis store needs {error.name}, which is not installed: install comfyfleet[redis]",
        ) from error
    return RedisStore(url)


_OPENERS: dict[str, Callable[[str, Clock], Store]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "postgresql": _postgres,
    "postgres": _postgres,
    "redis": _redis,
    "rediss": _redis,
}
