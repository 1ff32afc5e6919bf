"""Short words for tests of the SQLite store: a bench on a file, opened again and again."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from comfyfleet.ports import Clock
from comfyfleet.stores.sqlite import writer
from comfyfleet.stores.sqlite.store import SqliteStore
from comfyfleet.testing.contract.store_bench import StoreBench
from comfyfleet.testing.time import ManualClock


@asynccontextmanager
async def reopened(path: Path, clock: Clock | None = None) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path, clock or ManualClock())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def make_bench(path: Path) -> StoreBench:
    return StoreBench(lambda clock: SqliteStore(path, clock))


class FullDisk:
    """Every write fails as on a full disk, from now on or after so many, so many times or until there is room again."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, times: float = float("inf"), *, after: int = 0
    ) -> None:
        self.times = times
        self.after = after
        real = writer.Batch.write

        def write(batch: writer.Batch, database: sqlite3.Connection) -> None:
            if self.after > 0 or self.times <= 0:
                self.after -= 1
                real(batch, database)
                return
            self.times -= 1
            database.execute("BEGIN IMMEDIATE")
            # As SQLite meets it: in the middle, with some of the rows written.
            database.execute("UPDATE meta SET value = value + 1000")
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(writer.Batch, "write", write)

    def make_room(self) -> None:
        self.times = 0


class SlowDisk:
    """The writes of a store wait, one after the other, until each is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._permits = threading.Semaphore(0)
        real = writer.Batch.write

        def write(batch: writer.Batch, database: sqlite3.Connection) -> None:
            assert self._permits.acquire(timeout=60), "nobody let this write through"
            real(batch, database)

        monkeypatch.setattr(writer.Batch, "write", write)

    def let_through(self, count: int) -> None:
        self._permits.release(count)


Step = Callable[[], Awaitable[object]]
