"""Takes a submission into the queue: finds repeats, reads the graph, checks, announces, writes, publishes.

`policy/admission.py` decides what is allowed, `graph_reader.py` reads graphs, `placement.py` chooses the
class. Notes beside the queue come before the job, so that no job lacks them.

`QueueCapacity` counts how full the queue is. It asks an in-process store each time, and a shared one once a
second while the queue is less than half full."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from comfyfleet.engine.context import EngineContext, best_effort
from comfyfleet.engine.dependencies import Dependencies, waiting_for_jobs
from comfyfleet.engine.graph_reader import GraphReader, GraphReading
from comfyfleet.engine.input_files import InputFiles
from comfyfleet.engine.matcher import Matcher
from comfyfleet.engine.node_catalogs import EditorConverter, NodeCatalogs
from comfyfleet.engine.payload_reader import needs_of
from comfyfleet.engine.placement import Placement, closest_worker, initial_class, needed_class
from comfyfleet.engine.waiting_jobs import MissingRequirements
from comfyfleet.model.calls import Submitted
from comfyfleet.model.dispatch import Dispatch, Phase, Readiness, WriteResult
from comfyfleet.model.editor_conversion import WorkflowVariant, common_to, is_editor_workflow, with_nodes
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import TenantId, WorkflowHash
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.payload import COMFYUI, PayloadReading
from comfyfleet.model.payload_digest import job_sha256
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.tenant import Tenant
from comfyfleet.model.workflow_graph import Workflow, check_workflow
from comfyfleet.model.workflow_hash import hash_workflow
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.policy.admission import (
    check_dependencies,
    check_inputs,
    check_room,
    check_submission,
    digest_of,
    is_repeat,
)
from comfyfleet.policy.lifecycle import readiness_at
from comfyfleet.policy.poison_workflows import check_refused
from comfyfleet.policy.tenants import name_for, reader_of
from comfyfleet.policy.terms import is_within_terms, under_new_terms, under_terms, with_terms
from comfyfleet.policy.timers import effective_priority, wake_at
from comfyfleet.ports import Counts

_FRESH_S = 1.0


class QueueCapacity:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._waiting = 0
        self._open_bytes = 0
        self._good_until = float("-inf")

    def is_known(self) -> bool:
        """Whether the last counts of the store are good enough."""
        rules = self._context.rules
        return (
            self._context.clock.monotonic() < self._good_until
            and 2 * self._waiting < rules.max_waiting
            and 2 * self._open_bytes < rules.max_open_bytes
        )

    def update(self, counts: Counts) -> None:
        self._waiting = counts.waiting + counts.delayed + counts.paused
        self._open_bytes = counts.payload_bytes
        self._good_until = self._context.clock.monotonic() + _FRESH_S

    def take(self, size: int) -> None:
        """Counts a job of this size. Refuses it if the queue is full."""
        check_room(self._waiting, self._open_bytes, size, self._context.rules)
        self._waiting += 1
        self._open_bytes += size


_QUEUED = (FactDraft(FactKind.QUEUED),)
_TRIES = 20
_REVIEW_S = 60.0

T = TypeVar("T")


class Preview(NamedTuple):
    """Where a submission would wait."""

    dispatch: Dispatch
    cls: RequirementClass
    tenant: Tenant | None
    """None: it has no terms."""
    unworkable: tuple[str, ...]


class Submitter:
    def __init__(
        self,
        context: EngineContext,
        matcher: Matcher,
        dependencies: Dependencies,
        inputs: InputFiles,
        nodes: EditorConverter,
        catalogs: NodeCatalogs,
        missing: MissingRequirements,
    ) -> None:
        self._context = context
        self._matcher = matcher
        self._dependencies = dependencies
        self._inputs = inputs
        self._nodes = nodes
        self._catalogs = catalogs
        self._missing = missing
        self._reader = GraphReader(context.rules.max_nodes)
        self._capacity = QueueCapacity(context)

    async def submit(
        self, submission: Submission, *, is_own: bool = False, is_large: bool = False
    ) -> Submitted:
        """`is_own`: the graph comes from decoded JSON and has no other owner, so it is not copied; its nodes
        may still be `msgspec.Raw`. `is_large`: threads read it, so that the event loop goes on."""
        context, run = self._context, _in_a_thread if is_large else _at_once
        # A repeat is accepted first: its files and workers may be gone by now.
        known = await self._known(submission)
        if known is not None and await run(is_repeat, known.payload, submission):
            return _repeat(known)
        await run(check_submission, submission, context.rules)
        sent = await run(digest_of, submission)
        try:
            submission, reading = await self._read(submission, is_own, is_large)
            submission = msgspec.structs.replace(submission, sent=sent)
            if submission.inputs or submission.after:
                submission = await self._named(submission, reading.payload, run)
        except Refusal as refusal:
            if known is None:
                raise
            # Whatever is wrong, it differs from the first submission.
            raise _differs(known, submission) from refusal
        if known is not None:
            return await run(_same, known, submission)
        check_refused(reading.workflow_hash, submission.tenant, context.fleet.refused)
        awaits_jobs = bool(submission.after) and await self._dependencies.check(
            submission.after, submission.tenant
        )
        if submission.inputs and not awaits_jobs:
            submission = await self._inputs.filled(submission)
        tenant = await context.admission_control.terms(submission.tenant)
        placed = submission if tenant is None else under_terms(submission, tenant, reading.payload)
        now, stats = await self._asked(reading.workflow_hash)
        size = await run(submission.payload_bytes)
        self._capacity.take(size)
        cls = await needed_class(context, self._catalogs, placed, stats, reading.needs)
        unworkable = await self._unworkable(cls, submission)
        place = initial_class(context, cls, stats, max(now, submission.not_before or now))
        ceiling = None if tenant is None else tenant.caps.max_priority
        dispatch = self._dispatch(placed, size, place, reading.workflow_hash, now, awaits_jobs, ceiling)
        job = Job(
            dispatch.job_id,
            submission.tenant,
            reading.workflow_hash,
            now,
            submission,
            reference=submission.reference,
            seeds=self._drawn(reading),
        )
        if all(each.file is not None for each in submission.inputs):
            # Otherwise the files of other jobs are not known yet.
            dispatch = msgspec.structs.replace(dispatch, payload_sha256=await run(job_sha256, job))
        if tenant is None:
            written = await self._write(dispatch, job, place)
        else:
            async with context.admission_control.admit(tenant):
                written = await self._write(dispatch, job, place)
        if written.dispatch.job_id != dispatch.job_id:
            # Somebody else submitted under the same reference meanwhile.
            known = await self._known(submission)
            assert known is not None, "the store answered with it"
            return await run(_same, known, submission)
        await self._tell(written)
        if unworkable:
            self._missing.call(cls)
        return Submitted(job.job_id, Phase.QUEUED, job.workflow_hash, seeds=job.seeds, unworkable=unworkable)

    async def preview(
        self, submission: Submission, *, is_own: bool = False, is_large: bool = False
    ) -> Preview:
        """Where the job would wait, without queueing it. Refuses what `submit` refuses in the submission itself; files
        and jobs that it names are not looked up, and the queue may be full."""
        context, run = self._context, _in_a_thread if is_large else _at_once
        await run(check_submission, submission, context.rules)
        submission, reading = await self._read(submission, is_own, is_large)
        check_refused(reading.workflow_hash, submission.tenant, context.fleet.refused)
        tenant = await context.admission_control.terms(submission.tenant)
        placed = submission if tenant is None else under_terms(submission, tenant, reading.payload)
        now, stats = await context.store.now(), await context.stats(reading.workflow_hash)
        cls = await needed_class(context, self._catalogs, placed, stats, reading.needs)
        unworkable = await self._unworkable(cls, submission)
        place = initial_class(context, cls, stats, max(now, submission.not_before or now))
        ceiling = None if tenant is None else tenant.caps.max_priority
        dispatch = self._dispatch(placed, 0, place, reading.workflow_hash, now, False, ceiling)
        return Preview(dispatch, place.cls, tenant, unworkable)

    def _drawn(self, reading: GraphReading) -> dict[str, int] | None:
        # Other services take seeds of 32 bits only.
        most = 1 << (64 if reading.payload is None else 32)
        return {place: self._context.rng.seed() % most for place in reading.drawing} or None

    async def admit(
        self, job: Job, dispatch: Dispatch, write: Callable[[Dispatch], Awaitable[WriteResult | None]]
    ) -> Tenant | None:
        """Queues a round that this or another engine accepted earlier. `write` returns None if the store
        dropped the class. Returns the tenant if the job breaks its present terms; the job then waits as
        paused until it is ended."""
        context = self._context
        stats = await context.stats(dispatch.workflow_hash)
        # The job was accepted before; the tenant's present terms decide whether and where it runs.
        tenant = await context.admission_control.terms(job.tenant)
        payload = job.payload if tenant is None else with_terms(job.payload, tenant)
        reading = await context.payloads.of_stored(job.payload, dispatch.payload_bytes)
        needs = None if reading is None else needs_of(reading)
        cls = await needed_class(context, self._catalogs, payload, stats, needs)
        place = initial_class(context, cls, stats, await context.store.now())
        placed = msgspec.structs.replace(
            dispatch,
            class_key=context.fleet.key_of(place.cls),
            relaxed_class=None if place.later is None else context.fleet.key_of(place.later),
            relax_at=None if dispatch.awaits_jobs else place.relax_at,
        )
        now = await context.store.now()
        if tenant is not None:
            placed = under_new_terms(placed, job, tenant, now, context.rules).apply(placed)
            placed = msgspec.structs.replace(placed, revision=dispatch.revision)
        is_kept = tenant is None or is_within_terms(job.payload, tenant, reading)
        if not is_kept:
            # The job ends by itself if nobody ends it.
            placed = msgspec.structs.replace(placed, standing=Readiness.PAUSED, expires_at=now + _REVIEW_S)
        placed = msgspec.structs.replace(placed, wake_at=wake_at(placed, now, context.rules))
        for _ in range(_TRIES):
            for each in place.classes:
                await context.fleet.ensure_class(each)
            written = await write(placed)
            if written is not None:
                await self._tell(written)
                return None if is_kept else tenant
        return None

    async def repeat_of(self, submission: Submission) -> Submitted | None:
        """The job that an identical submission created, whatever became of its files and workers."""
        known = await self._known(submission)
        return _repeat(known) if known is not None and is_repeat(known.payload, submission) else None

    async def holder_of(self, submission: Submission) -> Submitted | None:
        """The job with the same reference, or None. Refuses if that job's submission differs."""
        known = await self._known(submission)
        return None if known is None else _same(known, submission)

    async def _known(self, submission: Submission) -> Job | None:
        if submission.reference is None:
            return None
        return await self._context.store.records.by_reference(submission.tenant, submission.reference)

    async def _read(
        self, submission: Submission, is_own: bool, is_large: bool
    ) -> tuple[Submission, GraphReading]:
        """The submission as it is stored, and the reading of its graph or payload."""
        variants: tuple[WorkflowVariant, ...] = ()
        service = submission.requirements.service
        if service != COMFYUI:
            run = _in_a_thread if is_large else _at_once
            read = partial(self._context.payloads.read, is_own=is_own)
            payload = await run(read, service, submission.workflow)
            reading = GraphReading(
                payload.payload,
                WorkflowHash(sys.intern(payload.workflow_hash)),
                needs_of(payload),
                payload.seeds,
                payload,
            )
        elif is_editor_workflow(submission.workflow):
            graph, variants = await self._nodes.convert_for_all(submission.workflow, submission.tenant)
            # In a thread: a page of the editor may expand to megabytes.
            reading = await asyncio.to_thread(self._read_variants, graph, variants)
        elif is_large and is_own:
            reading = await asyncio.to_thread(self._reader.read_once, submission.workflow)
        else:
            reading = self._reader.read(submission.workflow, is_own=is_own)
        return msgspec.structs.replace(submission, workflow=reading.graph, variants=variants), reading

    def _read_variants(self, graph: dict[str, Any], variants: tuple[WorkflowVariant, ...]) -> GraphReading:
        """Reads all variants as one workflow, with the hash of their common part and all their seeds."""
        reading = self._reader.read(graph)
        if not variants:
            return reading
        others = [self._reader.read(with_nodes(graph, variant)) for variant in variants]
        drawing = dict.fromkeys(node_id for each in (reading, *others) for node_id in each.drawing)
        common = hash_workflow(common_to(reading.graph, [each.graph for each in others]))
        return reading._replace(workflow_hash=common, drawing=tuple(drawing))

    async def _named(
        self, submission: Submission, payload: PayloadReading | None, run: _Runner
    ) -> Submission:
        """With the ids of the jobs that it waits for."""
        rules = self._context.rules
        if submission.inputs:
            graph: Workflow | PayloadReading
            if payload is None:
                check = partial(check_workflow, max_nodes=rules.max_nodes)
                graph = await run(check, submission.workflow)
            else:
                graph = payload
            check_inputs(submission, graph, rules)
        submission = await self._inputs.named(submission)
        check_dependencies(submission, rules)
        return submission

    async def _asked(self, workflow_hash: WorkflowHash) -> tuple[float, WorkflowStats | None]:
        """The time and the workflow's statistics. Reads the queue counts if they are outdated."""
        context, store = self._context, self._context.store
        if not store.is_shared:
            self._capacity.update(await store.counts())
            return await store.now(), await context.stats(workflow_hash)
        if self._capacity.is_known():
            return context.clock.now(), await context.stats(workflow_hash)
        # Together, because each is a call to another process.
        counts, now, stats = await asyncio.gather(store.counts(), store.now(), context.stats(workflow_hash))
        self._capacity.update(counts)
        return now, stats

    async def _unworkable(self, cls: RequirementClass, submission: Submission) -> tuple[str, ...]:
        """What the nearest worker lacks; empty if a worker can run the job."""
        context = self._context
        lacking = self._lacking(cls, submission.tenant)
        if lacking and context.store.is_shared:
            # Another engine may have a new worker.
            await context.fleet.sync()
            lacking = self._lacking(cls, submission.tenant)
        if lacking and submission.require_workable:
            raise Refusal(
                RefusalCode.UNWORKABLE,
                "no live worker can run this; the nearest: " + "; ".join(lacking),
                missing=lacking,
            )
        return lacking

    def _lacking(self, cls: RequirementClass, tenant: TenantId) -> tuple[str, ...]:
        fleet = self._context.fleet
        key = fleet.key_of(cls)
        if key in fleet.classes:
            if fleet.selectivity(key):
                return ()
        elif fleet.is_workable(cls):
            return ()
        live = [worker for worker in fleet.workers.values() if not worker.is_offline]
        nearest = closest_worker(self._context, cls, tenant, live)
        if nearest is None:
            return self._offline(tenant) or ("no worker is connected",)
        name, reasons = nearest
        return tuple(f"{name} {reason}" for reason in reasons)

    def _offline(self, tenant: TenantId) -> tuple[str, ...]:
        """The reasons of the offline workers that were seen last: others may be of an earlier start."""
        away = [worker for worker in self._context.fleet.workers.values() if worker.is_offline]
        away.sort(key=lambda worker: worker.last_seen_at, reverse=True)
        return tuple(
            f"{name_for(worker.worker_id, worker.capabilities.tenant_access, reader_of(tenant))} is offline: "
            f"{worker.offline_reason or 'it left'}"
            for worker in away[:3]
        )

    def _dispatch(
        self,
        submission: Submission,
        size: int,
        place: Placement,
        workflow_hash: WorkflowHash,
        now: float,
        awaits_jobs: bool,
        ceiling: int | None,
    ) -> Dispatch:
        fleet, rules = self._context.fleet, self._context.rules
        base = effective_priority(
            submission.priority, submission.tier, submission.urgency, None, now, rules, ceiling
        )
        total_s = submission.timeouts.total_s
        dispatch = Dispatch(
            job_id=self._context.rng.job_id(now),
            class_key=fleet.key_of(place.cls),
            workflow_hash=workflow_hash,
            priority=effective_priority(base, 0, "normal", submission.deadline, now, rules, ceiling),
            base_priority=base,
            priority_ceiling=ceiling,
            tenant=submission.tenant,
            standing=readiness_at(submission.not_before, now, awaits_jobs),
            queued_at=now,
            not_before=submission.not_before,
            max_attempts=submission.max_attempts or rules.max_attempts,
            deadline_at=submission.deadline,
            fails_at_deadline=submission.on_deadline == "fail",
            expires_at=None if total_s is None else now + total_s,
            relaxed_class=None if place.later is None else fleet.key_of(place.later),
            relax_at=place.relax_at,
            payload_bytes=size,
        )
        if awaits_jobs:
            dispatch = waiting_for_jobs(dispatch)
        when = wake_at(dispatch, now, rules)
        # Most jobs need no timer.
        return dispatch if when is None else msgspec.structs.replace(dispatch, wake_at=when)

    async def _write(self, dispatch: Dispatch, job: Job, place: Placement) -> WriteResult:
        submission = job.payload
        await self._context.announce(submission, dispatch.job_id, dispatch.round)
        if dispatch.awaits_jobs:
            await self._dependencies.announce(submission.after, dispatch.job_id)
        if submission.inputs:
            await self._inputs.use((each.file for each in submission.inputs), dispatch.job_id)
        return await self._enqueue(dispatch, job, place)

    async def _enqueue(self, dispatch: Dispatch, job: Job, place: Placement) -> WriteResult:
        fleet = self._context.fleet
        for cls in place.classes:
            if fleet.key_of(cls) not in fleet.classes:
                await fleet.ensure_class(cls, unless_known=True)
        store = self._context.store
        if not self._matcher.has_idle_slot(dispatch.class_key):
            # First come, first served would let it wait for one turn. The store adds those before it.
            dispatch = msgspec.structs.replace(dispatch, place=1)
        while True:
            if not store.is_shared:
                # Count again: others may have come meanwhile. Nothing awaits from here to the write.
                self._capacity.update(await store.counts())
                self._capacity.take(dispatch.payload_bytes)
            written = await store.enqueue(dispatch, job, _QUEUED)
            if written is not None:
                return written
            # The store dropped a class that was idle for long.
            for cls in place.classes:
                await fleet.ensure_class(cls)

    async def _tell(self, written: WriteResult) -> None:
        dispatch = written.dispatch
        self._context.publish(written)
        self._context.outlook.enqueued(dispatch)
        self._matcher.job_arrived(dispatch)
        if dispatch.awaits_jobs:
            # An awaited job may have ended before this one was written.
            with best_effort(f"check what job {dispatch.job_id} waits for; the sweeper does so later"):
                await self._dependencies.recheck(dispatch.job_id)


class _Runner(Protocol):
    async def __call__(self, work: Callable[..., T], *arguments: Any) -> T: ...


async def _at_once(work: Callable[..., T], *arguments: Any) -> T:
    return work(*arguments)


async def _in_a_thread(work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.to_thread(work, *arguments)


def _same(known: Job, submission: Submission) -> Submitted:
    if not is_repeat(known.payload, submission):
        raise _differs(known, submission)
    return _repeat(known)


def _differs(known: Job, submission: Submission) -> Refusal:
    return Refusal(
        RefusalCode.DUPLICATE_DIFFERS,
        f"another job already has the reference {submission.reference!r}; choose a different one",
        job_id=known.job_id,
    )


def _repeat(known: Job) -> Submitted:
    return Submitted(known.job_id, known.phase, known.workflow_hash, seeds=known.seeds, is_repeat=True)
