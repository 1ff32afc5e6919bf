"""The databases that tenants are assigned to, by the names an operator gave them.

Each is opened when it is first asked for. One that is away answers so at once, and one caller a second asks again: a
database that nobody can reach, or that does not answer, costs those who do not need it nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import wraps
from typing import Any, cast

from comfyfleet.model.errors import ComfyFleetError, Fault, Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.ports import Clock, DocumentStore
from comfyfleet.tenancy.database.port import AccountFrozen, TenantDatabase

DEFAULT_POOL = "default"
ANSWER_S = 10.0
"""A database that takes longer is away, whatever it is doing."""
_RETRY_S = 1.0


class TenantDatabases:
    """`open_database` makes one from its address; it is opened here. What is put `around` it is not watched: a key that
    one tenant misses does not make the database away for others."""

    def __init__(
        self,
        urls: Mapping[str, str],
        clock: Clock,
        open_database: Callable[[str], TenantDatabase],
        around: Callable[[TenantDatabase], TenantDatabase] | None = None,
    ) -> None:
        self._urls = dict(urls)
        self._clock = clock
        self._open_database = open_database
        self._around = around
        self._opening: dict[str, asyncio.Task[TenantDatabase]] = {}
        self._asked: dict[str, None] = {}
        self._away: dict[str, tuple[ComfyFleetError, float]] = {}
        self._ledgers: set[tuple[str, TenantId]] = set()
        """That were seen: a book that was begun stays."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._urls)

    @property
    def asked(self) -> tuple[str, ...]:
        """Those that somebody needed."""
        return tuple(self._asked)

    def check(self, name: str) -> str:
        if name not in self._urls:
            known = ", ".join(sorted(self._urls)) or "none"
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"there is no pool {name!r} here (there is {known}); pools are set up in the hub's settings, "
                'in the table [pools], as NAME = "sqlite:///…" or "postgresql://…"',
            )
        return name

    async def get(self, name: str) -> TenantDatabase:
        """Raises `Fault` while it cannot be reached."""
        if name not in self._urls:
            # Set up at another hub only, or taken out of the settings: an operator's mistake, not the caller's.
            raise Fault(
                f"the pool {name!r} is not in this hub's settings: add it to [pools], as at the other hubs"
            )
        self._asked[name] = None
        opening = self._opening.get(name)
        if opening is None:
            self._check_there(name)
            opening = self._opening[name] = asyncio.create_task(self._open(name), name=f"pool {name}")
        return await asyncio.shield(opening)

    async def of(self, tenant: Tenant) -> TenantDatabase:
        """The one it lives in. Raises `Fault` while that cannot be reached, and where it is another one: to that all
        jobs of the tenant are unknown, and unknown jobs are ended."""
        database = await self.get(tenant.pool)
        if (tenant.pool, tenant.tenant_id) not in self._ledgers:
            if not await database.has_account(tenant.tenant_id):
                raise Fault(
                    f"the database of pool {tenant.pool!r} does not know tenant {tenant.tenant_id!r}, who lives there: "
                    "see whether its address in [pools] is the one that the other hubs have, and whether it was set "
                    "back to an older state"
                )
            self._ledgers.add((tenant.pool, tenant.tenant_id))
        return database

    async def opened(self) -> list[tuple[str, TenantDatabase]]:
        """Of those that somebody needed, all that can be reached now."""
        names = tuple(self._asked)
        answers = await asyncio.gather(*map(self.get, names), return_exceptions=True)
        found = []
        for name, answer in zip(names, answers, strict=True):
            if not isinstance(answer, BaseException):
                found.append((name, answer))
            elif not isinstance(answer, ComfyFleetError):
                raise answer
        return found

    def is_away(self, name: str) -> bool:
        """Whether the last that was asked of it could not be answered."""
        return name in self._away

    async def close(self) -> None:
        openings, self._opening = self._opening, {}
        for opening in openings.values():
            opening.cancel()
        for database in await _settled(openings.values()):
            await database.close()

    async def _open(self, name: str) -> TenantDatabase:
        database = self._open_database(self._urls[name])
        try:
            await database.open()
        except BaseException as error:
            self._opening.pop(name, None)
            if isinstance(error, ComfyFleetError):
                self.note_away(name, error)
            await database.close()
            raise
        self._away.pop(name, None)
        watched = cast(TenantDatabase, _Watched(database, name, self))
        return watched if self._around is None else self._around(watched)

    def _check_there(self, name: str) -> None:
        fault, again_at = self._away.get(name, (None, float("-inf")))
        if fault is None:
            return
        if self._clock.monotonic() < again_at:
            raise Fault(str(fault)) from fault
        # Whoever comes now finds out; nobody else waits for it.
        self.note_away(name, fault)

    def note_away(self, name: str, error: ComfyFleetError) -> None:
        self._away[name] = (error, self._clock.monotonic() + _RETRY_S)

    async def watched(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        self._check_there(name)
        try:
            answer = await _answered(name, work())
        except AccountFrozen:
            # One tenant's; the database is there.
            self._away.pop(name, None)
            raise
        except Fault as fault:
            self.note_away(name, fault)
            raise
        self._away.pop(name, None)
        return answer


class _Watched:
    """A database, or a tenant's documents in it, whose faults are noted. Whatever it is asked, that is what answers."""

    def __init__(self, database: TenantDatabase | DocumentStore, name: str, pools: TenantDatabases) -> None:
        self._database = database
        self._name = name
        self._pools = pools

    def documents(self, tenant: TenantId) -> DocumentStore:
        """Its documents are in the same database, and as long in coming."""
        documents = cast(TenantDatabase, self._database).documents(tenant)
        return cast(DocumentStore, _Watched(documents, self._name, self._pools))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._database, name)
        if not asyncio.iscoroutinefunction(method) or name == "close":
            return method

        @wraps(method)
        async def watched(*args: Any, **named: Any) -> Any:
            return await self._pools.watched(self._name, lambda: method(*args, **named))

        # Found by Python itself from now on.
        self.__dict__[name] = watched
        return watched


async def _answered(name: str, work: Coroutine[Any, Any, Any]) -> Any:
    """In a task of its own: a driver that is told to give up may go on waiting for its server."""
    asking = asyncio.create_task(work)
    try:
        await asyncio.wait((asking,), timeout=ANSWER_S)
    except BaseException:
        _give_up(asking)
        raise
    if not asking.done():
        _give_up(asking)
        raise Fault(
            f"the database of pool {name!r} did not answer within {ANSWER_S:g} s, and whether it did what it was asked "
            "is not known; see whether it is stopped, or has more to do than it can"
        )
    return asking.result()


def _give_up(asking: asyncio.Task[Any]) -> None:
    asking.cancel()
    # Nobody else will hear what becomes of it.
    asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


async def _settled(openings: Iterable[asyncio.Task[TenantDatabase]]) -> list[TenantDatabase]:
    answers = await asyncio.gather(*openings, return_exceptions=True)
    return [each for each in answers if not isinstance(each, BaseException)]
