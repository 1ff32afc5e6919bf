"""A tenant database in a SQLite file. Several processes of one machine may share it: writes take turns.

One thread of its own carries out whole transactions, so the event loop never waits for the disk, and a caller that
gives up leaves its transaction to end by itself.
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
from comfyfleet.tenancy.database.sql_database import SqlTenantDatabase

_Answer = TypeVar("_Answer")

_OPENING_TRIES = 20
_OPENING_WAIT_S = 0.1


class SqliteTenantDatabase(SqlTenantDatabase):
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
            raise Fault("this tenant database was closed; open it anew")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _connect(self) -> sqlite3.Connection:
        known = migrations_of("comfyfleet.tenancy.database.sqlite")
        for tries_left in reversed(range(_OPENING_TRIES)):
            # Two processes may set up the same file at once: whoever comes second finds it done.
            try:
                database = connect(self._path)
                try:
                    migrate(database, self._path, known)
                except BaseException:
                    database.close()
                    raise
                return database
            except Fault as fault:
                if not tries_left or not _are_others_in_the_way(fault.__cause__):
                    raise
                time.sleep(_OPENING_WAIT_S)
        raise AssertionError("the last try answers or raises")

    def _run(self, start: str, begin: Callable[[], Work[_Answer]]) -> _Answer:
        database = self._database
        assert database is not None, "a database is opened before it is used"
        try:
            database.execute(start)
            answer = _carry_out(database, begin())
            database.execute("COMMIT")
            return answer
        except (OverflowError, UnicodeError) as error:
            raise Refusal(RefusalCode.INVALID_REQUEST, f"SQLite cannot keep this value: {error}") from error
        except sqlite3.Error as error:
            raise Fault(
                f"the tenant database {self._path} refused a transaction, which was not carried out: {error}. "
                "See to its disk and its rights, or try again if others write to it"
            ) from error
        finally:
            if database.in_transaction:
                database.execute("ROLLBACK")


def _are_others_in_the_way(error: BaseException | None) -> bool:
    """The file is locked, or a table is there that was not a moment ago."""
    ours = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_ERROR)
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in ours


def _carry_out(database: sqlite3.Connection, work: Work[_Answer]) -> _Answer:
    try:
        sql, values = next(work)
        while True:
            sql, values = work.send(database.execute(for_sqlite(sql), dict(values)).fetchall())
    except StopIteration as end:
        answer: _Answer = end.value
        return answer
    finally:
        work.close()
