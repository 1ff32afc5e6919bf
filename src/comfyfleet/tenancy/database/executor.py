"""Transactions as generators that yield SQL statements and receive rows, for SQLite and PostgreSQL.

In a statement, `:name` stands for a value and `@name` for a table.
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
"""An exception rolls the transaction back."""


def rows(sql: str, **values: Any) -> Work[list[Row]]:
    return (yield sql, values)


def row(sql: str, **values: Any) -> Work[Row | None]:
    found = yield sql, values
    return found[0] if found else None


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
