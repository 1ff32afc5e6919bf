"""Narrows the needs of waiting jobs when workers report which of their nodes are outputs.

Until then every model in a graph counts as needed. This module looks again at waiting jobs that no present
worker can run. Several engines may do so at once: the job's revision guards each write."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from comfyfleet.engine.context import EngineContext, best_effort, stop
from comfyfleet.engine.matcher import Matcher
from comfyfleet.engine.node_catalogs import NodeCatalogs
from comfyfleet.engine.placement import narrowed
from comfyfleet.engine.waiting_jobs import UnrunnableJobs
from comfyfleet.model.dispatch import AtRevision, Change, Dispatch, Write
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Job
from comfyfleet.model.workflow import read_needs
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)
_TRIES = 3


class NeedReview:
    def __init__(
        self, context: EngineContext, matcher: Matcher, catalogs: NodeCatalogs, unrunnable: UnrunnableJobs
    ) -> None:
        self._context = context
        self._matcher = matcher
        self._catalogs = catalogs
        self._unrunnable = unrunnable
        self._known: frozenset[str] = frozenset()
        """The node classes known at the last look."""
        self._running: asyncio.Task[None] | None = None
        self._is_called_again = False
        self._is_closed = False

    def wake(self) -> None:
        """A worker has registered or described its nodes."""
        if self._running is not None:
            self._is_called_again = True
        elif not self._is_closed:
            self._running = in_background(self._run(), name="needs of waiting jobs")

    async def close(self) -> None:
        self._is_closed = True
        await stop(self._running)

    async def _run(self) -> None:
        try:
            while True:
                self._is_called_again = False
                await self._look()
                if not self._is_called_again:
                    break
        except Exception:
            log_failure(_LOG, "could not review the needs of waiting jobs; the next registration tries again")
        finally:
            self._running = None

    async def _look(self) -> None:
        known = await self._catalogs.not_outputs()
        if known != self._known:
            async for job_id in self._unrunnable.oldest():
                with best_effort(f"review the needs of job {job_id}"):
                    await self._narrow(job_id)
            self._known = known

    async def _narrow(self, job_id: JobId) -> None:
        store = self._context.store
        for _ in range(_TRIES):
            dispatch = await store.load(job_id)
            if dispatch is None or not self._unrunnable.is_unrunnable(dispatch):
                return
            job = await store.records.get(job_id)
            # Without its tenant's database the graph is empty.
            if job is None or job.unreadable is not None or not job.payload.workflow or job.payload.variants:
                return
            classes = await self._classes(dispatch, job)
            if not classes:
                return
            write = Write(job_id, AtRevision(dispatch.revision), Change(**classes))
            if (written := await self._context.write(write)) is not None:
                self._matcher.job_arrived(written.dispatch)
                return

    async def _classes(self, dispatch: Dispatch, job: Job) -> dict[str, Any]:
        """The classes of the job that change."""
        fleet, graph = self._context.fleet, job.payload.workflow
        needs = await self._catalogs.needs_of(graph, read_needs(graph))
        found: dict[str, Any] = {}
        for name in ("class_key", "relaxed_class"):
            cls = fleet.classes.get(getattr(dispatch, name))
            if cls is not None and (less := narrowed(cls, job.payload, needs)) != cls:
                found[name] = await fleet.ensure_class(less)
        return found
