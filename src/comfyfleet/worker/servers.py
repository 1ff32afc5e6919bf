"""The servers behind an agent: whether each is up, what it has, and when to check it again.

It opens connectors and remembers their health and inventory. `agent.py` decides what follows.
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
    """A connector that notices a lost or restored connection. The agent then checks the server at once."""

    on_connection: Callable[[bool], None] | None


@runtime_checkable
class HasClientId(Protocol):
    """A connector whose server sends a run's events to the client that started it. Read when it is opened."""

    client_id: str | None


@runtime_checkable
class HasUrl(Protocol):
    """A connector whose server has an address. The address contains no credentials."""

    @property
    def url(self) -> str: ...


@runtime_checkable
class ReportsDefect(Protocol):
    """A connector that may know why its server is unusable. The hub gets this text: it has no address."""

    @property
    def defect(self) -> str | None: ...


@runtime_checkable
class FindsByName(Protocol):
    """A connector that looks up node classes and models by name, which is cheaper than an inventory."""

    async def find(self, names: frozenset[str]) -> frozenset[str]: ...


@runtime_checkable
class ContinuesEarlierLeases(Protocol):
    """A connector whose runs are paid. A run whose lease is over is not stopped: the next lease continues with it."""

    continues_earlier_leases: bool


def leaves_runs(connector: Connector) -> bool:
    return isinstance(connector, ContinuesEarlierLeases) and connector.continues_earlier_leases


class MonitoredServer:
    def __init__(
        self, connector: Connector, settings: AgentSettings, on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self.connector = connector
        self.inventory: Inventory | None = None
        self.is_up = False
        self.usable_at = 0.0
        """The end of the grace period after the server came back."""
        self.missed = 0
        self.needs_inventory = False
        """The inventory may have changed."""
        self.defect: str | None = None
        """A fault of the server itself, found by a run or a health check."""
        self.reason = "not checked yet"
        self._settings = settings
        self._on_lost = on_lost
        self._looked_at = float("-inf")
        self._missing: frozenset[str] = frozenset()
        self._missing_pause_s = 0.0
        self._wanted: frozenset[str] = frozenset()
        self._found: frozenset[str] = frozenset()
        """Those of `_wanted` that were found and have already caused a look."""
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
    def inventory_due_at(self) -> float:
        if self.needs_inventory:
            return float("-inf")
        pause_s = self._settings.inventory_interval_s
        is_wanted = bool(self._wanted) and not isinstance(self.connector, FindsByName)
        return self._looked_at + (
            min(pause_s, self._missing_pause_s) if self._missing or is_wanted else pause_s
        )

    def add_missing(self, names: Sequence[str]) -> None:
        """A run lacked these. The agent looks for them at once, and then more often than usual."""
        self.needs_inventory = True
        self._missing |= {_plain(name) for name in names}
        self._missing_pause_s = self._settings.missing_interval_s

    def set_wanted(self, names: Sequence[str]) -> bool:
        """Replaces the names that jobs wait for. True: some of them are new."""
        wanted = frozenset(map(_plain, names))
        new = wanted - self._wanted
        self._wanted, self._found = wanted, self._found & wanted
        if not new:
            return False
        if isinstance(self.connector, FindsByName):
            self._sought_at = float("-inf")
        else:
            # Another service may be the one that lacks them: look at once, then less and less often.
            self.needs_inventory = True
            self._missing_pause_s = self._settings.missing_interval_s
        return True

    @property
    def find_due_at(self) -> float:
        if self._wanted == self._found or not isinstance(self.connector, FindsByName):
            return float("inf")
        return self._sought_at + self._settings.seek_interval_s

    async def find_wanted(self) -> None:
        """Looks up the wanted names. A find makes one look due."""
        assert isinstance(self.connector, FindsByName), "this connector cannot look up names"
        self._sought_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._settings.inventory_timeout_s):
                found = await self.connector.find(self._wanted - self._found)
        except Exception as error:
            _log.info("%s: cannot look up missing models and nodes: %s", self.name, _text(error))
            return
        if found:
            self._found |= found
            self.needs_inventory = True

    async def check(self) -> None:
        if await self._answers():
            # A server that was away for a moment may have restarted.
            self.needs_inventory = self.needs_inventory or self.missed > 0
            self.missed = 0
            if not self.is_up:
                self.is_up = True
                grace_s = self._settings.reconnect_grace_s if self._was_lost else 0.0
                self.usable_at = asyncio.get_running_loop().time() + grace_s
        else:
            self.record_missed_check()

    def record_missed_check(self) -> None:
        """The only place where a server goes down, so `on_lost` is called before anything else runs."""
        self.missed += 1
        if self.is_up and self.missed < self._settings.missed_checks:
            return
        # A server that was never up is not lost, but it gets the same grace period when it comes up.
        is_lost, self.is_up, self._was_lost = self.is_up, False, True
        if is_lost:
            self._on_lost()

    async def read_inventory(self) -> bool:
        """Reads the inventory. False: that failed, and the older one stays."""
        self._looked_at = asyncio.get_running_loop().time()
        # Cleared before the look: a request that arrives meanwhile needs another look.
        was_wanted, self.needs_inventory = self.needs_inventory, False
        try:
            async with asyncio.timeout(self._settings.inventory_timeout_s):
                self.inventory = await self.connector.inventory()
            self._look_for_missing(self.inventory, is_first=was_wanted)
            return True
        except Exception as error:
            self.needs_inventory = self.needs_inventory or was_wanted
            self.reason = f"{self._where}: cannot read its inventory: {_text(error)}"
            _log.warning("%s", self.reason)
            return False

    def _look_for_missing(self, inventory: Inventory, *, is_first: bool) -> None:
        """Drops the names that are listed now; the pauses for the others grow."""
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
            _log.warning("%s: closing the connector failed: %r", self.name, error)

    async def _answers(self) -> bool:
        try:
            if not self._is_open:
                # Also after a failed `open` there may be something to close.
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
            if isinstance(error, TimeoutError) and not str(error):
                self.reason = (
                    f"{self._where} does not answer in time. Is the address right, or is the machine busy?"
                )
            else:
                self.reason = f"{self._where} does not answer ({_text(error)})"
            return False
        if is_healthy:
            self.defect = None
        else:
            found = self.connector.defect if isinstance(self.connector, ReportsDefect) else None
            self.defect = found or self.defect
            self.reason = f"{self._where}: {self.defect or 'it does not answer its health check'}"
        return is_healthy


async def check_all(servers: Sequence[MonitoredServer]) -> None:
    async with asyncio.TaskGroup() as group:
        for server in servers:
            group.create_task(server.check())


def _plain(name: str) -> str:
    return name.replace("\\", "/")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
