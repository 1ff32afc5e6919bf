"""What a hub does once a minute, whether anybody asks it something or not: old records of every kind are forgotten.

Each duty takes a bounded step and may be done by several hubs at once. Those of the queue are the engine's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from comfyfleet.model.errors import ComfyFleetError
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

EVERY_S = 60.0


class HubMaintenance:
    def __init__(
        self, tenant_maintenance: Mapping[str, Callable[[], Awaitable[None]]], every_s: float = EVERY_S
    ) -> None:
        """`tenant_maintenance` by what they see to."""
        self._duties = dict(tenant_maintenance)
        self._every_s = every_s
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._running is None:
            self._running = in_background(self._run(), name="maintenance")

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def tidy(self) -> None:
        """Every duty once. Whatever is wrong with one, the others are done."""
        for what, duty in self._duties.items():
            try:
                await duty()
            except ComfyFleetError as error:
                _LOG.warning("old %s could not be forgotten; it is tried again: %s", what, error)
            except Exception:
                log_failure(_LOG, "old %s could not be forgotten; it is tried again", what)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.tidy()
