"""Reviews waiting jobs.

`WaitingJobReview` applies changed terms and fails jobs that no worker can run. `UnrunnableJobs` lists and counts
those jobs. `MissingRequirements` tells agents with each heartbeat what waiting jobs need and their servers lack.
`NeedReview` narrows needs when more is known about the servers' nodes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from comfyfleet.engine.commands import CommandQueue
from comfyfleet.engine.context import EngineContext, best_effort, stop
from comfyfleet.engine.failure_handler import FailureHandler
from comfyfleet.engine.matcher import Matcher
from comfyfleet.engine.node_catalogs import NodeCatalogs
from comfyfleet.engine.placement import closest_worker, narrowed
from comfyfleet.model.dispatch import AtRevision, Change, Dispatch, Phase, Write
from comfyfleet.model.errors import Refusal
from comfyfleet.model.fact import FactKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import ClassKey, JobId, ProfileKey, WorkerId
from comfyfleet.model.job import Job
from comfyfleet.model.payload import COMFYUI
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.tenant import Tenant
from comfyfleet.model.workflow import read_needs
from comfyfleet.policy.feasibility import names_missing
from comfyfleet.policy.terms import check_within_terms, class_under_terms, under_new_terms
from comfyfleet.policy.timers import fails_at, failure_of
from comfyfleet.ports import RecordQuery, Timer
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)


class WaitingJobReview:
    def __init__(self, context: EngineContext, matcher: Matcher, failures: FailureHandler) -> None:
        self._context = context
        self._matcher = matcher
        self._failures = failures

    async def reapply_terms(self, job_id: JobId, tenant: Tenant) -> None:
        """Applies the tenant's present terms to a waiting job, or fails it if it breaks them. A running job
        goes on; if it returns, the present terms limit its priority."""
        while True:
            dispatch = await self._context.store.load(job_id)
            if dispatch is None or dispatch.phase.is_final:
                return
            job = await self._context.store.records.get(job_id)
            if job is None or job.unreadable is not None or await self._is_applied(dispatch, job, tenant):
                return

    async def _is_applied(self, dispatch: Dispatch, job: Job, tenant: Tenant) -> bool:
        """False: somebody else wrote the job meanwhile."""
        context = self._context
        if dispatch.phase is Phase.QUEUED:
            reading = await context.payloads.of_stored(job.payload, dispatch.payload_bytes)
            try:
                check_within_terms(job.payload, tenant, reading)
            except Refusal as refusal:
                why = f"the terms of tenant {tenant.tenant_id!r} changed after the submission: {refusal.message}"
                failure = Failure(FailureKind.INVALID_WORKFLOW, why)
                return await self._failures.end_job(dispatch, failure) is not None
        now = await context.store.now()
        change = under_new_terms(dispatch, job, tenant, now, context.rules)
        if dispatch.phase is Phase.QUEUED:
            for name in ("class_key", "relaxed_class"):
                key = getattr(dispatch, name)
                cls = None if key is None else await context.fleet.find_class(key)
                if cls is not None and (again := class_under_terms(cls, job.payload, tenant)) != cls:
                    key = await context.fleet.ensure_class(again)
                    change = msgspec.structs.replace(change, **{name: key})
        if change.apply(dispatch) == msgspec.structs.replace(dispatch, revision=dispatch.revision + 1):
            return True
        written = await context.write(Write(dispatch.job_id, AtRevision(dispatch.revision), change))
        if written is not None:
            self._matcher.job_arrived(written.dispatch)
        return written is not None

    async def unrunnable_classes(self) -> Mapping[ClassKey, RequirementClass]:
        """The classes that no worker, present or expected back, may take."""
        fleet = self._context.fleet
        if self._context.store.is_shared:
            await fleet.sync()
        table = await self._context.store.table()
        profiles = {worker.profile for worker in fleet.workers.values() if not fleet.is_held_back(worker)}
        return {
            key: cls
            for key, cls in table.classes.items()
            # This engine knows nothing about a new class yet.
            if key in fleet.classes and profiles.isdisjoint(fleet.profiles_for(key))
        }

    async def fail_unrunnable(self, dispatch: Dispatch, since: float, after_s: float) -> bool:
        """Fails the job if its class was unrunnable for `after_s`. False: it waits on."""
        now = await self._context.store.now()
        at = fails_at(dispatch, since, after_s)
        if at is None or at > now:
            return False
        if dispatch.round > 1:
            # The time of an earlier round does not count, although a retry by hand keeps the place in the queue.
            facts = await self._context.store.facts(dispatch.job_id)
            begun = [
                fact.at for fact in facts if fact.kind is FactKind.QUEUED and fact.round == dispatch.round
            ]
            at = fails_at(dispatch, max([since, *begun]), after_s)
            if at is None or at > now:
                return False
        failure = failure_of(after_s, self._lacking(dispatch))
        return await self._failures.end_job(dispatch, failure) is not None

    def _lacking(self, dispatch: Dispatch) -> str | None:
        """What the nearest known worker lacks."""
        fleet, cls = self._context.fleet, self._context.fleet.classes.get(dispatch.class_key)
        if cls is None:
            return None
        nearest = closest_worker(self._context, cls, dispatch.tenant, fleet.workers.values())
        return None if nearest is None else f"{nearest[0]} " + "; ".join(nearest[1])


MAX_COUNTED = 2_000
"""The oldest waiting jobs that are read, each with its payload."""
_PAGE = 100
_REMEMBER_S = 30.0


class UnrunnableJobs:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._counted: tuple[int, float] | None = None
        """The count, and its time."""

    def is_unrunnable(self, dispatch: Dispatch) -> bool:
        """Whether no online worker can run the job. Blocks end by themselves and do not count."""
        if dispatch.phase is not Phase.QUEUED or dispatch.awaits_jobs:
            return False
        fleet = self._context.fleet
        keys = [key for key in (dispatch.class_key, dispatch.relaxed_class) if key is not None]
        # This engine knows nothing about a new class yet.
        return all(key in fleet.classes and not fleet.selectivity(key) for key in keys)

    async def unrunnable_of(self, jobs: Sequence[Job]) -> set[JobId]:
        context = self._context
        if context.store.is_shared:
            await context.fleet.refresh(context.rules.round_s)
        found = await context.store.load_many([job.job_id for job in jobs])
        return {each.job_id for each in found if each is not None and self.is_unrunnable(each)}

    async def count(self) -> int:
        """The unrunnable ones among the `MAX_COUNTED` oldest waiting jobs, cached for a while."""
        now = self._context.clock.monotonic()
        if self._counted is None or now >= self._counted[1] + _REMEMBER_S:
            self._counted = (await self._count(), now)
        return self._counted[0]

    async def _count(self) -> int:
        return len([job_id async for job_id in self.job_ids()])

    async def job_ids(self) -> AsyncIterator[JobId]:
        """The unrunnable jobs among the `MAX_COUNTED` oldest waiting jobs, the oldest first."""
        fleet = self._context.fleet
        if all(fleet.selectivity(key) for key in fleet.classes):
            return
        after = None
        for _ in range(MAX_COUNTED // _PAGE):
            page = await self._context.store.records.listing(
                RecordQuery(phase=Phase.QUEUED, limit=_PAGE, after=after)
            )
            for job_id in await self.unrunnable_of(page):
                yield job_id
            if len(page) < _PAGE:
                return
            after = page[-1].job_id


_FRESH_S = 2.0
_MAX_CLASSES = 100
_MAX_NAMES = 50
_MAX_NAME = 300
"""No file or class name is longer, but texts in a graph may be."""
_MAX_CALLED = 100
"""The other workers learn it with their next heartbeat."""
_CALL_EVERY_S = 2.0


class MissingRequirements:
    def __init__(self, context: EngineContext, commands: CommandQueue) -> None:
        self._context = context
        self._commands = commands
        self._read_at = float("-inf")
        self._classes: list[RequirementClass] = []
        """Classes that no present worker can take while jobs wait."""
        self._known: dict[ProfileKey, tuple[str, ...]] = {}
        """What workers of a profile lack for these classes."""
        self._called_for: dict[ClassKey, None] = {}
        self._to_call: dict[WorkerId, None] = {}
        self._called_at = float("-inf")
        self._timer: Timer | None = None

    async def of(self, worker_id: WorkerId) -> tuple[str, ...]:
        worker = self._context.fleet.workers.get(worker_id)
        if worker is None or worker.is_offline:
            return ()
        await self._read()
        if not self._classes:
            return ()
        known = self._known.get(worker.profile)
        if known is None:
            names = (
                name
                for cls in self._classes
                for name in names_missing(cls, worker_id, worker.capabilities)
                if len(name) <= _MAX_NAME
            )
            known = self._known[worker.profile] = tuple(dict.fromkeys(names))[:_MAX_NAMES]
        return known

    def call(self, cls: RequirementClass) -> None:
        """Asks workers that lack only a few names for a heartbeat: nobody can take a job of this class."""
        self._read_at = float("-inf")
        fleet = self._context.fleet
        key = fleet.key_of(cls)
        if key in self._called_for:
            return
        if len(self._called_for) >= _MAX_CLASSES:
            self._called_for.clear()
        self._called_for[key] = None
        for worker in fleet.workers.values():
            if len(self._to_call) == _MAX_CALLED:
                break
            if not worker.is_offline and names_missing(cls, worker.worker_id, worker.capabilities):
                self._to_call[worker.worker_id] = None
        if self._timer is None and self._to_call:
            clock = self._context.clock
            wait_s = self._called_at + _CALL_EVERY_S - clock.monotonic()
            if wait_s <= 0:
                self._call_now()
            else:
                self._timer = clock.call_at(clock.now() + wait_s, self._call_now)

    def _call_now(self) -> None:
        """Rate-limited, because each called agent reads its servers."""
        self._timer, self._called_at = None, self._context.clock.monotonic()
        called, self._to_call = self._to_call, {}
        for worker_id in called:
            self._commands.call(worker_id)

    async def _read(self) -> None:
        now = self._context.clock.monotonic()
        if now < self._read_at + _FRESH_S:
            return
        self._read_at = now
        fleet = self._context.fleet
        there = {
            worker.profile
            for worker in fleet.workers.values()
            if not worker.is_offline and not fleet.is_held_back(worker)
        }
        # The newest classes are last.
        found = [cls for key, cls in fleet.classes.items() if fleet.profiles_for(key).isdisjoint(there)]
        is_waiting = bool(found) and (await self._context.store.counts()).waiting > 0
        self._classes = found[-_MAX_CLASSES:] if is_waiting else []
        self._known = {}


_TRIES = 3


class NeedReview:
    """Narrows the needs of waiting jobs when workers report which of their nodes are outputs.

    Until then every model in a graph counts as needed. Several engines may review a job at once: its revision
    guards each write."""

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
            async for job_id in self._unrunnable.job_ids():
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
            if job.payload.requirements.service != COMFYUI:
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
