"""A server for a module of tests, and stores on it that share nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers.redis_server import RedisServer, given_url


@contextmanager
def some_server() -> Iterator[str]:
    """The URL of a server that may be shared with others: use prefixes of your own, change no settings."""
    if (url := given_url()) is not None:
        yield url
        return
    with own_server(is_durable=False) as server:
        yield server.url


@contextmanager
def own_server(*settings: str, is_durable: bool = True) -> Iterator[RedisServer]:
    """A server to be mistreated."""
    server = RedisServer(*settings, is_durable=is_durable).start()
    try:
        yield server
    finally:
        server.stop()


def new_prefix() -> str:
    return f"test-{secrets.token_hex(6)}"


def with_prefix(url: str, prefix: str | None = None) -> str:
    return f"{url}?prefix={prefix or new_prefix()}"
