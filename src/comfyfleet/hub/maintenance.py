"""Deletes old records of every kind once a minute.

Each cleanup takes a bounded step, and several hubs may run it at once. The engine maintains the queue itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from comfyfleet.tracing import BackgroundJob, log_failure

_LOG = logging.getLogger(__name__)

EVERY_S = 60.0


class HubMaintenance(BackgroundJob):
    def __init__(
        self, cleanups: Mapping[str, Callable[[], Awaitable[None]]], every_s: float = EVERY_S
    ) -> None:
        """`cleanups` by the name of what they delete."""
        super().__init__("maintenance")
        self._cleanups = dict(cleanups)
        self._every_s = every_s

    async def clean_up(self) -> None:
        """Runs every cleanup once. A failure of one does not stop the others."""
        for what, cleanup in self._cleanups.items():
            try:
                await cleanup()
            except Exception:
                log_failure(_LOG, "cannot delete old %s; will try again", what)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.clean_up()
