"""A transaction as a value: statements are given out, rows come back, whatever database carries them out.

Statements are written once, in the tongue both databases speak: `:name` stands for a value, `@name` for a table.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from functools import lru_cache
from typing import Any, TypeVar

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
