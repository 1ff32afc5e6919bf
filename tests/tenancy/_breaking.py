"""A process that can be made to die, or to lose an answer, between any two calls to a store or a tenant's database, and
calls of several tasks in an order that a test chooses."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Literal, cast

from comfyfleet.model.errors import Fault
from comfyfleet.ports import DocumentStore, Records, Store
from comfyfleet.tenancy.database.sql_database import TenantDatabase

Kind = Literal["crash", "fault"]

_WRITES = frozenset({"enqueue", "lease", "write"})
_APART = frozenset(
    {
        "open_round",
        "mark_sent",
        "send_again",
        "leasable",
        "stage",
        "open_round_of",
        "end_round",
        "phases",
        "get",
    }
)
_STEPS = _WRITES | _APART
_PARTS = ("records", "documents")


_LOOKS = 30


class Crash(BaseException):
    """The process ends here."""


class Fate:
    """What is to become of the calls of one process."""

    def __init__(self) -> None:
        self.is_dead = False
        self.turns: Turns | None = None
        self._left: int | None = None
        self._kind: Kind = "crash"
        self._is_after = False

    def arm(self, left: int, kind: Kind, *, is_after: bool) -> None:
        """After so many further steps. `is_after`: the step is taken, and its answer does not come."""
        self._left, self._kind, self._is_after = left, kind, is_after

    def disarm(self) -> None:
        self._left = None

    async def call(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        self._check()
        if self.turns is None or name == "now":
            return await self._step(name, work)
        await self.turns.mine()
        try:
            self._check()
            return await self._step(name, work)
        finally:
            self.turns.done()

    async def _step(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        is_hit = False
        if name in _STEPS and self._left is not None:
            is_hit, self._left = self._left == 0, self._left - 1
        if not is_hit:
            answer = await work()
            self._check()
            return answer
        self._left = None
        if self._is_after:
            await work()
        if self._kind == "fault":
            raise Fault(f"the answer to {name} was lost" if self._is_after else f"{name} did not arrive")
        self.is_dead = True
        raise Crash(name)

    def _check(self) -> None:
        if self.is_dead:
            raise Crash("dead before")


class Fated:
    """Whatever is asked of it is asked of what is inside, if fate allows."""

    def __init__(self, inner: Any, fate: Fate, port: type) -> None:
        self._inner = inner
        self._fate = fate
        self._port = port

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name in _PARTS and self._port is Store:
            return Fated(found, self._fate, Records if name == "records" else DocumentStore)
        if name in ("open", "close") or not inspect.iscoroutinefunction(getattr(self._port, name, None)):
            return found

        async def fated(*args: Any, **named: Any) -> Any:
            return await self._fate.call(name, lambda: found(*args, **named))

        return fated


def fated_store(store: Store, fate: Fate) -> Any:
    return Fated(store, fate, Store)


def fated_database(database: TenantDatabase, fate: Fate) -> TenantDatabase:
    return cast(TenantDatabase, Fated(database, fate, TenantDatabase))


class Turns:
    """One call at a time. An order says whose, and for how many calls in a row: mistakes need few changes of hands, at
    the right moments."""

    def __init__(self, order: Iterable[tuple[int, int]]) -> None:
        self._order = [who for who, times in order for _ in range(times)]
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._ended: asyncio.Future[None] | None = None

    async def mine(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((_WHO.get(), turn))
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting = [each for each in self._waiting if each[1] is not turn]
            if turn.done() and not turn.cancelled():
                self.done()
            raise

    def done(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def _arrived(
        self, who: int, tasks: list[asyncio.Task[Any]]
    ) -> tuple[int, asyncio.Future[None]] | None:
        """A call of this one; of another only if this one is over, or does not come: it may wait for the other."""
        for look in range(_LOOKS):
            for _ in range(30):
                await asyncio.sleep(0)
            chosen = next((each for each in self._waiting if each[0] == who), None)
            if chosen is not None:
                return chosen
            if tasks[who].done() and (self._waiting or look):
                break
            await asyncio.sleep(0.001)
        return self._waiting[0] if self._waiting else None

    async def play(self, works: Sequence[Coroutine[Any, Any, Any]]) -> list[BaseException | None]:
        """What each ended with."""
        loop = asyncio.get_running_loop()
        tasks = []
        for number, work in enumerate(works):
            _WHO.set(number)
            tasks.append(loop.create_task(work))
        upcoming = iter(self._order)
        while not all(each.done() for each in tasks):
            who = next(upcoming, 0) % len(works)
            chosen = await self._arrived(who, tasks)
            if chosen is None:
                continue
            self._waiting.remove(chosen)
            self._ended = loop.create_future()
            chosen[1].set_result(None)
            await self._ended
        for _, turn in self._waiting:
            turn.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        return [each if isinstance(each, BaseException) else None for each in ended]


_WHO = ContextVar("_WHO", default=0)
