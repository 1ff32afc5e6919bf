"""Operations on existing jobs: get, cancel, retry, pause, resume, set priority, delete. Each loads, asks
policy, writes and publishes.

`read_together` reads a job's dispatch and record consistently, so that an end and its result belong together.
`purge` deletes ended jobs in small steps, so that the store can answer others meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext

import msgspec

from comfyfleet.engine.context import EngineContext, best_effort
from comfyfleet.engine.dependencies import Dependencies
from comfyfleet.engine.input_files import InputFiles
from comfyfleet.engine.matcher import Matcher
from comfyfleet.engine.node_catalogs import NodeCatalogs
from comfyfleet.engine.payload_reader import needs_of
from comfyfleet.engine.placement import initial_class, needed_class
from comfyfleet.model.calls import CancelReply, JobView, Submitted
from comfyfleet.model.dispatch import (
    TOMBSTONE_S,
    AtRevision,
    Change,
    Dispatch,
    Phase,
    Readiness,
    Stop,
    Write,
    WriteResult,
)
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import DEFAULT_TENANT, JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.policy.admission import check_priority
from comfyfleet.policy.lifecycle import (
    MOVES,
    IllegalTransition,
    Transition,
    cancelled,
    paused,
    readiness_at,
    target,
)
from comfyfleet.policy.poison_workflows import check_refused
from comfyfleet.policy.terms import under_terms
from comfyfleet.policy.timers import effective_priority, request_stop, wake_at
from comfyfleet.ports import JobTransfer, QueueReader, Store

_TRIES = 20


async def read_together(
    store: QueueReader, job_id: JobId, tenant: TenantId | None = None
) -> tuple[Dispatch, Job] | None:
    """None: no such job, or another tenant's; then the tenant database is not read."""
    for _ in range(_TRIES):
        dispatch = await store.load(job_id)
        if dispatch is None or tenant not in (None, dispatch.tenant):
            return None
        job = await store.records.get(job_id)
        if job is None:
            return None
        if _is_of_one_moment(dispatch, job):
            return dispatch, job
    raise Fault(f"job {job_id} changes faster than it can be read; try again")


def _is_of_one_moment(dispatch: Dispatch, job: Job) -> bool:
    """Whether both are open, or both show the same end."""
    if not dispatch.phase.is_final and not job.phase.is_final:
        return True
    return (dispatch.phase, dispatch.round) == (job.phase, job.round)


_MAX_REASON = 500


