"""The steps that bring a database up to what this version knows: numbered files of SQL, each with a checksum.

Where they are kept, how one is taken, and what a database of another version is told, is each store's own.
"""

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
    """Those in its folder `migrations`, in their order."""
    found = []
    for file in (resources.files(package) / "migrations").iterdir():
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name):
            # Line ends are no change of meaning; a checkout on another system must not look like one.
            text = file.read_text(encoding="utf-8").replace("\r\n", "\n")
            found.append(Migration(int(match[1]), match[2], text))
    return sorted(found, key=lambda each: each.number)
