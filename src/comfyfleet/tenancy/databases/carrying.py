"""What carries out work on one database: a SQLite file or PostgreSQL, each in its own folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from comfyfleet.tenancy.databases.work import Work

_Answer = TypeVar("_Answer")


class Carrier(Protocol):
    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def transact(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        """In one transaction. Begun anew where others were in the way."""

    async def read(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        """What changes nothing. Each of its questions is answered as of its own moment …"""

    async def snapshot(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        """… and here all of them as of one."""
