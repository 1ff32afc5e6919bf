"""Health routes.

A hub is ready if it can write to its store. It tries: a store on a full disk still answers reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version

from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.model.errors import Fault
from comfyfleet.ports import Clock, DocumentStore, QueueReader
from comfyfleet.wire.answers import HealthBody

_LOG = logging.getLogger(__name__)

_STORE_ANSWERS_WITHIN_S = 2.0
_TRIED_EVERY_S = 5.0
_FAILED_EVERY_S = 1.0
"""Shortest time between two test writes after a success and after a failure."""

COLLECTION = "health"
_NAME = "tried"
_SPACE = "~room"
_SPACE_BYTES = 60 * 1024


class HealthHandlers:
    def __init__(
        self,
        reader: QueueReader,
        documents: DocumentStore,
        clock: Clock,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._reader = reader
        self._documents = documents
        self._clock = clock
        self._lock = asyncio.Lock()
        self._next_try_at = self._tried_at = float("-inf")
        self._problem = ""
        self._is_stopping = is_stopping
        self._version = version_here()

    async def live(self, call: HubRequest[None]) -> Reply:
        return Reply(200, HealthBody("ok", self._version))

    async def health(self, call: HubRequest[None]) -> Reply:
        """Ready means that the hub can accept and store a job."""
        if self._is_stopping():
            return Reply(503, HealthBody("stopping", self._version), {"retry-after": "1"})
        problem = await self._attempt(self._reader.now()) or await self._check_writable()
        if problem:
            return Reply(503, HealthBody("failing", self._version, problem), {"retry-after": "1"})
        return Reply(200, HealthBody("ok", self._version))

    async def _check_writable(self) -> str:
        """The problem with the store, or "" after a successful test write."""
        async with self._lock:
            now = self._clock.now()
            # If the clock was set back, the last result is too old.
            if not 0 <= self._next_try_at - now <= _TRIED_EVERY_S:
                self._problem = await self._attempt(self._write(b"%.0f" % now))
                self._tried_at = self._clock.now()
                self._next_try_at = self._clock.now() + (_FAILED_EVERY_S if self._problem else _TRIED_EVERY_S)
            return self._problem

    async def _write(self, body: bytes) -> None:
        """Writes a few bytes, then as many as a job takes: a full store may still overwrite old data."""
        await self._documents.put(COLLECTION, _NAME, body, version=None)
        await self._documents.put(COLLECTION, _SPACE, bytes(_SPACE_BYTES), version=None)
        await self._documents.remove(COLLECTION, _SPACE)

    def suspect(self) -> None:
        """A request met a fault: test the store again within a second."""
        self._next_try_at = min(self._next_try_at, self._tried_at + _FAILED_EVERY_S)

    async def _attempt(self, call: Awaitable[object]) -> str:
        """The error of the call, or "" if it succeeded."""
        try:
            async with asyncio.timeout(_STORE_ANSWERS_WITHIN_S):
                await call
        except Fault as fault:
            return str(fault)
        except TimeoutError:
            return f"the store does not answer within {_STORE_ANSWERS_WITHIN_S:.0f} s"
        except Exception as error:
            _LOG.exception("the store cannot be reached")
            return f"the store cannot be reached: {type(error).__name__}"
        return ""


def version_here() -> str:
    try:
        return version("comfyfleet")
    except PackageNotFoundError:
        return "0"
