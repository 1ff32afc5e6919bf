"""Whether the process lives, whether it serves, and what it speaks.

It serves if its store can be written, and that is tried: a disk that is full still answers whoever only reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version

from comfyfleet.hub.http.pipeline import Handler, HubRequest, Reply
from comfyfleet.model.errors import Fault
from comfyfleet.ports import Clock, DocumentStore, Store
from comfyfleet.wire.answers import HealthBody
from comfyfleet.wire.openapi import document
from comfyfleet.wire.route import Route

_LOG = logging.getLogger(__name__)

_STORE_ANSWERS_WITHIN_S = 2.0
_TRIED_EVERY_S = 5.0
_FAILED_EVERY_S = 1.0
"""So often at most is it written, however many ask."""

COLLECTION = "health"
_NAME = "tried"
_ROOM = "~room"
_ROOM_BYTES = 60 * 1024


class HealthHandlers:
    def __init__(
        self,
        store: Store,
        documents: DocumentStore,
        clock: Clock,
        routes: tuple[Route, ...],
        is_stopping: Callable[[], bool],
    ) -> None:
        self._store = store
        self._documents = documents
        self._clock = clock
        self._turn = asyncio.Lock()
        self._next_try_at = self._tried_at = float("-inf")
        self._wrong = ""
        self._is_stopping = is_stopping
        self._version = version_here()
        self._document = document(routes, self._version)

    def bound(self) -> dict[str, Handler]:
        return {"health": self.ready, "live": self.live, "openapi": self.openapi}

    async def live(self, call: HubRequest[None]) -> Reply:
        return Reply(200, HealthBody("ok", self._version))

    async def ready(self, call: HubRequest[None]) -> Reply:
        """Ready means that a job can be taken and kept."""
        if self._is_stopping():
            return Reply(503, HealthBody("stopping", self._version), {"retry-after": "1"})
        wrong = await self._told(self._store.now()) or await self._tried()
        if wrong:
            return Reply(503, HealthBody("failing", self._version, wrong), {"retry-after": "1"})
        return Reply(200, HealthBody("ok", self._version))

    async def _tried(self) -> str:
        """What is wrong with the store; empty if it was written a moment ago."""
        async with self._turn:
            now = self._clock.now()
            # A clock that was set back must not keep an old answer alive.
            if not 0 <= self._next_try_at - now <= _TRIED_EVERY_S:
                self._wrong = await self._told(self._write(b"%.0f" % now))
                self._tried_at = self._clock.now()
                self._next_try_at = self._clock.now() + (_FAILED_EVERY_S if self._wrong else _TRIED_EVERY_S)
            return self._wrong

    async def _write(self, body: bytes) -> None:
        """A few bytes, and as much as a job takes: a store that may not grow still changes what it has."""
        await self._documents.put(COLLECTION, _NAME, body, version=None)
        await self._documents.put(COLLECTION, _ROOM, bytes(_ROOM_BYTES), version=None)
        await self._documents.remove(COLLECTION, _ROOM)

    def suspect(self) -> None:
        """Somebody met a fault: what was found before counts for a second more."""
        self._next_try_at = min(self._next_try_at, self._tried_at + _FAILED_EVERY_S)

    async def _told(self, asked: Awaitable[object]) -> str:
        """What the store says to it; empty: it was done."""
        try:
            async with asyncio.timeout(_STORE_ANSWERS_WITHIN_S):
                await asked
        except Fault as fault:
            return str(fault)
        except TimeoutError:
            return f"the store does not answer within {_STORE_ANSWERS_WITHIN_S:.0f} s"
        except Exception as error:
            _LOG.exception("the store cannot be asked")
            return f"the store cannot be asked: {type(error).__name__}"
        return ""

    async def openapi(self, call: HubRequest[None]) -> Reply:
        return Reply(200, self._document)


def version_here() -> str:
    try:
        return version("comfyfleet")
    except PackageNotFoundError:
        return "0"
