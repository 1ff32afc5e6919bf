"""The servers behind an agent: are they there, since when, what do they have, and when to look again?

Each connector is opened, asked for its health and its inventory, and remembered as up, in its grace, or down. What
follows (register, poll, go offline) is the agent's decision; it is told the moment a server is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from comfyfleet.ports import Connector, Inventory
from comfyfleet.worker.settings import AgentSettings

_log = logging.getLogger(__name__)


@runtime_checkable
class ReportsConnection(Protocol):
    """A connector that notices by itself when its server is lost or back may say so; a check follows at once."""

    on_connection: Callable[[bool], None] | None


@runtime_checkable
class HasClientId(Protocol):
    """A connector whose server tells of a run to the one who began it, known by this. Read when it is opened."""

    client_id: str | None


@runtime_checkable
class HasUrl(Protocol):
    """A connector whose server has an address; there are no credentials in it."""

    @property
    def url(self) -> str: ...


@runtime_checkable
class ReportsDefect(Protocol):
    """A connector that may know why its server is of no use. Hubs are told of it, so no address stands in it."""

    @property
    def defect(self) -> str | None: ...


@runtime_checkable
class FindsByName(Protocol):
    """A connector whose server can be asked for node classes and models by name, at less cost than for all it has."""

    async def find(self, names: frozenset[str]) -> frozenset[str]:
        """Those of the names that it has."""


class MonitoredServer:
    """One connector and what is known of the server behind it."""

    def __init__(
        self, connector: Connector, settings: AgentSettings, on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self.connector = connector
        self.inventory: Inventory | None = None
        self.is_up = False
        self.usable_at = 0.0
        """The end of its grace after it came back."""
        self.missed = 0
        self.wants_look = False
        """Its inventory may have changed."""
        self.defect: str | None = None
        """What a run found wrong with the server itself. It is why, should the server now be called unhealthy."""
        self.reason = "not asked yet"
        self._settings = settings
        self._on_lost = on_lost
        self._looked_at = float("-inf")
        self._missing: frozenset[str] = frozenset()
        self._missing_pause_s = 0.0
        self._wanted: frozenset[str] = frozenset()
        self._found: frozenset[str] = frozenset()
        """Of those that are wanted: what was found, so that a look was due for it."""
        self._sought_at = float("-inf")
        self._is_open = False
        self._was_lost = False

    @property
    def name(self) -> str:
        return self.connector.service_name

    @property
    def _where(self) -> str:
        return f"{self.name} at {self.connector.url}" if isinstance(self.connector, HasUrl) else self.name

    def is_usable(self, now: float) -> bool:
        return self.is_up and now >= self.usable_at

    @property
    def look_due_at(self) -> float:
        if self.wants_look:
            return float("-inf")
        pause_s = self._settings.inventory_interval_s
        is_wanted = bool(self._wanted) and not isinstance(self.connector, FindsByName)
        return self._looked_at + (
            min(pause_s, self._missing_pause_s) if self._missing or is_wanted else pause_s
        )

    def lacks(self, names: Sequence[str]) -> None:
        """A run failed for want of these: they are looked for at once, and then more often than usual."""
        self.wants_look = True
        self._missing |= {_plain(name) for name in names}
        self._missing_pause_s = self._settings.missing_interval_s

    def look_for(self, names: Sequence[str]) -> bool:
        """Jobs wait for these, and for no others. True: there are new ones among them."""
        wanted = frozenset(map(_plain, names))
        new = wanted - self._wanted
        self._wanted, self._found = wanted, self._found & wanted
        if not new:
            return False
        if isinstance(self.connector, FindsByName):
            self._sought_at = float("-inf")
        else:
            # It may be another service that lacks them: at once, and then less and less often.
            self.wants_look = True
            self._missing_pause_s = self._settings.missing_interval_s
        return True

    @property
    def seek_due_at(self) -> float:
        if self._wanted == self._found or not isinstance(self.connector, FindsByName):
            return float("inf")
        return self._sought_at + self._settings.seek_interval_s

    async def seek(self) -> None:
        """Asks for what is wanted. Where something is found a look is due, once."""
        assert isinstance(self.connector, FindsByName), "no other one is asked by name"
        self._sought_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._settings.inventory_timeout_s):
                found = await self.connector.find(self._wanted - self._found)
        except Exception as error:
            _log.info("%s: it could not be asked what it has by now (%s)", self.name, _text(error))
            return
        if found:
            self._found |= found
            self.wants_look = True

    async def check(self) -> None:
        """Asks the server whether it is there."""
        if await self._answers():
            # Away for a moment, it may have been started anew.
            self.wants_look = self.wants_look or self.missed > 0
            self.missed = 0
            if not self.is_up:
                self.is_up = True
                grace_s = self._settings.reconnect_grace_s if self._was_lost else 0.0
                self.usable_at = asyncio.get_running_loop().time() + grace_s
        else:
            self.miss()

    def miss(self) -> None:
        """The only place where a server falls: whoever must stop using it hears of it before anything else runs."""
        self.missed += 1
        if self.is_up and self.missed < self._settings.missed_checks:
            return
        # One that is away from the start is not lost, but it gets its grace like any that comes back.
        is_lost, self.is_up, self._was_lost = self.is_up, False, True
        if is_lost:
            self._on_lost()

    async def look(self) -> bool:
        """Reads the inventory. False: it could not be read; an older one is kept."""
        self._looked_at = asyncio.get_running_loop().time()
        # Taken down before the look: a wish that comes up meanwhile is for another one.
        was_wanted, self.wants_look = self.wants_look, False
        try:
            async with asyncio.timeout(self._settings.inventory_timeout_s):
                self.inventory = await self.connector.inventory()
            self._look_for_missing(self.inventory, is_first=was_wanted)
            return True
        except Exception as error:
            self.wants_look = self.wants_look or was_wanted
            self.reason = f"{self._where}: its inventory could not be read ({_text(error)})"
            _log.warning("%s", self.reason)
            return False

    def _look_for_missing(self, inventory: Inventory, *, is_first: bool) -> None:
        """What is listed is no longer looked for; for the rest the pauses grow."""
        listed: set[str] = set()
        for service in inventory.capabilities.services:
            listed |= {_plain(name) for name in service.models or ()} | (service.node_classes or frozenset())
        self._missing -= listed
        if not is_first:
            self._missing_pause_s *= 2

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            await self.connector.close()
        except Exception as error:
            _log.warning("%s could not be closed: %r", self.name, error)

    async def _answers(self) -> bool:
        try:
            if not self._is_open:
                # Opened or not, what it holds by then must be closed.
                self._is_open = True
                try:
                    async with asyncio.timeout(self._settings.open_timeout_s):
                        await self.connector.open()
                except BaseException:
                    await self.close()
                    raise
            async with asyncio.timeout(self._settings.health_timeout_s):
                is_healthy = await self.connector.check_health()
        except Exception as error:
            self.defect = None
            self.reason = f"{self._where} does not answer ({_text(error)})"
            return False
        if is_healthy:
            self.defect = None
        else:
            told = self.connector.defect if isinstance(self.connector, ReportsDefect) else None
            self.defect = told or self.defect
            self.reason = f"{self._where}: {self.defect or 'it does not answer its health check'}"
        return is_healthy


async def check_all(servers: Sequence[MonitoredServer]) -> None:
    if len(servers) == 1:
        await servers[0].check()
        return
    async with asyncio.TaskGroup() as group:
        for server in servers:
            group.create_task(server.check())


def _plain(name: str) -> str:
    return name.replace("\\", "/")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
