"""Whether the process lives, whether it serves, and what it speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from comfyfleet.hub.door import Call, Handler, Reply
from comfyfleet.ports import Store
from comfyfleet.wire.answers import HealthBody
from comfyfleet.wire.openapi import document
from comfyfleet.wire.route import Route

_STORE_ANSWERS_WITHIN_S = 2.0


class HealthHandlers:
    def __init__(self, store: Store, routes: tuple[Route, ...], is_stopping: Callable[[], bool]) -> None:
        self._store = store
        self._is_stopping = is_stopping
        self._version = version_here()
        self._document = document(routes, self._version)

    def bound(self) -> dict[str, Handler]:
        return {"health": self.ready, "live": self.live, "openapi": self.openapi}

    async def live(self, call: Call[None]) -> Reply:
        return Reply(200, HealthBody("ok", self._version))

    async def ready(self, call: Call[None]) -> Reply:
        """Ready means that a job can be taken and kept: the store answers."""
        if self._is_stopping():
            return Reply(503, HealthBody("stopping", self._version), {"retry-after": "1"})
        try:
            async with asyncio.timeout(_STORE_ANSWERS_WITHIN_S):
                await self._store.now()
        except Exception as error:
            detail = f"the store does not answer: {type(error).__name__}"
            return Reply(503, HealthBody("failing", self._version, detail), {"retry-after": "1"})
        return Reply(200, HealthBody("ok", self._version))

    async def openapi(self, call: Call[None]) -> Reply:
        return Reply(200, self._document)


def version_here() -> str:
    try:
        return version("comfyfleet")
    except PackageNotFoundError:
        return "0"
