"""One thread that writes: all that has piled up is one transaction, and every caller is answered by its own commit.

Calls add the rows they change to the `Batch` that is open. If a batch cannot be written
(the disk is full), it and everything that piled up behind it is taken back: what came later was decided on what came
before. The store is told which jobs and areas that touched, puts its memory right, and only then are the callers
answered with a fault. Everything but the writing itself happens in the event loop.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import chain
from typing import Any

from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId

Row = tuple[Any, ...]


class Area(StrEnum):
    """What changes as a whole, beside single jobs."""

    TABLE = "table"
    WORKERS = "workers"
    BLOCKS = "blocks"
    LESSONS = "lessons"
    TENANTS = "tenants"
    PAUSE = "pause"


Key = JobId | Area

_ROW = f"({', '.join('?' * 14)})"
_ROWS_A_STATEMENT = 64
_PUT = [
    f"INSERT INTO changed_jobs VALUES {', '.join([_ROW] * size)}" for size in range(_ROWS_A_STATEMENT + 1)
]
NO_RESULT = 0
"""In place of a result that is no more."""


class Batch:
    """Rows to write in one transaction. Of a job that changes twice in it, the last row is written."""

    __slots__ = (
        "dispatches",
        "jobs",
        "keys",
        "results",
        "statements",
        "waiters",
        "watchers",
    )

    def __init__(self) -> None:
        self.keys: dict[Key, None] = {}
        self.dispatches: dict[JobId, Row] = {}
        self.jobs: dict[int, bytes] = {}
        self.results: dict[int, bytes | int] = {}
        self.statements: list[tuple[str, Row]] = []
        self.waiters: list[asyncio.Future[None]] = []
        """Those whose changes these are."""
        self.watchers: list[asyncio.Future[bool]] = []
        """Those who only want to know whether it was written."""

    def touch(self, key: Key, sql: str, *values: Any) -> None:
        self.keys[key] = None
        self.statements.append((sql, values))

    def ended(self) -> Iterator[JobId]:
        """The jobs that are over with this batch."""
        return (job_id for job_id, row in self.dispatches.items() if row[6] is not None)

    def write(self, database: sqlite3.Connection) -> None:
        parts = list(self._parts())
        if len(parts) == 1 and not self.statements:
            # One statement is a transaction of its own. Between two of them this thread has to wait until the loop
            # lets it go on, so what comes in one is written while the loop works.
            database.execute(*parts[0])
            return
        database.execute("BEGIN IMMEDIATE")
        for sql, values in (*self.statements, *parts):
            database.execute(sql, values)
        database.execute("COMMIT")

    def _parts(self) -> Iterator[tuple[str, Row]]:
        job, result = self.jobs.get, self.results.get
        rows = [(*row, job(row[0]), result(row[0])) for row in self.dispatches.values()]
        begin = 0
        while begin < len(rows):
            size = min(_ROWS_A_STATEMENT, len(rows) - begin)
            yield _PUT[size], tuple(chain.from_iterable(rows[begin : begin + size]))
            begin += size


class Writer:
    """A context manager: `with writer as batch` adds rows to the group that is written next, without a pause."""

    def __init__(
        self, *, committed: Callable[[Batch], None], restore: Callable[[Iterable[Key]], None]
    ) -> None:
        self._committed = committed
        self._restore = restore
        self._open = Batch()
        self._flying: deque[Batch] = deque()
        """Taken by the thread, and not yet known in the loop to be written."""
        self._changed = threading.Condition()
        self._is_idle = False
        self._has_failed = False
        self._is_stopping = False
        self._fault: Fault | None = Fault("the store is closed; open it first")

    def start(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="comfyfleet-sqlite", daemon=True)
        self._is_stopping, self._fault = False, None
        self._thread.start()

    async def stop(self) -> None:
        """What has been asked for is still written."""
        self._fault = Fault("the store is closed; open it first")
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join)
        self._database.close()

    # asking

    def check(self) -> None:
        """Raises if nothing can be written any more; asked before anything is changed in memory."""
        if self._fault is not None:
            raise self._fault

    def __enter__(self) -> Batch:
        self._changed.acquire()
        return self._open

    def __exit__(self, *_: object) -> None:
        if self._is_idle:
            self._changed.notify()
        self._changed.release()

    def written(self, batch: Batch) -> asyncio.Future[None]:
        """Answers or raises when the batch is written or is not. Asked for before the loop does anything else."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        batch.waiters.append(waiter)
        return waiter

    def is_pending(self, key: Key) -> bool:
        return self._holder(key) is not None

    def settling(self, key: Key | None) -> asyncio.Future[bool] | None:
        """A future that says whether what last changed under this key (None: at all) was written; None: it was."""
        self.check()
        batch = self._holder(key)
        if batch is None:
            return None
        watcher: asyncio.Future[bool] = self._loop.create_future()
        batch.watchers.append(watcher)
        return watcher

    def _holder(self, key: Key | None) -> Batch | None:
        with self._changed:
            for batch in (self._open, *reversed(self._flying)):
                if key in batch.keys or (key is None and batch.keys):
                    return batch
        return None

    # the thread

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            try:
                batch.write(self._database)
            # Whatever it was, it must not end the thread: those who wait are told.
            except Exception as error:
                self._roll_back()
                self._tell(self._failed, batch, error)
            else:
                self._tell(self._done, batch)

    def _take(self) -> Batch | None:
        with self._changed:
            while self._has_failed or not self._open.keys:
                if self._is_stopping and not self._has_failed:
                    return None
                self._is_idle = True
                self._changed.wait()
            self._is_idle = False
            batch, self._open = self._open, Batch()
            self._flying.append(batch)
            return batch

    def _roll_back(self) -> None:
        with self._changed:
            self._has_failed = True
        try:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
        except sqlite3.Error:
            # The next BEGIN fails too then, and each caller hears of it.
            return

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            with self._changed:
                self._is_stopping, self._has_failed, self._open = True, False, Batch()

    # back in the loop

    def _done(self, batch: Batch) -> None:
        with self._changed:
            flown = self._flying.popleft()
        assert flown is batch, "groups are answered in the order in which they were written"
        self._committed(batch)
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_result(None)
        _answer(batch.watchers, True)

    def _failed(self, batch: Batch, error: Exception) -> None:
        with self._changed:
            self._flying.popleft()
            behind, self._open = self._open, Batch()
        fault = Fault(
            f"the store could not write: {error}. Nothing was changed; make room on its disk or see to its rights, "
            "and try again"
        )
        try:
            self._restore(dict.fromkeys((*batch.keys, *behind.keys)))
        except Exception as unreadable:
            self._fault = fault = Fault(
                f"the store could not write ({error}) and then not read ({unreadable}). What was acknowledged is in "
                "its file; see to the disk and start again"
            )
        with self._changed:
            self._has_failed = False
            self._changed.notify()
        for waiter in (*batch.waiters, *behind.waiters):
            if not waiter.done():
                waiter.set_exception(fault)
        _answer((*batch.watchers, *behind.watchers), False)


def _answer(watchers: Iterable[asyncio.Future[bool]], is_written: bool) -> None:
    for watcher in watchers:
        if not watcher.done():
            watcher.set_result(is_written)
