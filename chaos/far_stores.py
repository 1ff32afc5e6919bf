"""Stores with a network before them that takes its time, and real hubs on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import psycopg
from tests.servers.delay_proxy import DelayProxy
from tests.servers.postgres_server import PostgresServer
from tests.servers.redis_server import RedisServer

from chaos.programs import HubProgram

Where = Literal["memory", "sqlite", "redis", "postgres"]


class StoreServers:
    """One Redis and one PostgreSQL for all who ask, each started when it is first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._redis: RedisServer | None = None
        self._postgres: PostgresServer | None = None

    @contextmanager
    def store(self, where: Where, delay_ms: float, number: int) -> Iterator[str | None]:
        """The URL of an empty store, with that delay before it; None: the hub's own. `number` is asked for once."""
        match where:
            case "memory":
                yield "memory://"
                return
            case "sqlite":
                yield None
                return
            case "redis":
                if self._redis is None:
                    self._redis = RedisServer(is_durable=False)
                    self._stack.callback(self._redis.stop)
                    self._redis.start()
                url, port = f"{self._redis.url}?prefix=far-{number}", self._redis.port
            case "postgres":
                if self._postgres is None:
                    self._postgres = PostgresServer()
                    self._stack.callback(self._postgres.stop)
                    self._postgres.start()
                with psycopg.connect(self._postgres.url, autocommit=True) as connection:
                    connection.execute(f"CREATE DATABASE far_{number}".encode())
                url, port = f"{self._postgres.url.rpartition('/')[0]}/far_{number}", self._postgres.port
        if not delay_ms:
            yield url
            return
        with DelayProxy(port, delay_ms / 1000) as proxy:
            yield url.replace(f":{port}", f":{proxy.port}")


@contextmanager
def hubs_on(store: str | None, count: int, folder: Path) -> Iterator[list[HubProgram]]:
    hubs = [HubProgram(folder / f"hub-{number}", {}, store) for number in range(count)]
    try:
        for hub in hubs:
            hub.start()
        yield hubs
    finally:
        for hub in hubs:
            hub.kill()
