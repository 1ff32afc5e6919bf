"""Where stores of one kind live while they are measured, and which time of theirs counts.

Servers are the tests' own, one for each store that is compared, so that the long queue of one is not in the caches and
tables of the other. What is done with a store is the rig's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import psycopg
from redis import Redis
from tests.servers.postgres_server import PostgresServer
from tests.servers.redis_server import RedisServer

from bench._cloning import copy_jobs, mark_sequence
from bench._measure import cpu_s
from bench._store import StoreRig
from comfyfleet.engine.system import SystemClock
from comfyfleet.ports import Store
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.stores.sqlite.store import SqliteStore

TIME = {
    "memory": "CPU time of the process",
    "sqlite": "CPU time of the process, the writer's thread included",
    "redis": "time inside the server's functions (commandstats)",
    "postgres": "time on the wall, one caller, fsync off",
}


class Place:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.time = TIME[kind]
        self.held_bytes: Callable[[], int] | None = None
        """What the server of the newest rig holds; None: the store lives in this process."""
        self._stack = AsyncExitStack()
        self._postgres: PostgresServer | None = None
        self._databases = 0

    async def __aenter__(self) -> Place:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def batches(self, full: int) -> int:
        """The answer of a server takes longer than the lease itself, so it is asked less often."""
        return {"memory": full, "sqlite": full // 3, "redis": full // 3, "postgres": full // 10}[self.kind]

    async def rig(self) -> StoreRig:
        match self.kind:
            case "memory":
                return await self._opened(MemoryStore(SystemClock()), cpu_s, 1)
            case "sqlite":
                folder = self._stack.enter_context(tempfile.TemporaryDirectory())
                return await self._opened(SqliteStore(Path(folder) / "fleet.db", SystemClock()), cpu_s, 1000)
            case "redis":
                server = self.redis_server()
                connection = self._stack.enter_context(Redis(port=server.port))
                self.held_bytes = lambda: int(cast("Any", connection.info("memory"))["used_memory_dataset"])
                return await self._opened(RedisStore(server.url), function_seconds(connection), 500)
            case "postgres":
                url = self.database()
                self.held_bytes = lambda: database_bytes(url)
                rig = await self._opened(PostgresStore(url), time.perf_counter, 64, partial(copy_jobs, url))
                mark_sequence(url)
                return rig
            case _:
                raise ValueError(f"there is no store {self.kind!r}")

    async def _opened(
        self,
        store: Store,
        spent_s: Callable[[], float],
        at_once: int,
        copy: Callable[[Sequence[tuple[str, int]], int], None] | None = None,
    ) -> StoreRig:
        await store.open()
        self._stack.push_async_callback(store.close)
        return StoreRig(store, spent_s, at_once, copy)

    def redis_server(self, durability: str = "everysec") -> RedisServer:
        server = RedisServer("--appendonly", "yes", "--appendfsync", durability, is_durable=False).start()
        self._stack.callback(server.stop)
        return server

    def database(self, *, is_durable: bool = False) -> str:
        if self._postgres is None:
            self._postgres = PostgresServer(is_durable=is_durable)
            self._stack.callback(self._postgres.stop)
            self._postgres.start()
        self._databases += 1
        name = f"bench_{self._databases}"
        with psycopg.connect(self._postgres.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0".encode())
        return self._postgres.url.removesuffix("postgres") + name


def function_seconds(connection: Redis) -> Callable[[], float]:
    def read() -> float:
        found = connection.info("commandstats")
        return float(found.get("cmdstat_fcall", {"usec": 0})["usec"]) / 1e6

    return read


def database_bytes(url: str) -> int:
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        assert row is not None
        return int(row[0])
