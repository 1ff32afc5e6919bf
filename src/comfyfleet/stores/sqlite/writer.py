"""One thread writes all pending changes as one transaction, and answers each caller after the commit.

Calls add rows to the open `Batch`. The event loop owns the batches and hands one at a time to the thread, so
nothing is locked, no call waits for others, and a busy store writes larger batches. If a batch cannot be
written (for example, the disk is full), it and the open batch are undone, because later changes depend on
earlier ones: the store restores its memory for the touched keys, then each caller gets a fault.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from queue import SimpleQueue
from typing import Any

from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId
from comfyfleet.stores.inprocess.store import Key

Row = tuple[Any, ...]

_ROWS_A_STATEMENT = 64
_OPEN_COLUMNS, _ENDED_COLUMNS = 3, 6


class Batch:
    """Rows of one transaction. If a job changes twice, the last row counts."""

    __slots__ = ("added", "keys", "reopened", "results", "rows", "statements", "waiters", "watchers")

    def __init__(self) -> None:
        self.keys: dict[Key, None] = {}
        self.added: list[Row] = []
        """Submitted jobs: sequence, job id, tenant, reference, record."""
        self.rows: dict[JobId, Row] = {}
        """Open: sequence, phase, state. Ended: sequence, phase, ending, ended at, state, apart."""
        self.reopened: list[Row] = []
        """Sequences of open jobs that may have been ended before."""
        self.results: dict[int, bytes | None] = {}
        self.statements: list[tuple[str, Row]] = []
        self.waiters: list[asyncio.Future[None]] = []
        """For callers that made changes."""
        self.watchers: list[asyncio.Future[bool]] = []
        """For callers that wait for other callers' changes."""

    def touch(self, key: Key, sql: str, *values: Any) -> None:
        self.keys[key] = None
        self.statements.append((sql, values))

    def ended(self) -> list[JobId]:
        """The jobs that end with this batch."""
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
    """Writes many rows in one statement: between statements, this thread waits for the interpreter lock."""
    begin, count = 0, len(rows)
    while begin < count:
        size = min(_ROWS_A_STATEMENT, count - begin)
        if size > 8:
            # Few lengths, so that SQLite keeps the statements prepared.
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
        self._in_flight: Batch | None = None
        """The batch that the thread writes."""
        self._is_scheduled = False
        """Whether the handover of the open batch is scheduled."""
        self._queue: SimpleQueue[Batch | None] = SimpleQueue()
        self._fault: Fault | None = Fault("the store is closed; open it first")

    def start(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="comfyfleet-sqlite", daemon=True)
        self._fault = None
        self._thread.start()

    async def stop(self) -> None:
        """Writes pending changes first."""
        self._fault = Fault("the store is closed; open it first")
        while (watcher := self._watch(None)) is not None:
            await watcher
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._database.close()

    # asking

    def check(self) -> None:
        """Raises if nothing can be written. Called before each change in memory."""
        if self._fault is not None:
            raise self._fault

    def batch(self) -> Batch:
        """The open batch. Callers add their rows without awaiting."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._start_write)
        return self._open

    def written(self, batch: Batch) -> asyncio.Future[None]:
        """A future for the commit of the batch. Called before the loop runs again."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        batch.waiters.append(waiter)
        return waiter

    def is_pending(self, key: Key) -> bool:
        return key in self._open.keys or (self._in_flight is not None and key in self._in_flight.keys)

    def settling(self, key: Key | None) -> asyncio.Future[bool] | None:
        """A future for the pending commit under this key (None: any key). None: nothing is pending."""
        self.check()
        return self._watch(key)

    def _watch(self, key: Key | None) -> asyncio.Future[bool] | None:
        for batch in (self._open, self._in_flight):
            if batch is not None and (key in batch.keys or (key is None and batch.keys)):
                watcher: asyncio.Future[bool] = self._loop.create_future()
                batch.watchers.append(watcher)
                return watcher
        return None

    def _start_write(self) -> None:
        if self._in_flight is None:
            self._is_scheduled = False
            if self._open.keys:
                self._in_flight, self._open = self._open, Batch()
                self._queue.put(self._in_flight)

    # the thread

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            error: Exception | None = None
            try:
                batch.write(self._database)
            # An error must not end the thread: waiting callers get it.
            except Exception as raised:
                error = raised
                self._roll_back()
            try:
                self._loop.call_soon_threadsafe(self._on_written, batch, error)
            except RuntimeError:
                # The loop is closed: nobody waits.
                return

    def _roll_back(self) -> None:
        try:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
        except sqlite3.Error:
            # The next BEGIN fails, too, and its caller gets the error.
            return

    # back in the loop

    def _on_written(self, batch: Batch, error: Exception | None) -> None:
        assert self._in_flight is batch, "one batch at a time is written"
        self._in_flight = None
        if error is not None:
            self._failed(batch, error)
            return
        # First, so that the disk works while the callers go on.
        self._start_write()
        self._committed(batch)
        for waiter in batch.waiters:
            if not waiter.done():
                waiter.set_result(None)
        _answer(batch.watchers, True)

    def _failed(self, batch: Batch, error: Exception) -> None:
        behind, self._open, self._is_scheduled = self._open, Batch(), False
        fault = Fault(
            f"the store could not write: {error}. This was not written; free space on its disk or check "
            "its permissions, and try again"
        )
        try:
            self._restore(dict.fromkeys((*batch.keys, *behind.keys)))
        except Exception as unreadable:
            self._fault = fault = Fault(
                f"the store could not write ({error}) and then could not read ({unreadable}). Its file has all "
                "acknowledged changes; check the disk and start again"
            )
        for waiter in (*batch.waiters, *behind.waiters):
            if not waiter.done():
                waiter.set_exception(fault)
        _answer((*batch.watchers, *behind.watchers), False)


def _answer(watchers: Iterable[asyncio.Future[bool]], is_written: bool) -> None:
    for watcher in watchers:
        if not watcher.done():
            watcher.set_result(is_written)
