"""The tenant databases of a hub, by name. Each is opened when it is first needed.

Calls to an unreachable database fail at once, and one call a second tries again, so it does not delay other
tenants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, cast

from comfyfleet.model.errors import ComfyFleetError, Fault, Refusal, RefusalCode
from comfyfleet.model.ids import TenantId
from comfyfleet.model.tenant import Tenant
from comfyfleet.ports import Clock, DocumentStore
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.tenancy.database.values import AccountFrozen

DEFAULT_DATABASE = "default"
ANSWER_S = 10.0
"""A database that takes longer counts as unreachable."""
_RETRY_S = 1.0


class TenantDatabases:
    """`open_database` builds a database from its URL, and `around` wraps it. Only faults of the database itself make
    it unreachable, not a tenant's missing encryption key in the wrapper."""

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
        """Accounts that are known to exist."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._urls)

    @property
    def used_names(self) -> tuple[str, ...]:
        """The names that were used so far."""
        return tuple(self._asked)

    def check(self, name: str) -> str:
        if name not in self._urls:
            known = ", ".join(sorted(self._urls)) or "none"
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"there is no tenant database {name!r} here (known: {known}); add it to the hub's settings, in the "
                'table [databases], as NAME = "sqlite:///…" or "postgresql://…"',
            )
        return name

    async def get(self, name: str) -> TenantDatabase:
        """Raises `Fault` while it is unreachable."""
        if name not in self._urls:
            # A fault, not a refusal: the operator must correct the settings, not the caller.
            raise Fault(
                f"the tenant database {name!r} is not in this hub's settings: add it to [databases], as at other hubs"
            )
        self._asked[name] = None
        opening = self._opening.get(name)
        if opening is None:
            self._check_reachable(name)
            opening = self._opening[name] = asyncio.create_task(self._open(name), name=f"database {name}")
        return await asyncio.shield(opening)

    async def database_of(self, tenant: Tenant) -> TenantDatabase:
        """Raises `Fault` while it is unreachable or does not know the tenant. A wrong database would not know the
        tenant's jobs either, and the hub ends unknown jobs."""
        database = await self.get(tenant.database)
        if (tenant.database, tenant.tenant_id) not in self._ledgers:
            if not await database.has_account(tenant.tenant_id):
                raise Fault(
                    f"the tenant database {tenant.database!r} does not know tenant {tenant.tenant_id!r}: check that "
                    "its URL in [databases] is the same at all hubs, and that it was not restored from an older backup"
                )
            self._ledgers.add((tenant.database, tenant.tenant_id))
        return database

    def is_unreachable(self, name: str) -> bool:
        """Whether the last call to it failed."""
        return name in self._away

    async def close(self) -> None:
        openings, self._opening = self._opening, {}
        for opening in openings.values():
            opening.cancel()
        for opened in await asyncio.gather(*openings.values(), return_exceptions=True):
            if not isinstance(opened, BaseException):
                await opened.close()

    async def _open(self, name: str) -> TenantDatabase:
        database = self._open_database(self._urls[name])
        try:
            await database.open()
        except BaseException as error:
            self._opening.pop(name, None)
            if isinstance(error, ComfyFleetError):
                self.mark_unreachable(name, error)
            await database.close()
            raise
        self._away.pop(name, None)
        watched = cast(TenantDatabase, _Watched(database, name, self))
        return watched if self._around is None else self._around(watched)

    def _check_reachable(self, name: str) -> None:
        fault, again_at = self._away.get(name, (None, float("-inf")))
        if fault is None:
            return
        if self._clock.monotonic() < again_at:
            raise Fault(str(fault)) from fault
        # This call tries again; calls during the next second do not wait for it.
        self.mark_unreachable(name, fault)

    def mark_unreachable(self, name: str, error: ComfyFleetError) -> None:
        self._away[name] = (error, self._clock.monotonic() + _RETRY_S)

    async def watched(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        self._check_reachable(name)
        try:
            answer = await _answered(name, work())
        except AccountFrozen:
            # One tenant is frozen; the database is reachable.
            self._away.pop(name, None)
            raise
        except Fault as fault:
            self.mark_unreachable(name, fault)
            raise
        self._away.pop(name, None)
        return answer


class _Watched:
    """Passes calls on to a database, or to a tenant's documents in it, and notes their faults."""

    def __init__(self, database: TenantDatabase | DocumentStore, name: str, all_: TenantDatabases) -> None:
        self._database = database
        self._name = name
        self._all = all_

    def documents(self, tenant: TenantId) -> DocumentStore:
        documents = cast(TenantDatabase, self._database).documents(tenant)
        return cast(DocumentStore, _Watched(documents, self._name, self._all))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._database, name)
        if not asyncio.iscoroutinefunction(method) or name == "close":
            return method

        @wraps(method)
        async def watched(*args: Any, **named: Any) -> Any:
            return await self._all.watched(self._name, lambda: method(*args, **named))

        # Python finds it directly from now on.
        self.__dict__[name] = watched
        return watched


async def _answered(name: str, work: Coroutine[Any, Any, Any]) -> Any:
    """Runs in its own task: a driver may keep waiting for its server after it was cancelled."""
    asking = asyncio.create_task(work)
    try:
        await asyncio.wait((asking,), timeout=ANSWER_S)
    except BaseException:
        _give_up(asking)
        raise
    if not asking.done():
        _give_up(asking)
        raise Fault(
            f"the tenant database {name!r} did not answer within {ANSWER_S:g} s, and it is unknown whether the call "
            "took effect; check whether it is stopped or overloaded"
        )
    return asking.result()


def _give_up(asking: asyncio.Task[Any]) -> None:
    asking.cancel()
    # Retrieve its exception, or asyncio logs it.
    asking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
