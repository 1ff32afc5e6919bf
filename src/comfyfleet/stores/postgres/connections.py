"""Connections to one PostgreSQL, and one way to run a step on them: whole, or a `Fault` with words.

A connection carries no state from one transaction to the next (no prepared statements, no settings, no session locks),
so a transaction pooler may stand in between. What a step does is the caller's.

Calls of one kind that come while others are being answered are answered together, in one transaction.

Nobody waits for company: a call that comes alone goes alone. What a group does is the caller's; all of it happens or
nothing does. A caller that goes away before its group has begun is left out; after that its change may take place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

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

# A server that does not answer is given up after ten seconds, one that vanished without a word within a minute.
_DEFAULTS: dict[str, str | int] = {
    "connect_timeout": 10,
    "application_name": "comfyfleet",
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

# Rolled back by the server because of somebody else: deadlock, serialization failure, lock not available.
_OTHERS_IN_THE_WAY = ("40001", "40P01", "55P03")

# Said each time: the default of a database or a user may be another, and a pooler forgets settings. A process that was
# stopped in the middle of a transaction loses it, so that the others do not wait for its locks for ever.
_BEGIN = (
    "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; "
    "SET LOCAL idle_in_transaction_session_timeout = '10s'; SET LOCAL lock_timeout = '5s'"
)


class Later:
    """The rows of a statement that is sent with others: there once those are sent, at the latest with the commit."""

    def __init__(self) -> None:
        self.rows: list[Row] = []


class SqlStep:
    """Statements on one connection, sent in as few messages as can be.

    What is added is sent together with the next question, or with the commit: a step costs one round trip for each
    answer it waits for. The simple protocol is used throughout; it knows no prepared statements.
    """

    def __init__(self, connection: Connection, *, is_transaction: bool) -> None:
        self._cursor = AsyncClientCursor(connection)
        self._unsent: list[str] = _BEGIN.split("; ") if is_transaction else []
        self._last: list[str] = []
        self._expected: dict[int, Later] = {}
        """By the place of their statements among those not sent yet."""
        self._is_transaction = is_transaction
        self.is_committing = False

    def add(self, query: str, values: Values = ()) -> None:
        """A statement whose answer nobody waits for."""
        self._unsent.append(self._cursor.mogrify(query.encode(), values))

    def add_last(self, query: str, values: Values = ()) -> None:
        """A statement that is sent right before the commit, after all others: what it locks is held briefly, and
        nobody who holds it waits for anything else."""
        self._last.append(self._cursor.mogrify(query.encode(), values))

    def add_question(self, query: str, values: Values = ()) -> Later:
        """A statement whose answer is needed, but not before the step ends: it costs no round trip of its own."""
        later = self._expected[len(self._unsent)] = Later()
        self.add(query, values)
        return later

    def add_rows(self, head: str, rows: Sequence[Row], tail: str = "") -> None:
        """A statement of many rows, to stand where VALUES takes them."""
        row = f"({', '.join(['%s'] * len(rows[0]))})"
        self.add(f"{head} {', '.join([row] * len(rows))}{tail}", [value for each in rows for value in each])

    async def ask(self, *questions: tuple[str, Values]) -> list[list[Row]]:
        """The rows of each, in one round trip. Each sees what was committed before it began."""
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
        """Of each statement of the message, in order."""
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
                f"this is no URL of a PostgreSQL ({_words(error)}); it looks like postgresql://user@host:5432/database",
            ) from error
        defaults = {name: value for name, value in _DEFAULTS.items() if name not in parts}
        self._conninfo = make_conninfo(url, client_encoding="UTF8", **defaults)
        self.address = f"{parts.get('host', 'localhost')}:{parts.get('port', 5432)}/{parts.get('dbname', '')}"
        """Where the server is, without the password."""
        self._room = asyncio.Semaphore(size)
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
        """Runs `work` in one transaction. Where the server rolled it back because of others, or the connection broke
        before the commit was sent, nothing was done and it is run again."""
        return await self._run(work, is_transaction=True)

    async def read(self, work: Callable[[SqlStep], Awaitable[_Answer]]) -> _Answer:
        """Runs `work`, which changes nothing; each of its questions is answered as of its own moment."""
        return await self._run(work, is_transaction=False)

    async def _run(self, work: Callable[[SqlStep], Awaitable[_Answer]], *, is_transaction: bool) -> _Answer:
        if self._is_closed:
            raise Fault("this store was closed; open a new one")
        async with self._room:
            for tries_left in reversed(range(MAX_TRIES)):
                connection = self._idle.pop() if self._idle else await self.connect()
                step = SqlStep(connection, is_transaction=is_transaction)
                try:
                    answer = await work(step)
                    await step.end()
                    return answer
                except UnicodeError as error:
                    raise _unkeepable(error) from error
                except psycopg.Error as error:
                    await self._consider(error, connection, step, tries_left)
                finally:
                    await self._put_back(connection)
        raise AssertionError("the last try answers or raises")

    async def _consider(
        self, error: psycopg.Error, connection: Connection, step: SqlStep, tries_left: int
    ) -> None:
        """Returns if the work may be tried again, and raises otherwise."""
        if connection.broken or connection.closed:
            # The others were most likely lost with it.
            idle, self._idle = self._idle, []
            for each in idle:
                await each.close()
            if step.is_committing:
                raise Fault(
                    f"the connection to PostgreSQL at {self.address} broke during a commit: whether it took place is "
                    "unknown; read the state before repeating the call"
                ) from error
        elif isinstance(error, psycopg.DataError):
            raise _unkeepable(error) from error
        elif error.sqlstate not in _OTHERS_IN_THE_WAY:
            raise Fault(
                f"PostgreSQL at {self.address} refused a transaction, which was not carried out: {_words(error)}; "
                "the server's log says more"
            ) from error
        if not tries_left:
            raise Fault(
                f"PostgreSQL at {self.address} did not carry out a transaction in {MAX_TRIES} tries: "
                f"{_words(error)}; try again"
            ) from error

    async def _put_back(self, connection: Connection) -> None:
        """A step that was refused, or given up by its caller, leaves a transaction behind: it is taken back."""
        status = connection.info.transaction_status
        if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            try:
                await connection.rollback()
            except psycopg.Error:
                await connection.close()
                return
            except asyncio.CancelledError:
                # Given up a second time, by now nobody else would ever close it.
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


def _unkeepable(error: Exception) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, f"PostgreSQL cannot keep this value: {_words(error)}")


def _words(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


Question = TypeVar("Question")
Answer = TypeVar("Answer")

MAX_GROUP = 64


class CallBatcher(Generic[Question, Answer]):
    def __init__(self, answer: Callable[[Sequence[Question]], Awaitable[Sequence[Answer]]]) -> None:
        self._answer = answer
        self._waiting: dict[Hashable, list[tuple[Question, asyncio.Future[Answer]]]] = {}
        """By kind; a kind is here exactly while a task works for it."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, kind: Hashable, question: Question) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(kind)
        if waiting is None:
            self._waiting[kind] = [(question, answer)]
            task = asyncio.create_task(self._work(kind), name="comfyfleet-postgres-group")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            waiting.append((question, answer))
        return await answer

    async def _work(self, kind: Hashable) -> None:
        try:
            while waiting := self._waiting[kind]:
                group = [each for each in waiting[:MAX_GROUP] if not each[1].done()]
                self._waiting[kind] = waiting[MAX_GROUP:]
                if group:
                    await self._answer_group(group)
        finally:
            for _, answer in self._waiting.pop(kind):
                answer.cancel()

    async def _answer_group(self, group: Sequence[tuple[Question, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._answer([question for question, _ in group])
        # Whatever it was, it is the callers' to hear of.
        except Exception as error:
            if isinstance(error, Refusal) and len(group) > 1:
                # Somebody asked for what cannot be: only he is refused, and the others are answered one by one.
                for each in group:
                    await self._answer_group([each])
                return
            for _, waiter in group:
                if not waiter.done():
                    waiter.set_exception(error)
            return
        except asyncio.CancelledError:
            for _, waiter in group:
                waiter.cancel()
            raise
        for (_, waiter), answer in zip(group, answers, strict=True):
            if not waiter.done():
                waiter.set_result(answer)

    async def close(self) -> None:
        """What was begun is finished."""
        await asyncio.gather(*self._tasks)
