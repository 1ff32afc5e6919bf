"""Transactions as generators that yield SQL statements and receive rows, for SQLite and PostgreSQL.

In a statement, `:name` stands for a value and `@name` for a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Mapping
from functools import lru_cache
from typing import Any, Protocol, TypeVar

Row = tuple[Any, ...]
Statement = tuple[str, Mapping[str, Any]]
_Answer = TypeVar("_Answer")

Work = Generator[Statement, list[Row], _Answer]
"""An exception rolls the transaction back."""

MAX_PAGE = 1_000


def page(limit: int) -> int:
    """The limit of a list, within the bound of one page."""
    return max(1, min(limit, MAX_PAGE))


def rows(sql: str, **values: Any) -> Work[list[Row]]:
    return (yield sql, values)


def row(sql: str, **values: Any) -> Work[Row | None]:
    found = yield sql, values
    return found[0] if found else None


def rows_in(sql: str, column: str, keys: Collection[str]) -> Work[list[Row]]:
    """The rows whose column is one of the keys, at most a page of them."""
    assert len(keys) <= MAX_PAGE, "at most one page"
    values = {f"key_{place}": key for place, key in enumerate(keys)}
    places = ", ".join(f":{name}" for name in values)
    return (yield from rows(f"{sql} WHERE {column} IN ({places})", **values)) if keys else []


@lru_cache(maxsize=256)
def for_sqlite(sql: str) -> str:
    # A writing transaction locks the whole file, not rows.
    return re.sub(r" FOR (KEY SHARE|UPDATE)\b", "", sql).replace("@", "")


@lru_cache(maxsize=256)
def for_postgres(sql: str) -> str:
    return re.sub(r":(\w+)", r"%(\1)s", sql.replace("@", f"{SCHEMA}."))


SCHEMA = "comfyfleet_tenants"
"""A separate schema, so a tenant database and a store can share one PostgreSQL database."""


class SqlExecutor(Protocol):
    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def transact(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        """Runs one transaction, again after a conflict."""

    async def read(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        """Runs reads. Each statement may see a different moment."""

    async def snapshot(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        """Runs reads that all see the same moment."""
