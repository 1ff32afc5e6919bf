"""The servers behind an agent: are they there, since when, and what do they have?

Each connector is opened, asked for its health and its inventory, and remembered as up, in its grace, or down. What
follows (register, poll, go offline) is the agent's decision.
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
class TellsConnection(Protocol):
    """A connector that notices by itself when its server is lost or back may say so; a check follows at once."""

    on_connection: Callable[[bool], None] | None


class Server:
    """One connector and what is known of the server behind it."""

    def __init__(self, connector: Connector, settings: AgentSettings) -> None:
        self.connector = connector
        self.inventory: Inventory | None = None
        self.is_up = False
        self.usable_at = 0.0
        """The end of its grace after it came back."""
        self.missed = 0
        self.wants_look = False
        """Its inventory may have changed."""
        self.reason = "not asked yet"
        self._settings = settings
        self._is_open = False
        self._was_lost = False

    @property
    def name(self) -> str:
        return self.connector.service_name

    def is_usable(self, now: float) -> bool:
        return self.is_up and now >= self.usable_at

    async def check(self) -> bool:
        """Asks the server whether it is there. Answers whether it was lost by this check."""
        if await self._answers():
            # Away for a moment, it may have been started anew.
            self.wants_look = self.wants_look or self.missed > 0
            self.missed = 0
            if not self.is_up:
                self.is_up = True
                grace_s = self._settings.reconnect_grace_s if self._was_lost else 0.0
                self.usable_at = asyncio.get_running_loop().time() + grace_s
            return False
        return self.miss()

    def miss(self) -> bool:
        self.missed += 1
        if self.is_up and self.missed < self._settings.missed_checks:
            return False
        # One that is away from the start is not lost, but it gets its grace like any that comes back.
        is_lost, self.is_up, self._was_lost = self.is_up, False, True
        return is_lost

    async def look(self) -> bool:
        """Reads the inventory. False: it could not be read; an older one is kept."""
        try:
            async with asyncio.timeout(self._settings.inventory_timeout_s):
                self.inventory = await self.connector.inventory()
            self.wants_look = False
            return True
        except Exception as error:
            self.reason = f"{self.name}: its inventory could not be read ({_text(error)})"
            _log.warning("%s", self.reason)
            return False

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
            self.reason = f"{self.name} does not answer ({_text(error)})"
            return False
        if not is_healthy:
            self.reason = f"{self.name} does not answer its health check"
        return is_healthy


async def check_all(servers: Sequence[Server]) -> int:
    """Answers how many were lost by this check."""
    if len(servers) == 1:
        return int(await servers[0].check())
    async with asyncio.TaskGroup() as group:
        checks = [group.create_task(server.check()) for server in servers]
    return sum(check.result() for check in checks)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
