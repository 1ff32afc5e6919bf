"""Explains why a job does not run: a reason for each worker, the nearest worker, the queue position, an
estimate. For a job that does not wait it says what happened to it."""

from __future__ import annotations

from typing import NamedTuple

from comfyfleet.engine.context import EngineContext
from comfyfleet.engine.forecasts import Forecasts
from comfyfleet.engine.matcher import Matcher
from comfyfleet.engine.node_catalogs import NodeCatalogs
from comfyfleet.model.block import BlockReason, Pair
from comfyfleet.model.calls import Explanation, WorkerMismatch
from comfyfleet.model.dispatch import Dispatch, Phase, Readiness
from comfyfleet.model.estimate import JobEstimate
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkerId
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.policy.acceptance import signature_for
from comfyfleet.policy.feasibility import REFUSES, Mismatch, misses, nearest_miss
from comfyfleet.policy.tenants import is_known_to, merged, name_for


class WaitingView(NamedTuple):
    """What is known about waiting jobs: when they are expected to start, and why an idle slot does not take them."""

    forecasts: Forecasts
    matcher: Matcher


async def explain(
    context: EngineContext,
    catalogs: NodeCatalogs,
    dispatch: Dispatch,
    tenant: TenantId | None = None,
    waiting: WaitingView | None = None,
) -> Explanation:
    """`tenant`: explains to that tenant, which may not know every worker by name. `waiting`: also explains when the
    job is expected to start."""
    job_id, phase = dispatch.job_id, dispatch.phase
    estimate = None if waiting is None else (await waiting.forecasts.of([dispatch])).get(job_id)
    if phase is not Phase.QUEUED:
        return Explanation(job_id, phase, await _outcome(context, dispatch), estimate=estimate)
    now = await context.store.now()
    cls = context.fleet.classes[dispatch.class_key]
    job = await context.store.records.get(job_id) if cls.requirements.refused_by else None
    lacking: dict[WorkerId, tuple[Mismatch, ...]] = {}
    reasons: dict[WorkerId, WorkerMismatch] = {}
    able: list[WorkerRecord] = []
    objections: dict[str | None, str | None] = {}
    """By signature, because hundreds of workers may share one."""
    for worker in list(context.fleet.workers.values()):
        lacks = _lacks(cls, worker)
        why = [miss.reason for miss in lacks] + await _obstacles(context, dispatch, worker, now)
        signature = None if job is None else signature_for(cls, worker)
        if job is not None and signature in cls.requirements.refused_by:
            if signature not in objections:
                objections[signature] = await catalogs.objection(job.payload, worker)
            objection = objections[signature]
            why = [objection if objection and each == REFUSES else each for each in why]
        if why:
            lacking[worker.worker_id] = lacks
            name = name_for(worker.worker_id, worker.capabilities.tenant_access, tenant)
            reasons[worker.worker_id] = WorkerMismatch(name, why[0], tuple(why))
        else:
            able.append(worker)
    position = await context.store.position(job_id)
    kept = _only_kept([context.fleet.workers[worker_id] for worker_id, lacks in lacking.items() if not lacks])
    closest = kept or nearest_miss(lacking, context.rules.weights)
    nearest = None if closest is None else reasons[closest]
    known = [worker.worker_id for worker in able if is_known_to(worker.capabilities.tenant_access, tenant)]
    reason = await _reason_for_nobody(context, dispatch, now)
    if reason is not None and dispatch.stands_in_lane:
        # Nobody can say when an operator resumes the queue, or when the tenant may run more.
        estimate = None
    return Explanation(
        job_id,
        phase,
        (reason or _summary(context, dispatch, able, nearest, position))
        + _expectation(context, waiting, dispatch, able, estimate, tenant),
        merged(reasons.values()),
        tuple(known),
        len(able) - len(known),
        None if nearest is None else nearest.worker_id,
        position,
        None if estimate is None or not able else max(0.0, estimate.starts_at - now),
        estimate=estimate if able else None,
    )


def _only_kept(workers: list[WorkerRecord]) -> WorkerId | None:
    """Of workers that lack nothing, the first that is online; else the one that was seen last. A worker that is only
    blocked or offline is nearer than one that lacks something, and one that left long ago says little."""
    online = next((worker for worker in workers if not worker.is_offline), None)
    latest = online or max(workers, key=lambda worker: worker.last_seen_at, default=None)
    return None if latest is None else latest.worker_id


def _lacks(cls: RequirementClass, worker: WorkerRecord) -> tuple[Mismatch, ...]:
    found = misses(cls, worker.worker_id, worker.capabilities)
    if worker.capabilities.services:
        return found
    # Its server never answered, so its inventory is unknown.
    return tuple(miss for miss in found if miss.dimension in ("affinity", "tenant"))


async def _outcome(context: EngineContext, dispatch: Dispatch) -> str:
    """What happened to a job that does not wait, and what the caller can do."""
    if dispatch.phase is Phase.LEASED and dispatch.lease is not None:
        cancelled = " and is asked to stop" if dispatch.stop is not None else ""
        return f"the job is leased on {dispatch.lease.worker_id}{cancelled}"
    job = await context.store.records.get(dispatch.job_id)
    failure = None if job is None else job.failure
    if dispatch.phase is Phase.FAILED and failure is not None:
        attempts = len(await context.store.attempts(dispatch.job_id))
        tried = "it never started" if not attempts else f"{attempts} attempt(s)"
        message = failure.message.rstrip(".")
        return f"the job failed ({failure.kind.value}; {tried}): {message}. A retry starts a new round"
    if dispatch.phase is Phase.CANCELLED:
        return "the job was cancelled; a retry starts a new round"
    where = "" if job is None or job.worker_id is None else f" on {job.worker_id}"
    return f"the job has {dispatch.phase.value}{where}"


