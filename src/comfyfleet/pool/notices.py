"""Warnings about servers that are offline and jobs that no server can take.

Each cause is logged once while it lasts, and published as an event. The engine explains why a job waits; this module
checks one job of each kind.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import Submitted
from comfyfleet.model.dispatch import Phase, Readiness
from comfyfleet.model.fact import FleetEvent
from comfyfleet.model.ids import JobId, WorkerId, WorkflowHash
from comfyfleet.model.requirement import Requirements
from comfyfleet.pool.records import offline_words
from comfyfleet.worker.settings import AgentState, AgentStatus, wait_within

_LOG = logging.getLogger(__name__)

_POLL_S = 2.0
"""How long a job waits before it is checked."""
_LOOK_AGAIN_S = 10.0
_MAX_WATCHED = 100
"""Kinds of jobs that are checked. Beyond that the oldest is dropped."""
_NUMBERS = re.compile(r"\d+(\.\d+)?")

Kind = tuple[WorkflowHash, Requirements]


class _Watched(msgspec.Struct):
    job_id: JobId
    public_id: str
    metadata: dict[str, Any]
    cause: str = ""


class Notices:
    def __init__(self, engine: Engine, on_event: Callable[[FleetEvent], None]) -> None:
        self._engine = engine
        self._publish = on_event
        self._watched: dict[Kind, _Watched] = {}
        self._logged: set[str] = set()
        """Logged causes for which a job still waits."""
        self._offline: dict[str, set[str]] = {}
        """By server: the causes logged since it was last online."""
        self._is_wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._look_on(), name="pool notices")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # servers

    def server_changed(self, client_id: str, state: AgentState) -> None:
        if state.status is AgentStatus.OFFLINE and state.reason:
            causes = self._offline.setdefault(client_id, set())
            if state.reason not in causes:
                causes.add(state.reason)
                _LOG.warning("server %s", offline_words(client_id, state.reason))
        elif state.status is AgentStatus.ONLINE and client_id in self._offline:
            del self._offline[client_id]
            _LOG.warning("server %s is online again", client_id)

    # jobs

    def enqueued(
        self, submitted: Submitted, public_id: str, needs: Requirements, metadata: Mapping[str, Any] | None
    ) -> None:
        """Check the last job of its kind, because earlier ones are leased first."""
        kind = (submitted.workflow_hash, needs)
        before = self._watched.pop(kind, None)
        cause = "" if before is None else before.cause
        self._watched[kind] = _Watched(submitted.job_id, public_id, dict(metadata or {}), cause)
        if len(self._watched) > _MAX_WATCHED:
            del self._watched[next(iter(self._watched))]
        self._is_wanted.set()

    async def _look_on(self) -> None:
        while True:
            if not self._watched:
                self._is_wanted.clear()
                await self._is_wanted.wait()
            self._is_wanted.clear()
            await asyncio.sleep(_POLL_S)
            for kind, watched in list(self._watched.items()):
                try:
                    await self._look(kind, watched)
                except Exception as error:
                    # A missing store is reported by the calls that need it.
                    _LOG.debug("job %s could not be checked: %r", watched.public_id, error)
            self._logged &= {watched.cause for watched in self._watched.values()}
            await wait_within(self._is_wanted, _LOOK_AGAIN_S)

    async def _look(self, kind: Kind, watched: _Watched) -> None:
        dispatch = await self._engine.reader.load(watched.job_id)
        if dispatch is None or dispatch.phase.is_final:
            if self._watched.get(kind) is watched:
                del self._watched[kind]
            return
        cause = ""
        if dispatch.phase is Phase.QUEUED and dispatch.standing is Readiness.IN_LANE:
            found = await self._engine.explain(watched.job_id)
            if not found.able and not found.able_others:
                cause = found.summary
        # The remaining time of a block does not make another cause.
        before, watched.cause = watched.cause, _NUMBERS.sub("#", cause)
        if not cause or watched.cause == before:
            return
        if watched.cause not in self._logged:
            self._logged.add(watched.cause)
            _LOG.warning("job %s waits: %s", watched.public_id, cause)
        data = {
            "job_id": watched.public_id,
            "workflow_hash": kind[0],
            "metadata": watched.metadata,
            "message": cause,
        }
        self._publish(FleetEvent("waiting", self._engine.now(), WorkerId(""), data))