class JobOperations:
    def __init__(
        self,
        context: EngineContext,
        matcher: Matcher,
        notify_worker: Callable[[Dispatch, Stop], Awaitable[None]],
        dependencies: Dependencies,
        inputs: InputFiles,
        catalogs: NodeCatalogs,
    ) -> None:
        self._context = context
        self._matcher = matcher
        self._notify_worker = notify_worker
        self._dependencies = dependencies
        self._inputs = inputs
        self._catalogs = catalogs

    async def get(self, job_id: JobId, tenant: TenantId | None = None) -> JobView:
        """`tenant`: hides the jobs of other tenants."""
        found = await read_together(self._context.store, job_id, tenant)
        if found is None:
            raise no_job(job_id)
        dispatch, job = found
        return JobView(job, dispatch, tuple(await self._context.store.attempts(job_id)))

    async def by_reference(self, reference: str, tenant: TenantId = DEFAULT_TENANT) -> JobId | None:
        job = await self._context.store.records.by_reference(tenant, reference)
        return None if job is None else job.job_id

    async def cancel(self, job_id: JobId, reason: str = "") -> CancelReply:
        """Cancels a waiting job at once. For a running job it records the request and notifies the worker."""
        context, reason = self._context, reason[:_MAX_REASON]
        data = {"reason": reason} if reason else None

        def decide(dispatch: Dispatch, now: float) -> Write | None:
            if dispatch.phase.is_final:
                return None
            if dispatch.phase is Phase.LEASED:
                if dispatch.stop is Stop.CANCEL:
                    return None
                asked = request_stop(dispatch, Stop.CANCEL, now, context.rules)
                change = msgspec.structs.replace(asked, cancel_reason=reason)
                return _write(dispatch, change, FactDraft(FactKind.CANCEL_REQUESTED, data))
            return _write(
                dispatch,
                msgspec.structs.replace(cancelled(dispatch), cancel_reason=reason),
                FactDraft(FactKind.CANCELLED, data),
                job={"phase": Phase.CANCELLED, "completed_at": now},
            )

        dispatch, written = await self._change(job_id, decide)
        await self._tell_to_stop(written, Stop.CANCEL)
        return CancelReply(dispatch.phase, dispatch.cancel_requested_at is not None)

    async def retry(self, job_id: JobId) -> Submitted:
        """Starts a new round of a failed or cancelled job, with fresh counters and the old queue position. A
        running job stays in its round: its worker stops it, and it gets a new attempt."""
        while True:
            view = await self.get(job_id)
            try:
                if view.dispatch.phase is Phase.LEASED:
                    return await self._retry_running(view)
                return await self._retry_ended(view)
            except _Overtaken:
                # The preparation was for another round; its terms and dependencies were not checked.
                continue

    async def _retry_running(self, view: JobView) -> Submitted:
        def decide(dispatch: Dispatch, now: float) -> Write | None:
            _must_be_as_seen(dispatch, view.dispatch)
            self._must_run(dispatch, "retry")
            if dispatch.stop is Stop.RETRY:
                return None
            change = request_stop(dispatch, Stop.RETRY, now, self._context.rules)
            return _write(dispatch, change, FactDraft(FactKind.RETRY_REQUESTED))

        dispatch, written = await self._change(view.job.job_id, decide)
        await self._tell_to_stop(written, Stop.RETRY)
        return Submitted(dispatch.job_id, dispatch.phase, dispatch.workflow_hash, retry_requested=True)

    async def _retry_ended(self, view: JobView) -> Submitted:
        rules, fleet, job_id = self._context.rules, self._context.fleet, view.job.job_id
        submission, workflow_hash = view.job.payload, view.dispatch.workflow_hash
        if view.job.unreadable is not None:
            why = f"the job can no longer be read, so it cannot run again: {view.job.unreadable}"
            raise _wrong_phase(view.dispatch, why)
        is_legal = (view.dispatch.phase, Transition.RETRY) in MOVES
        if is_legal and view.dispatch.has_tenant_database and not self._context.reaches_tenants:
            raise Refusal(
                RefusalCode.NOT_ALLOWED,
                f"tenant {view.dispatch.tenant!r} has its own database, which must charge the next round: "
                "retry the job at a hub that reaches it",
            )
        check_refused(workflow_hash, submission.tenant, fleet.refused)
        tenant = await self._context.admission_control.terms(submission.tenant) if is_legal else None
        reading = await self._context.payloads.of_stored(submission, view.dispatch.payload_bytes)
        placed = submission if tenant is None else under_terms(submission, tenant, reading)
        ceiling = None if tenant is None else tenant.caps.max_priority
        stats = await self._context.stats(workflow_hash)
        needs = None if reading is None else needs_of(reading)
        cls = await needed_class(self._context, self._catalogs, placed, stats, needs)
        place = initial_class(self._context, cls, stats, await self._context.store.now())
        # A job that was released before has its inputs, even if the awaited jobs are gone.
        awaits_jobs = view.dispatch.awaits_jobs and is_legal

        def decide(dispatch: Dispatch, now: float) -> Write:
            _must_be_as_seen(dispatch, view.dispatch)
            try:
                phase = target(dispatch.phase, Transition.RETRY)
            except IllegalTransition as illegal:
                only = "only one that runs, failed or was cancelled"
                why = f"cannot retry a job that is {dispatch.phase.value}: {only}"
                raise _wrong_phase(dispatch, why) from illegal
            # The limits of the first round do not apply: a passed deadline would end the new round at once.
            change = Change(
                phase=phase,
                standing=readiness_at(None, now, awaits_jobs),
                awaits_jobs=awaits_jobs,
                class_key=fleet.key_of(place.cls),
                relaxed_class=None if place.later is None else fleet.key_of(place.later),
                relax_at=None if awaits_jobs else place.relax_at,
                round=dispatch.round + 1,
                charged=0,
                worker_faults=0,
                releases=0,
                failed_on=(),
                expired_on=(),
                server_deaths=0,
                cancel_requested_at=None,
                pause_requested_at=None,
                retry_requested_at=None,
                cancel_reason="",
                not_before=None,
                deadline_at=None,
                expires_at=None,
                settled_at=None,
                priority=effective_priority(dispatch.base_priority, 0, "normal", None, now, rules, ceiling),
                priority_ceiling=ceiling,
                wake_at=now + rules.held_look_s if awaits_jobs else place.relax_at,
            )
            return _write(
                dispatch,
                change,
                FactDraft(FactKind.QUEUED, {"round": dispatch.round + 1}),
                job={
                    "phase": Phase.QUEUED,
                    "round": dispatch.round + 1,
                    "failure": None,
                    "completed_at": None,
                    "started_at": None,
                    "worker_id": None,
                    "prompt_id": None,
                    "is_late": False,
                },
            )

        admit: AbstractAsyncContextManager[None] = (
            nullcontext() if tenant is None else self._context.admission_control.admit(tenant)
        )
        async with admit:
            if is_legal:
                await self._context.announce(submission, job_id, view.dispatch.round + 1)
                await self._inputs.use((each.file for each in submission.inputs), job_id)
            if awaits_jobs:
                await self._dependencies.announce(submission.after, job_id)
            dispatch, _ = await self._change(job_id, decide, needed=place.classes)
        if awaits_jobs:
            with best_effort(f"check what job {job_id} waits for; the sweeper does so later"):
                await self._dependencies.recheck(job_id)
        return Submitted(job_id, dispatch.phase, workflow_hash)

    async def pause(self, job_id: JobId) -> None:
        """Pauses a waiting job at once, and a running one when its worker has stopped it."""

        def decide(dispatch: Dispatch, now: float) -> Write | None:
            if dispatch.phase is Phase.LEASED:
                self._must_run(dispatch, "pause")
                if dispatch.stop is Stop.PAUSE:
                    return None
                change = request_stop(dispatch, Stop.PAUSE, now, self._context.rules)
                return _write(dispatch, change, FactDraft(FactKind.PAUSE_REQUESTED))
            self._must_wait(dispatch, "pause", "one that waits or runs")
            if dispatch.standing is Readiness.PAUSED:
                return None
            return _write(dispatch, paused(dispatch), FactDraft(FactKind.PAUSED))

        _, written = await self._change(job_id, decide)
        await self._tell_to_stop(written, Stop.PAUSE)

    async def resume(self, job_id: JobId) -> None:
        rules = self._context.rules

        def decide(dispatch: Dispatch, now: float) -> Write | None:
            if dispatch.stop is Stop.PAUSE and dispatch.phase is Phase.LEASED:
                # The worker may have stopped the run already, so the job gets a new attempt.
                change = request_stop(dispatch, Stop.RETRY, now, rules)
                return _write(dispatch, change, FactDraft(FactKind.RETRY_REQUESTED))
            self._must_wait(dispatch, "resume")
            if dispatch.standing is not Readiness.PAUSED:
                return None
            standing = readiness_at(dispatch.not_before, now, dispatch.awaits_jobs)
            placed = msgspec.structs.replace(dispatch, standing=standing)
            change = Change(standing=standing, wake_at=wake_at(placed, now, rules))
            return _write(dispatch, change, FactDraft(FactKind.RESUMED))

        await self._change(job_id, decide)

    async def set_priority(self, job_id: JobId, priority: int) -> None:
        rules = self._context.rules
        check_priority(priority)
        asked = (await self.get(job_id)).job.payload
        tenant = await self._context.admission_control.terms(asked.tenant)
        tier = asked.tier + (0 if tenant is None else tenant.tier)
        ceiling = None if tenant is None else tenant.caps.max_priority

        def decide(dispatch: Dispatch, now: float) -> Write:
            self._must_wait(dispatch, "change the priority of")
            base = effective_priority(priority, tier, asked.urgency, None, now, rules, ceiling)
            raised = effective_priority(base, 0, "normal", dispatch.deadline_at, now, rules, ceiling)
            changed = msgspec.structs.replace(
                dispatch, base_priority=base, priority_ceiling=ceiling, priority=raised
            )
            change = Change(
                base_priority=base,
                priority_ceiling=ceiling,
                priority=raised,
                wake_at=wake_at(changed, now, rules),
            )
            return _write(
                dispatch,
                change,
                FactDraft(FactKind.PRIORITY_CHANGED, {"priority": priority}),
                job={"priority": priority},
            )

        await self._change(job_id, decide)

    async def _tell_to_stop(self, written: WriteResult | None, stop: Stop) -> None:
        if written is not None and written.dispatch.phase is Phase.LEASED:
            job_id = written.dispatch.job_id
            with best_effort(f"tell the worker of job {job_id} to stop it; its next heartbeat does so"):
                await self._notify_worker(written.dispatch, stop)

    @staticmethod
    def _must_run(dispatch: Dispatch, verb: str) -> None:
        is_running = dispatch.phase is Phase.LEASED
        if not is_running or dispatch.stop is Stop.CANCEL:
            state = "being cancelled" if is_running else dispatch.phase.value
            raise _wrong_phase(dispatch, f"cannot {verb} a job that is {state}")

    @staticmethod
    def _must_wait(dispatch: Dispatch, verb: str, only: str = "a waiting one") -> None:
        if dispatch.phase is not Phase.QUEUED:
            raise _wrong_phase(dispatch, f"cannot {verb} a job that is {dispatch.phase.value}: only {only}")

    async def _load(self, job_id: JobId) -> Dispatch:
        dispatch = await self._context.store.load(job_id)
        if dispatch is None:
            raise no_job(job_id)
        return dispatch

    async def _change(
        self,
        job_id: JobId,
        decide: Callable[[Dispatch, float], Write | None],
        needed: tuple[RequirementClass, ...] = (),
    ) -> tuple[Dispatch, WriteResult | None]:
        """Loads, decides and writes; repeats if somebody else wrote first. None: no change."""
        while True:
            for cls in needed:
                await self._context.fleet.ensure_class(cls)
            dispatch = await self._load(job_id)
            write = decide(dispatch, await self._context.store.now())
            if write is None:
                return dispatch, None
            written = await self._context.write(write)
            if written is not None:
                self._matcher.job_arrived(written.dispatch)
                return written.dispatch, written


