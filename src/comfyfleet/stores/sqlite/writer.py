"""One thread that writes: all that has piled up is one transaction, and every caller is answered by its own commit.

Calls add the rows they change to the `Batch` that is open. The event loop owns every batch and hands one at a time to
the thread: when all that was ready to run has had its turn, or when the one before has come back. So nothing is
locked, nobody waits for company, and the busier the store is the larger its groups are. If a batch cannot be written
(the disk is full), it and everything that piled up behind it is taken back: what came later was decided on what came
before. The store is told which jobs and areas that touched, puts its memory right, and only then are the callers
answered with a fault.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import chain
from queue import SimpleQueue
from typing import Any

from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId

Row = tuple[Any, ...]


class Area(StrEnum):
    """What changes as a whole, beside single jobs."""

    TABLE = "table"
    WORKERS = "workers"
    BLOCKS = "blocks"
    WORKFLOW_STATS = "workflow_stats"
    TENANTS = "tenants"
    PAUSE = "pause"
    PLACES = "places"
    DOCUMENTS = "documents"


Key = JobId | Area

_ROWS_A_STATEMENT = 64
_OPEN_COLUMNS, _ENDED_COLUMNS = 3, 6


class Batch:
    """Rows to write in one transaction. Of a job that changes twice in it, the last row is written."""

    __slots__ = ("added", "keys", "reopened", "results", "rows", "statements", "waiters", "watchers")

    def __init__(self) -> None:
        self.keys: dict[Key, None] = {}
        self.added: list[Row] = []
        """Jobs as submitted: sequence, job id, tenant, reference, record."""
        self.rows: dict[JobId, Row] = {}
        """Sequence, phase, state; of a job that has ended: sequence, phase, ending, ended at, state, apart."""
        self.reopened: list[Row] = []
        """The sequences of jobs that may have ended before, and are open."""
        self.results: dict[int, bytes | None] = {}
        self.statements: list[tuple[str, Row]] = []
        self.waiters: list[asyncio.Future[None]] = []
        """Those whose changes these are."""
        self.watchers: list[asyncio.Future[bool]] = []
        """Those who only want to know whether it was written."""

    def touch(self, key: Key, sql: str, *values: Any) -> None:
        self.keys[key] = None
        self.statements.append((sql, values))

    def ended(self) -> list[JobId]:
        """The jobs that are over with this batch."""
        return [job_id for job_id, row in self.rows.items() if len(row) == _ENDED_COLUMNS]

    def write(self, database: sqlite3.Connection) -> None:
        rows = list(self.rows.values())
        ended = [row for row in rows if len(row) == _ENDED_COLUMNS]
        results = [(sequence, result) for sequence, result in self.results.items() if result is not None]
        gone = [(sequence,) for sequence, result in self.results.items() if result is None]
        database.execute("BEGIN IMMEDIATE")
        for sql, values in self.statements:
            database.execute(sql, values)
        _put(database, "INSERT INTO jobs VALUES", self.added)
        _put(database, "DELETE FROM ended_jobs WHERE (sequence) IN (VALUES", self.reopened, ")")
        _put(database, "DELETE FROM open_jobs WHERE (sequence) IN (VALUES", [row[:1] for row in ended], ")")
        _put(
            database,
            "INSERT OR REPLACE INTO open_jobs VALUES",
            [row for row in rows if len(row) == _OPEN_COLUMNS],
        )
        _put(database, "INSERT OR REPLACE INTO ended_jobs VALUES", ended)
        _put(database, "INSERT OR REPLACE INTO results VALUES", results)
        _put(database, "DELETE FROM results WHERE (sequence) IN (VALUES", gone, ")")
        database.execute("COMMIT")


def _put(database: sqlite3.Connection, head: str, rows: Sequence[Row], tail: str = "") -> None:
    """Many rows in one statement: between two statements this thread has to wait until the loop lets it go on."""
    begin, count = 0, len(rows)
    while begin < count:
        size = min(_ROWS_A_STATEMENT, count - begin)
        if size > 8:
            # Few lengths: each is a statement that SQLite keeps prepared.
            size -= size % 8
        part = rows[begin : begin + size]
        row = f"({', '.join('?' * len(part[0]))})"
        database.execute(
            f"{head} {', '.join([row] * size)}{tail}",
            part[0] if size == 1 else tuple(chain.from_iterable(part)),
        )
        begin += size


class Writer:
    def __init__(
        self, *, committed: Callable[[Batch], None], restore: Callable[[Iterable[Key]], None]
    ) -> None:
        self._committed = committed
        self._restore = restore
        self._open = Batch()
        self._flying: Batch | None = None
        """What the thread is writing."""
        self._is_called = False
        """The open batch will be handed over when the loop comes round."""
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._fault: Fault | None = Fault("the store is closed; open it first")

    def start(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="comfyfleet-sqlite", daemon=True)
        self._fault = None
        self._thread.start()

    async def stop(self) -> None:
        """What has been asked for is still written."""
        self._fault = Fault("the store is closed; open it first")
        while (watcher := self._watch(None)) is not None:
            await watcher
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._database.close()

    # asking

    def check(self) -> None:
        """Raises if nothing can be written any more; asked before anything is changed in memory."""
        if self._fault is not None:
            raise self._fault

    def batch(self) -> Batch:
        """The group that is written next; rows are added to it without a pause."""
        if not self._is_called:
            self._is_called = True
            self._loop.call_soon(self._hand_over)
        return self._open

    def written(self, batch: Batch) -> asyncio.Future[None]:
        """Answers or raises when the batch is written or is not. Asked for before the loop does anything else."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        batch.waiters.append(waiter)
        return waiter

    def is_pending(self, key: Key) -> bool:
        return key in self._open.keys or (self._flying is not None and key in self._flying.keys)

    def settling(self, key: Key | None) -> asyncio.Future[bool] | None:
        """A future that says whether what last changed under this key (None: at all) was written; None: it was."""
        self.check()
        return self._watch(key)

    def _watch(self, key: Key | None) -> asyncio.Future[bool] | None:
        for batch in (self._open, self._flying):
            if batch is not None and (key in batch.keys or (key is None and batch.keys)):
                watcher: asyncio.Future[bool] = self._loop.create_future()
                batch.watchers.append(watcher)
                return watcher
        return None

    def _hand_over(self) -> None:
        if self._flying is None:
            self._is_called = False
            if self._open.keys:
                self._flying, self._open = self._open, Batch()
                self._queue.put(self._flying)

    # the thread

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            error: Exception | None = None
            try:
                batch.write(self._database)
            # Whatever it was, it must not end the thread: those who wait are told.
            except Exception as raised:
                error = raised
                self._roll_back()
            try:
                self._loop.call_soon_threadsafe(self._came_back, batch, error)
            except RuntimeError:
                # The loop is closed: nobody waits any more.
                return

    def _roll_back(self) -> None:
        try:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
        except sqlite3.Error:
            # The next BEGIN fails too then, and each caller hears of it.
            return

    # back in the loop

    def _came_back(self, batch: Batch, error: Exception | None) -> None:
        assert self._flying is batch, "one group at a time is written"
        self._flying = None
        if error is not None:
            self._failed(batch, error)
            return
        # First of all, so that the disk has something to do while those who are answered go on.
        self._hand_over()
        self._committed(batch)
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_result(None)
        _answer(batch.watchers, True)

    def _failed(self, batch: Batch, error: Exception) -> None:
        behind, self._open, self._is_called = self._open, Batch(), False
        fault = Fault(
            f"the store could not write: {error}. This was not written; make room on its disk or see to its rights, "
            "and try again"
        )
        try:
            self._restore(dict.fromkeys((*batch.keys, *behind.keys)))
        except Exception as unreadable:
            self._fault = fault = Fault(
                f"the store could not write ({error}) and then not read ({unreadable}). What was acknowledged is in "
                "its file; see to the disk and start again"
            )
        for waiter in (*batch.waiters, *behind.waiters):
            if not waiter.done():
                waiter.set_exception(fault)
        _answer((*batch.watchers, *behind.watchers), False)


def _answer(watchers: Iterable[asyncio.Future[bool]], is_written: bool) -> None:
    for watcher in watchers:
        if not watcher.done():
            watcher.set_result(is_written)