async def _obstacles(
    context: EngineContext, dispatch: Dispatch, worker: WorkerRecord, now: float
) -> list[str]:
    """Why a worker that could run the job does not get it."""
    why: list[str] = []
    for target in dispatch.block_targets:
        block = await context.store.get_block(Pair(worker.worker_id, target))
        if block is not None and block.is_in_force(now):
            assert block.blocked_until is not None
            if block.missing:
                why.append(
                    f"reported that it lacks {', '.join(block.missing)}; the hub tries it again when that changes"
                )
                continue
            what = "this job" if target == dispatch.job_id else "this workflow"
            if block.reason is BlockReason.REFUSED:
                why.append(f"refused {what}: its versions of the nodes do not accept it")
                continue
            whose = "" if block.tenant in (None, DEFAULT_TENANT) else f" of tenant {block.tenant}"
            why.append(
                f"is blocked for {what}{whose} for another {block.blocked_until - now:.0f} s ({block.reason.value})"
            )
    if context.strategy.should_skip(worker.worker_id, dispatch.workflow_hash, now):
        why.append("is excluded from this workflow by the failover strategy")
    if worker.is_offline:
        why.append(f"is offline: {worker.offline_reason}" if worker.offline_reason else "is offline")
    elif worker.is_draining:
        why.append("is draining")
    elif worker.is_paused:
        why.append("is paused")
    elif worker.quarantined_until is not None and now < worker.quarantined_until:
        why.append("is quarantined: too many different workflows failed on it")
    if context.fleet.is_held_back(worker):
        why.append(
            "is a fake worker, and the fleet has real workers: start it with --fake-beside-real to use both"
        )
    return why


async def _reason_for_nobody(context: EngineContext, dispatch: Dispatch, now: float) -> str | None:
    """What keeps the job from every worker."""
    if await context.store.is_queue_paused():
        return "the queue is paused"
    if dispatch.standing is Readiness.PAUSED:
        return "the job is paused"
    if dispatch.awaits_jobs:
        return await _waits_for(context, dispatch)
    if dispatch.standing is Readiness.DELAYED:
        return f"the job waits another {max(0.0, (dispatch.not_before or now) - now):.1f} s before its next attempt"
    share = await context.store.fair_share.get(dispatch.tenant)
    if share.terms is not None and share.terms.is_held(now):
        return f"the tenant {dispatch.tenant} is held{_until(share.terms, now)}: workers get none of its jobs"
    if share.is_at_cap:
        return f"the tenant {dispatch.tenant} has as many jobs running as it may: {share.leased}"
    return None


def _summary(
    context: EngineContext,
    dispatch: Dispatch,
    able: list[WorkerRecord],
    nearest: WorkerMismatch | None,
    position: int | None,
) -> str:
    if not context.fleet.workers:
        return "no worker is connected"
    if not able:
        assert nearest is not None
        return f"no worker can take it now; the nearest, {nearest.worker_id}, {nearest.reason}"
    preference = "" if dispatch.relax_at is None else "; it waits for a preferred worker"
    return f"{len(able)} worker(s) can take it, {position or 0} job(s) are ahead of it{preference}"


def _until(terms: TenantTerms, now: float) -> str:
    assert terms.held_until is not None
    return "" if terms.held_until == float("inf") else f" for another {terms.held_until - now:.0f} s"


async def _waits_for(context: EngineContext, dispatch: Dispatch) -> str:
    job = await context.store.records.get(dispatch.job_id)
    after = () if job is None else job.payload.after
    found = [await context.store.load(job_id) for job_id in after]
    still = [each.job_id for each in found if each is not None and not each.phase.is_final]
    names = ", ".join(still[:3]) + (f" and {len(still) - 3} more" if len(still) > 3 else "")
    return f"the job waits for {len(still)} of {len(after)} others to complete: {names}"


def _expectation(
    context: EngineContext,
    waiting: WaitingView | None,
    dispatch: Dispatch,
    able: list[WorkerRecord],
    estimate: JobEstimate | None,
    tenant: TenantId | None,
) -> str:
    """Why a job that workers may take does not start yet, and when it is expected to."""
    if waiting is None or not able or estimate is None or not dispatch.stands_in_lane:
        return ""
    why = waiting.matcher.left_to_others(dispatch.lane)
    worker = None if why is None else context.fleet.workers.get(why.worker_id)
    if why is not None and worker is not None:
        name = name_for(worker.worker_id, worker.capabilities.tenant_access, tenant)
        return (
            f"; it waits for {name}, which has its models loaded and is free in about {_seconds(why.free_in_s)}: "
            f"loading them on an idle worker would take about {_seconds(why.load_s)}"
        )
    starts_in_s = estimate.starts_at - context.clock.now()
    guess = ", which is a guess" if estimate.is_rough else ""
    return f"; it is expected to start in about {_seconds(starts_in_s)}{guess}"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return "1 s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