class _Overtaken(Exception):
    """The job has changed phase or round since it was read."""


def _must_be_as_seen(dispatch: Dispatch, seen: Dispatch) -> None:
    if (dispatch.phase, dispatch.round) != (seen.phase, seen.round):
        raise _Overtaken


def no_job(job_id: JobId) -> Refusal:
    """One text for a missing job and for another tenant's, so that nobody learns that such a job exists."""
    return Refusal(RefusalCode.NOT_FOUND, f"there is no job {job_id!r} (any more)")


def _wrong_phase(dispatch: Dispatch, message: str) -> Refusal:
    return Refusal(RefusalCode.WRONG_PHASE, message, phase=dispatch.phase.value)


def _write(
    dispatch: Dispatch, change: Change, fact: FactDraft, job: dict[str, object] | None = None
) -> Write:
    return Write(dispatch.job_id, AtRevision(dispatch.revision), change, facts=(fact,), job=job)


_STEP = 200


async def purge(store: Store, phase: Phase, before: float, limit: int) -> int:
    """Returns the number of deleted jobs; fewer than `limit` means that none is left."""
    purged = 0
    while purged < limit:
        step = min(_STEP, limit - purged)
        gone = await store.purge(phase, before, step)
        purged += gone
        if gone < step:
            break
    return purged


