"""Connections to one PostgreSQL, and transactions on them: atomic, or a `Fault` with a message.

A connection keeps no state between transactions (no prepared statements, settings or session locks), so a
transaction pooler may stand in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncClientCursor, AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow
from psycopg.types.string import TextLoader

from comfyfleet.model.errors import Fault, Refusal, RefusalCode

Connection = AsyncConnection[TupleRow]
Values = Sequence[Any] | Mapping[str, Any]
Row = tuple[Any, ...]
_Answer = TypeVar("_Answer")

MAX_TRIES = 8

# Give up a silent server after ten seconds, and a vanished one within a minute.
_DEFAULTS: dict[str, str | int] = {
    "connect_timeout": 10,
    "application_name": "comfyfleet",
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

# Rolled back because of others: serialization failure, deadlock, lock not available.
_CONFLICTS = ("40001", "40P01", "55P03")

# Sent each time: defaults differ between databases and users, and a pooler forgets settings. The time-out
# ends the transaction of a stopped process, so that others do not wait for its locks forever.
_BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
    "SET LOCAL idle_in_transaction_session_timeout = '10s'; SET LOCAL lock_timeout = '5s'"
)


class Later:
    """The rows of a statement that is sent with others. They arrive at the latest with the commit."""

    def __init__(self) -> None:
        self.rows: list[Row] = []


class SqlStep:
    """Statements on one connection, in as few messages as possible.

    Added statements go with the next question or the commit: a step costs one round trip per awaited answer.
    It uses the simple protocol, without prepared statements.
    """

    def __init__(self, connection: Connection, *, is_transaction: bool) -> None:
        self._cursor = AsyncClientCursor(connection)
        self._unsent: list[str] = _BEGIN.split("; ") if is_transaction else []
        self._last: list[str] = []
        self._expected: dict[int, Later] = {}
        """By index among the unsent statements."""
        self._is_transaction = is_transaction
        self.is_committing = False

    def add(self, query: str, values: Values = ()) -> None:
        """A statement without an awaited answer."""
        self._unsent.append(self._cursor.mogrify(query.encode(), values))

    def add_last(self, query: str, values: Values = ()) -> None:
        """A statement sent right before the commit, so that its locks are held briefly and last."""
        self._last.append(self._cursor.mogrify(query.encode(), values))

    def add_question(self, query: str, values: Values = ()) -> Later:
        """A statement whose answer is needed only after the step: it costs no round trip."""
        later = self._expected[len(self._unsent)] = Later()
        self.add(query, values)
        return later

    def add_rows(self, head: str, rows: Sequence[Row]) -> None:
        """A statement with VALUES of many rows."""
        row = f"({', '.join(['%s'] * len(rows[0]))})"
        self.add(f"{head} {', '.join([row] * len(rows))}", [value for each in rows for value in each])

    async def ask(self, *questions: tuple[str, Values]) -> list[list[Row]]:
        """The rows of each question, in one round trip. Each sees what was committed before it began."""
        for query, values in questions:
            self.add(query, values)
        await self._send()
        return (await self._answers())[-len(questions) :]

    async def rows(self, query: str, values: Values = ()) -> list[Row]:
        return (await self.ask((query, values)))[0]

    async def row(self, query: str, values: Values = ()) -> Row | None:
        found = await self.rows(query, values)
        return found[0] if found else None

    async def end(self) -> None:
        if self._is_transaction:
            self._unsent += [*self._last, "COMMIT"]
            self.is_committing = True
        if self._unsent:
            await self._send()
        if self._expected:
            await self._answers()

    async def _send(self) -> None:
        message, self._unsent = "; ".join(self._unsent), []
        await self._cursor.execute(message.encode())

    async def _answers(self) -> list[list[Row]]:
        """The rows of each statement of the message, in order."""
        answers: list[list[Row]] = []
        while True:
            answers.append(await self._cursor.fetchall() if self._cursor.description else [])
            if not self._cursor.nextset():
                break
        for place, later in self._expected.items():
            later.rows = answers[place]
        self._expected = {}
        return answers


class ConnectionPool:
    def __init__(self, url: str, size: int = 8) -> None:
        try:
            parts = conninfo_to_dict(url)
        except psycopg.Error as error:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"this is not the URL of a PostgreSQL database ({_words(error)}); it looks like postgresql://user@host:5432/database",
            ) from error
        defaults = {name: value for name, value in _DEFAULTS.items() if name not in parts}
        self._conninfo = make_conninfo(url, client_encoding="UTF8", **defaults)
        self.address = f"{parts.get('host', 'localhost')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"
        """Without the password."""
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Connection] = []
        self._is_closed = False

    async def connect(self) -> Connection:
        """A connection of the caller's own, outside the pool."""
        try:
            connection = await AsyncConnection.connect(
                self._conninfo, autocommit=True, prepare_threshold=None
            )
        except psycopg.Error as error:
            raise Fault(
                f"cannot reach PostgreSQL at {self.address}: {_words(error)}; "
                "check that it runs and that the URL is right, then try again"
            ) from error
        # As text: values are decoded once, into their own types.
        connection.adapters.register_loader("json", TextLoader)
        return connection

    async def transact(self, work: Callable[[SqlStep], Awaitable[_Answer]]) -> _Answer:
        """Runs `work` in one transaction, again after a rollback by others or a break before the commit."""
        return await self._run(work, is_transaction=True)

    async def read(self, work: Callable[[SqlStep], Awaitable[_Answer]]) -> _Answer:
        """Runs reading `work` without a transaction: each question sees its own moment."""
        return await self._run(work, is_transaction=False)

    async def fetch(self, query: str, values: Values = ()) -> list[Row]:
        return await self.read(lambda step: step.rows(query, values))

    async def execute(self, *statements: tuple[str, Values]) -> None:
        async def run(step: SqlStep) -> None:
            for query, values in statements:
                step.add(query, values)

        await self.transact(run)

    async def _run(self, work: Callable[[SqlStep], Awaitable[_Answer]], *, is_transaction: bool) -> _Answer:
        if self._is_closed:
            raise Fault("this store is closed; open a new one")
        async with self._slots:
            for tries_left in reversed(range(MAX_TRIES)):
                connection = self._idle.pop() if self._idle else await self.connect()
                step = SqlStep(connection, is_transaction=is_transaction)
                try:
                    answer = await work(step)
                    await step.end()
                    return answer
                except UnicodeError as error:
                    raise _unstorable(error) from error
                except psycopg.Error as error:
                    await self._consider(error, connection, step, tries_left)
                finally:
                    await self._put_back(connection)
        raise AssertionError("the last try returns or raises")

    async def _consider(
        self, error: psycopg.Error, connection: Connection, step: SqlStep, tries_left: int
    ) -> None:
        """Returns if the work may be tried again, and raises otherwise."""
        if connection.broken or connection.closed:
            # The other connections are probably lost, too.
            idle, self._idle = self._idle, []
            for each in idle:
                await each.close()
            if step.is_committing:
                raise Fault(
                    f"the connection to PostgreSQL at {self.address} broke during a commit, which may or "
                    "may not have taken place; read the state before you repeat the call"
                ) from error
        elif isinstance(error, psycopg.DataError):
            raise _unstorable(error) from error
        elif error.sqlstate not in _CONFLICTS:
            raise Fault(
                f"PostgreSQL at {self.address} refused a transaction and changed nothing: {_words(error)}; "
                "the server's log says more"
            ) from error
        if not tries_left:
            raise Fault(
                f"PostgreSQL at {self.address} did not commit a transaction in {MAX_TRIES} tries: "
                f"{_words(error)}; try again"
            ) from error

    async def _put_back(self, connection: Connection) -> None:
        """Rolls back the open transaction of a refused or cancelled step."""
        status = connection.info.transaction_status
        if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            try:
                await connection.rollback()
            except psycopg.Error:
                await connection.close()
                return
            except asyncio.CancelledError:
                # Cancelled again: nobody else would close it.
                await connection.close()
                raise
        elif status is not TransactionStatus.IDLE:
            await connection.close()
            return
        if self._is_closed:
            await connection.close()
        else:
            self._idle.append(connection)

    async def close(self) -> None:
        self._is_closed = True
        while self._idle:
            await self._idle.pop().close()


def _unstorable(error: Exception) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, f"PostgreSQL cannot store this value: {_words(error)}")


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
