"""What carries out work on one database: a SQLite file or PostgreSQL, each in its own folder.

A transaction as a value: statements are given out, rows come back, whatever database carries them out.

Statements are written once, in the tongue both databases speak: `:name` stands for a value, `@name` for a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from typing import Any, Protocol, TypeVar

Row = tuple[Any, ...]
Statement = tuple[str, Mapping[str, Any]]
_Answer = TypeVar("_Answer")

Work = Generator[Statement, list[Row], _Answer]
"""Raises to take everything back."""


def rows(sql: str, **values: Any) -> Work[list[Row]]:
    return (yield sql, values)


def row(sql: str, **values: Any) -> Work[Row | None]:
    found = yield sql, values
    return found[0] if found else None


@lru_cache(maxsize=256)
def for_sqlite(sql: str) -> str:
    # A transaction that writes has the whole file: there are no rows to lock.
    return re.sub(r" FOR (KEY SHARE|UPDATE)\b", "", sql).replace("@", "")


@lru_cache(maxsize=256)
def for_postgres(sql: str) -> str:
    return re.sub(r":(\w+)", r"%(\1)s", sql.replace("@", f"{SCHEMA}."))


SCHEMA = "comfyfleet_tenants"
"""Of its own, so that a tenant database may lie in the same database as a store."""


class SqlExecutor(Protocol):
    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def transact(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        """In one transaction. Begun anew where others were in the way."""

    async def read(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        """What changes nothing. Each of its questions is answered as of its own moment …"""

    async def snapshot(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        """… and here all of them as of one."""
