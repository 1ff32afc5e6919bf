"""Two hubs in two processes submit for 80 against 100 at the same instant, many times: one is accepted each time."""

from __future__ import annotations

import asyncio

import msgspec
from tests.servers.postgres_server import PostgresServer
from tests.servers.redis_server import RedisServer
from tests.tenancy._spending import spend_at_once


class Size(msgspec.Struct, frozen=True):
    times: int


class Spent(msgspec.Struct, frozen=True):
    times: int
    wrong: tuple[str, ...]


def run(size: Size) -> Spent:
    store, database = RedisServer(), PostgresServer()
    try:
        store.start()
        database.start()
        return Spent(size.times, tuple(asyncio.run(spend_at_once(store.url, database.url, size.times))))
    finally:
        store.stop()
        database.stop()
