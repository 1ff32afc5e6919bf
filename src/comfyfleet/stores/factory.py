"""Opens a store by its URL, or checks it from outside without opening, migrating or locking it.

It imports a store's drivers only when its scheme is used. It also checks that an object given as a store has the port's
methods and parts; `comfyfleet.testing.contract` tests what the methods do.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode, to_install
from comfyfleet.ports import Clock, DirectWorkerInbox, DocumentStore, FairShare, PeerChannel, Records, Store
from comfyfleet.stores.memory import MemoryStore

_PARTS: dict[str, type] = {"records": Records, "documents": DocumentStore, "fair_share": FairShare}
_OPTIONAL: dict[str, type] = {"direct_workers": DirectWorkerInbox, "peer_channel": PeerChannel}
_VALUES: dict[str, type] = {"epoch": int, "is_shared": bool}
_NEXT = (
    "Give a URL, such as sqlite:///fleet.db, or an object that passes the contract of stores (docs/stores.md)"
)


def checked_store(store: Store) -> Store:
    """Refuses an object that cannot be a store and names what it lacks, before the first job reaches it."""
    if isinstance(store, type):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{store.__name__} is a class, not a store: give an instance, such as {store.__name__}(clock)",
        )
    lacking, wrong = _faults(store, Store, "")
    if lacking or wrong:
        problems = ([f"it lacks {', '.join(lacking)}"] if lacking else []) + wrong
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"a {type(store).__name__} is not a store: {'; '.join(problems)}. {_NEXT}",
        )
    return store


def _faults(given: object, port: type, inside: str) -> tuple[list[str], list[str]]:
    lacking: list[str] = []
    wrong: list[str] = []
    for name in sorted(name for name in dir(port) if not name.startswith("_")):
        shown = inside + name
        try:
            found = getattr(given, name)
        except AttributeError:
            lacking.append(shown)
            continue
        except Exception as error:
            wrong.append(f"{shown} raises {type(error).__name__} ({error})")
            continue
        part = _PARTS.get(name, _OPTIONAL.get(name)) if port is Store else None
        if port is Store and name in _VALUES:
            if not isinstance(found, _VALUES[name]):
                wrong.append(f"{shown} is a {type(found).__name__} and not a {_VALUES[name].__name__}")
        elif part is None:
            wrong += _faults_of_method(found, getattr(port, name), shown)
        elif found is not None or name in _PARTS:
            inner_lacking, inner_wrong = _faults(found, part, f"{shown}.")
            lacking += inner_lacking
            wrong += inner_wrong
    return lacking, wrong


def _faults_of_method(found: Any, wanted: Any, shown: str) -> list[str]:
    if not callable(found):
        return [f"{shown} is not a method"]
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        # Some callables written in C have no signature.
        return []
    given = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    named = {each.name: each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    try:
        signature.bind(*given, **named)
    except TypeError:
        names = ", ".join(each.name for each in parameters)
        return [f"{shown} does not take ({names})"]
    return []


DATA_KEYS = "data_keys"
MASTER_KEYS = "master_keys"
"""Collections of a store with encrypted jobs."""


@runtime_checkable
class VolatileStore(Protocol):
    """A store whose server decides what survives a crash."""

    durability: Literal["durable", "everysec", "none"]
    can_lose: str
    """Text for people."""


def open_store(url: str | Store, clock: Clock) -> Store:
    """Accepts a URL, or any object that passes `comfyfleet.testing.contract`."""
    if not isinstance(url, str):
        return checked_store(url)
    check_address(url)
    return _OPENERS[urlsplit(url).scheme](url, clock)


def check_address(url: str) -> None:
    scheme = urlsplit(url).scheme
    if not scheme and "@" not in url:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{url!r} is not the URL of a store: a SQLite file is sqlite:///{url or 'fleet.db'}, a server "
            "redis://HOST:6379/0 or postgresql://USER@HOST/DATABASE",
        )
    if scheme not in _OPENERS:
        # The whole URL may hold a password.
        known = ", ".join(f"{each}:" for each in _OPENERS)
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"there is no store for {scheme!r}: this version knows {known}"
        )


def risk_of(store: Store) -> str:
    """A warning if this store may lose jobs, with the setting to change. Empty if it keeps them."""
    if not isinstance(store, VolatileStore) or store.durability != "none":
        return ""
    return (
        f"this Redis can lose jobs that were acknowledged: {store.can_lose}, if it dies or is restarted. Set "
        "appendonly yes in its configuration (CONFIG SET appendonly yes, then CONFIG REWRITE), and appendfsync "
        "always to lose nothing at all"
    )


async def refuse_if_encrypted(documents: DocumentStore) -> None:
    """Refuses to open a store with encrypted jobs without their keys."""
    if await documents.listing(DATA_KEYS, limit=1):
        masters = ", ".join(repr(each.name) for each in await documents.listing(MASTER_KEYS))
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            "the jobs in this store are encrypted, and this process has no key: give it [encryption] with "
            f"the master key {masters}, or connect it to a hub",
        )


def require_driver(extra: Literal["redis", "postgres"]) -> None:
    for module in ("psycopg",) if extra == "postgres" else ("redis", "hiredis"):
        if find_spec(module) is None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"this store needs {module}, which is not installed: {to_install(extra)}",
            )


def _memory(_url: str, clock: Clock) -> Store:
    return MemoryStore(clock)


def sqlite_path(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path.removeprefix("/"))
    if parts.netloc or parts.query or parts.fragment or not path:
        # The text before an @ may be a password for another kind of store.
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
    require_driver("postgres")
    from comfyfleet.stores.postgres import PostgresStore

    return PostgresStore(url)


def _python(url: str, clock: Clock) -> Store:
    """`python:MODULE:NAME`: a store from another package, made by calling NAME(clock)."""
    module, _, name = url.partition(":")[2].partition(":")
    wanted = f"{url!r} is not the URL of a store: write python:MODULE:NAME, where NAME(clock) makes one"
    if not module or not name:
        raise Refusal(RefusalCode.INVALID_REQUEST, wanted)
    try:
        made = getattr(import_module(module), name)(clock)
    except Exception as error:
        # Foreign code may raise anything.
        raise Refusal(RefusalCode.INVALID_REQUEST, f"{wanted} ({type(error).__name__}: {error})") from error
    return checked_store(made)


def _redis(url: str, _clock: Clock) -> Store:
    require_driver("redis")
    from comfyfleet.stores.redis.store import RedisStore

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
