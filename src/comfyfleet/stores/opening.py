"""A store by its URL. What a store needs beside Python is imported only when its scheme is asked for."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.ports import Clock, Store
from comfyfleet.stores.memory import MemoryStore


def open_store(url: str, clock: Clock) -> Store:
    opener = _OPENERS.get(urlsplit(url).scheme)
    if opener is None:
        known = ", ".join(f"{scheme}:" for scheme in _OPENERS)
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"there is no store for {url!r}: this version knows {known}"
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


_OPENERS: dict[str, Callable[[str, Clock], Store]] = {
    "memory": _memory,
    "sqlite": _sqlite,
}
