"""The databases that tenants are assigned to, by the names an operator gave them. Each is opened when it is first asked
for; one that cannot be opened is asked again a little later, and nobody else waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from comfyfleet.model.errors import ComfyFleetError, Fault, Refusal, RefusalCode
from comfyfleet.ports import Clock
from comfyfleet.tenancy.database import TenantDatabase

DEFAULT_POOL = "default"
_AGAIN_S = 1.0


class Pools:
    """`open_database` makes one from its address; it is opened here."""

    def __init__(
        self, urls: Mapping[str, str], clock: Clock, open_database: Callable[[str], TenantDatabase]
    ) -> None:
        self._urls = dict(urls)
        self._clock = clock
        self._open_database = open_database
        self._opening: dict[str, asyncio.Task[TenantDatabase]] = {}
        self._failed: dict[str, tuple[ComfyFleetError, float]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._urls)

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
        fault, again_at = self._failed.get(name, (None, 0.0))
        if fault is not None and self._clock.now() < again_at:
            raise Fault(str(fault)) from fault
        opening = self._opening.get(name)
        if opening is None:
            opening = self._opening[name] = asyncio.create_task(self._open(name), name=f"pool {name}")
        return await asyncio.shield(opening)

    async def opened(self) -> list[tuple[str, TenantDatabase]]:
        """All that can be reached now."""
        found = []
        for name in self._urls:
            try:
                found.append((name, await self.get(name)))
            except Fault:
                continue
        return found

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
                self._failed[name] = (error, self._clock.now() + _AGAIN_S)
            await database.close()
            raise
        self._failed.pop(name, None)
        return database


async def _settled(openings: Iterable[asyncio.Task[TenantDatabase]]) -> list[TenantDatabase]:
    answers = await asyncio.gather(*openings, return_exceptions=True)
    return [each for each in answers if not isinstance(each, BaseException)]