async def ended_job(store: Store, job_id: JobId) -> Dispatch:
    """Loads a job that may be deleted now."""
    dispatch = await store.load(job_id)
    if dispatch is None:
        raise no_job(job_id)
    if not dispatch.phase.is_final:
        how = "cancel it first, and delete it once it has ended"
        raise _wrong_phase(dispatch, f"cannot delete a job that is {dispatch.phase.value}: {how}")
    if dispatch.has_tenant_database:
        now = await store.now()
        left_s = TOMBSTONE_S if dispatch.settled_at is None else dispatch.settled_at + TOMBSTONE_S - now
        if left_s > 0:
            raise Refusal(
                RefusalCode.WRONG_PHASE,
                f"job {job_id!r} has just ended and its credits are being settled: delete it in {left_s:.0f} s",
                retry_after_s=left_s,
            )
    return dispatch


async def forget(store: Store, job_id: JobId) -> Dispatch:
    """Deletes a job that has ended, and returns it."""
    moving: JobTransfer | None = getattr(store, "job_transfer", None)
    if moving is None:
        raise Refusal(RefusalCode.NOT_ALLOWED, "this store deletes jobs only by age: wait for it")
    for _ in range(_TRIES):
        dispatch = await ended_job(store, job_id)
        if (await moving.discard([dispatch]))[0]:
            return dispatch
    raise Fault(f"job {job_id!r} keeps changing; try again")
