"""A tenant database in a SQLite file. Several processes on one machine can share it.

One thread runs whole transactions, so the event loop never waits for the disk. A transaction ends even if its
caller is cancelled.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.stores.migrations import migrations_of
from comfyfleet.stores.sqlite.database import connect, migrate
from comfyfleet.tenancy.database.executor import Work, for_sqlite
from comfyfleet.tenancy.database.sql_database import TenantDatabase

_Answer = TypeVar("_Answer")

_OPENING_TRIES = 20
_OPENING_WAIT_S = 0.1


class SqliteTenantDatabase(TenantDatabase):
    def __init__(self, path: Path) -> None:
        super().__init__(SqliteExecutor(path))


class SqliteExecutor:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tenant-database")
        self._database: sqlite3.Connection | None = None
        self._is_closed = False

    async def open(self) -> None:
        self._database = await self._in_thread(self._connect)

    async def close(self) -> None:
        if self._is_closed:
            return
        if self._database is not None:
            await self._in_thread(self._database.close)
        self._is_closed = True
        self._thread.shutdown(wait=False)

    async def transact(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        return await self._in_thread(lambda: self._run("BEGIN IMMEDIATE", begin))

    async def read(self, begin: Callable[[], Work[_Answer]]) -> _Answer:
        return await self._in_thread(lambda: self._run("BEGIN", begin))

    snapshot = read

    async def _in_thread(self, work: Callable[[], _Answer]) -> _Answer:
        if self._is_closed:
            raise Fault("this tenant database is closed; open it again")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _connect(self) -> sqlite3.Connection:
        known = migrations_of("comfyfleet.tenancy.database.sqlite")
        for tries_left in reversed(range(_OPENING_TRIES)):
            # Two processes may migrate the same file at once.
            try:
                database = connect(self._path)
                try:
                    migrate(database, self._path, known)
                except BaseException:
                    database.close()
                    raise
                return database
            except Fault as fault:
                if not tries_left or not _is_conflict(fault.__cause__):
                    raise
                time.sleep(_OPENING_WAIT_S)
        raise AssertionError("the last try returns or raises")

    def _run(self, start: str, begin: Callable[[], Work[_Answer]]) -> _Answer:
        database = self._database
        assert database is not None, "a database is opened before it is used"
        try:
            database.execute(start)
            answer = _execute(database, begin())
            database.execute("COMMIT")
            return answer
        except (OverflowError, UnicodeError) as error:
            raise Refusal(RefusalCode.INVALID_REQUEST, f"SQLite cannot store this value: {error}") from error
        except sqlite3.Error as error:
            raise Fault(
                f"the tenant database {self._path} rolled back a transaction: {error}. Check the disk and the file's "
                "permissions, or try again if other processes write to it"
            ) from error
        finally:
            if database.in_transaction:
                database.execute("ROLLBACK")


def _is_conflict(error: BaseException | None) -> bool:
    """The file is locked, or another process has just created a table."""
    codes = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_ERROR)
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in codes


def _execute(database: sqlite3.Connection, work: Work[_Answer]) -> _Answer:
    try:
        sql, values = next(work)
        while True:
            sql, values = work.send(database.execute(for_sqlite(sql), dict(values)).fetchall())
    except StopIteration as end:
        answer: _Answer = end.value
        return answer
    finally:
        work.close()
