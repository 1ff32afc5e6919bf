"""Reads a store's migrations: numbered SQL files with checksums. Each store applies them itself."""

from __future__ import annotations

import hashlib
import re
from importlib import resources

import msgspec


class Migration(msgspec.Struct, frozen=True):
    number: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()


def migrations_of(package: str) -> list[Migration]:
    """The migrations of a package, in order."""
    found = []
    for file in (resources.files(package) / "migrations").iterdir():
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name):
            # A checkout with other line ends must have the same checksum.
            text = file.read_text(encoding="utf-8").replace("\r\n", "\n")
            found.append(Migration(int(match[1]), match[2], text))
    return sorted(found, key=lambda each: each.number)
