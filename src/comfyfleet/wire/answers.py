"""Responses to callers: jobs, pages of lists, workers and statistics, made from values of the model.

Times are seconds since 1970; durations end in `_s`. `status_names.py` spells the statuses.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from comfyfleet.model.block import UNTIL_LIFTED, Block
from comfyfleet.model.calls import JobView, QueueStats, Submitted
from comfyfleet.model.dispatch import Attempt, Dispatch, Phase, Readiness, Stop
from comfyfleet.model.estimate import JobEstimate
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import trace_id_of, traceparent_of
from comfyfleet.model.job import Job, JobInput, JobResult
from comfyfleet.model.payload import COMFYUI
from comfyfleet.model.requirement import Requirements
from comfyfleet.model.webhook import Webhook
from comfyfleet.model.worker import Capabilities, LiveState, WorkerRecord, WorkerStatus
from comfyfleet.wire.bodies import (
    InputBody,
    PreferencesBody,
    RequirementsBody,
    SubmitBody,
    TimeoutsBody,
    WebhookBody,
)
from comfyfleet.wire.status_names import status_name
from comfyfleet.wire.views import view_of
from comfyfleet.wire.webhooks import shown


class _Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    pass


class SubmittedBody(_Answer, frozen=True):
    id: str
    status: str
    workflow_hash: str
    jobId: str  # noqa: N815 — the name that old callers read
    seeds: dict[str, int] | None = None
    warnings: tuple[str, ...] = ()
    """If no connected worker can run the job: what the nearest worker misses."""
    is_repeat: bool = False
    retry_requested: bool = False
    """Whether the job still runs: its worker stops it before the retry."""


class BatchItem(_Answer, frozen=True):
    """The answer to one job of a batch."""

    status: int
    """The HTTP status that a single submission would get."""
    job: SubmittedBody | None = None
    problem: dict[str, Any] | None = None
    """The problem, if the job was refused."""


class BatchAnswer(_Answer, frozen=True):
    items: tuple[BatchItem, ...]
    accepted: int
    refused: int


class AttemptBody(_Answer, frozen=True):
    id: str
    worker_id: str
    lease: int
    """The number of the lease."""
    round: int
    started_at: float
    outcome: str
    """`running`, `completed`, `failed`, `expired`, `released` or `cancelled`."""
    ended_at: float | None = None
    charged_to: str | None = None
    error: Failure | None = None
    reported_late: bool = False


class JobBody(_Answer, frozen=True, omit_defaults=False):
    id: str
    status: str
    service: str
    tenant: str
    workflow_hash: str
    priority: int
    submitted_at: float
    reference: str | None = None
    metadata: dict[str, Any] | None = None
    worker_id: str | None = None
    prompt_id: str | None = None
    round: int = 1
    started_at: float | None = None
    completed_at: float | None = None
    """When the job ended, also if it failed or was cancelled."""
    not_before: float | None = None
    deadline: float | None = None
    is_late: bool = False
    seeds: dict[str, int] | None = None
    trace_id: str = ""
    """The id of the caller's trace, or the job's own. Every log line about the job has it."""
    error: Failure | None = None
    """How the last attempt failed; null after an attempt completed."""
    unreadable: str | None = None
    """Why the encrypted parts of the job cannot be decrypted; metadata and the like are then unknown."""
    estimate: JobEstimate | None = None
    """When an open job is expected to start and to end. Null: not known, as for a job that is paused."""


class JobDetails(JobBody, frozen=True):
    attempts: int = 0
    is_paused: bool = False
    cancel_requested: bool = False
    cancel_reason: str = ""
    """The reason that came with the cancellation."""
    pause_requested: bool = False
    """Whether the worker was told to stop the job, which is then paused."""
    retry_requested: bool = False
    """Whether the worker was told to stop the job, which then waits for a new attempt."""
    history: tuple[AttemptBody, ...] = ()
    after: tuple[str, ...] = ()
    inputs: tuple[JobInput, ...] = ()
    """The inputs. `file` is known as soon as the job that makes it has completed."""


class JobList(_Answer, frozen=True, omit_defaults=False):
    jobs: tuple[JobBody, ...]
    cursor: str | None = None
    """Send it to get the next page. A page with a cursor can be short or empty; null on the last page."""


class ResultBody(_Answer, frozen=True, omit_defaults=False):
    id: str
    status: str
    result: JobResult | None = None
    error: Failure | None = None


class CancelBody(_Answer, frozen=True, omit_defaults=False):
    id: str
    status: str
    cancel_requested: bool


class PurgeAnswer(_Answer, frozen=True):
    purged: int


class QueueBody(_Answer, frozen=True):
    is_paused: bool
    """Whether the queue is paused: then no job is leased."""


class StatsBody(QueueStats, frozen=True, omit_defaults=True):
    is_paused: bool
    counted: int | None = None
    """For a tenant's key: how many of its newest jobs were counted. Absent: all jobs were."""


class ServiceBody(_Answer, frozen=True, omit_defaults=False):
    name: str
    workers: int
    """How many connected workers offer the service."""
    payload_schema: dict[str, Any] | None = None
    """The JSON Schema of the `payload` of its jobs. Null: the hub takes any JSON object."""


class ServiceList(_Answer, frozen=True):
    services: tuple[ServiceBody, ...]
    cursor: str | None = None


class WorkerBody(_Answer, frozen=True, omit_defaults=False):
    id: str
    status: WorkerStatus
    environment: str
    services: tuple[str, ...]
    slots: int
    connected_at: float
    last_seen_at: float
    current_jobs: tuple[str, ...] = ()
    completed: int = 0
    failed: int = 0
    per_hour: float = 0.0
    """Jobs completed in an hour of work."""
    disconnects: int = 0
    offline_reason: str = ""
    """Why the worker is offline."""
    quarantined_until: float | None = None
    is_fake: bool = False
    """Whether its server is a fake ComfyUI."""
    blocked_workflows: int = 0
    """How many workflows the worker does not get for now; `GET /api/blocks` lists them."""
    blocked_until: float | None = None
    """When the first of these blocks ends; null if none ends by itself."""


class WorkerDetails(WorkerBody, frozen=True):
    capabilities: Capabilities | None = None
    live: LiveState = LiveState()


class WorkerList(_Answer, frozen=True):
    workers: tuple[WorkerBody, ...]
    cursor: str | None = None


class BlockBody(_Answer, frozen=True):
    worker_id: str
    target: str
    reason: str
    failures: int = 0
    blocked_until: float | None = None
    """When the block ends; null: when an operator lifts it."""
    missing: tuple[str, ...] = ()
    workflow_hash: str | None = None
    """The blocked workflow; null if a single job is blocked."""
    tenant: str | None = None
    """The tenant whose jobs are blocked; null: all tenants."""


class BlockList(_Answer, frozen=True):
    blocks: tuple[BlockBody, ...]
    cursor: str | None = None


class HealthBody(_Answer, frozen=True):
    status: Literal["ok", "starting", "stopping", "failing"]
    version: str = ""
    """The version of the hub."""
    detail: str = ""


def submitted_body(answer: Submitted) -> SubmittedBody:
    return view_of(
        SubmittedBody,
        answer,
        id=answer.job_id,
        jobId=answer.job_id,
        status=status_name(answer.phase),
        warnings=answer.unworkable,
    )


def job_body(record: Job, estimate: JobEstimate | None = None) -> JobBody:
    """The job as a list shows it, from its record."""
    return view_of(JobBody, record, **_of_record(record), estimate=estimate)


def job_details(view: JobView, estimate: JobEstimate | None = None) -> JobDetails:
    dispatch = view.dispatch
    return view_of(
        JobDetails,
        view.job,
        **_of_record(view.job, dispatch.phase)
        | {
            "worker_id": view.worker_id,
            "started_at": view.started_at,
            "prompt_id": view.prompt_id,
            "attempts": dispatch.attempts,
            "is_paused": dispatch.phase is Phase.QUEUED and dispatch.standing is Readiness.PAUSED,
            "cancel_requested": dispatch.cancel_requested_at is not None,
            "cancel_reason": dispatch.cancel_reason,
            "pause_requested": dispatch.phase is Phase.LEASED and dispatch.stop is Stop.PAUSE,
            "retry_requested": dispatch.phase is Phase.LEASED and dispatch.stop is Stop.RETRY,
            "not_before": dispatch.not_before,
            "deadline": dispatch.deadline_at,
        },
        estimate=estimate,
        history=tuple(map(_attempt, view.attempts)),
        after=view.job.payload.after,
        inputs=view.job.payload.inputs,
    )


def _of_record(record: Job, phase: Phase | None = None) -> dict[str, Any]:
    """The fields that are not those of the record."""
    asked, phase = record.payload, phase or record.phase
    # The record keeps values of the previous attempt, which do not describe a waiting job.
    waits = phase is Phase.QUEUED
    return {
        "id": record.job_id,
        "status": status_name(phase),
        "service": asked.requirements.service,
        "priority": asked.priority if record.priority is None else record.priority,
        "metadata": asked.metadata,
        "prompt_id": None if waits else record.prompt_id,
        "started_at": None if waits else record.started_at,
        "not_before": asked.not_before,
        "deadline": asked.deadline,
        "trace_id": trace_id_of(traceparent_of(record.job_id, asked.traceparent)),
        "error": record.failure,
    }


def _attempt(attempt: Attempt) -> AttemptBody:
    return view_of(
        AttemptBody,
        attempt,
        id=attempt.attempt_id,
        lease=attempt.lease_number,
        error=attempt.failure,
    )


def worker_details(record: WorkerRecord, leases: list[Dispatch]) -> WorkerDetails:
    hours = record.busy_s / 3600
    return view_of(
        WorkerDetails,
        record,
        id=record.worker_id,
        status=worker_status(record, leases),
        environment=record.capabilities.environment,
        services=tuple(service.name for service in record.capabilities.services),
        current_jobs=tuple(lease.job_id for lease in leases),
        per_hour=round(record.completed / hours, 3) if hours else 0.0,
        is_fake=record.capabilities.is_fake,
        blocked_workflows=0,
        blocked_until=None,
    )


def worker_status(record: WorkerRecord, leases: list[Dispatch]) -> WorkerStatus:
    if record.is_offline:
        return WorkerStatus.OFFLINE
    if record.is_draining:
        return WorkerStatus.DRAINING
    if record.is_paused:
        return WorkerStatus.PAUSED
    return WorkerStatus.BUSY if leases else WorkerStatus.IDLE


def worker_summary(found: WorkerDetails) -> WorkerBody:
    return view_of(WorkerBody, found)


def block_body(found: Block) -> BlockBody:
    return view_of(
        BlockBody,
        found,
        blocked_until=None if found.blocked_until == UNTIL_LIFTED else found.blocked_until,
        workflow_hash=None if found.names_job else found.workflow_hash,
    )


B = TypeVar("B", bound=msgspec.Struct)

_LEARNED = ("slow_worker_classes", "refused_by", "needs_hub")


class PayloadBody(SubmitBody, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A submission with the job's id. A workflow of the editor is shown in its converted form."""

    id: str
    seeds: dict[str, int] | None = None


def payload_body(job: Job) -> PayloadBody:
    asked = job.payload
    is_graph = asked.requirements.service == COMFYUI
    return view_of(
        PayloadBody,
        asked,
        id=job.job_id,
        payload={"workflow": asked.workflow} if is_graph else asked.workflow,
        workflow=None,
        prompt=None,
        tenant=job.tenant,
        service=asked.requirements.service,
        provider=asked.requirements.provider,
        reference=job.reference,
        inputs=tuple(view_of(InputBody, each) for each in asked.inputs),
        priority=asked.priority if job.priority is None else job.priority,
        requirements=_convert(asked_for(asked.requirements), RequirementsBody),
        preferences=_same(asked.preferences, PreferencesBody),
        timeouts=_same(asked.timeouts, TimeoutsBody),
        webhook=_webhook(asked.webhook),
        seeds=job.seeds,
    )


def asked_for(needs: Requirements) -> dict[str, Any]:
    """The requirements as the caller sent them, without the service and without what the engine learned."""
    found: dict[str, Any] = msgspec.to_builtins(needs)
    for name in ("service", "provider", *_LEARNED):
        found.pop(name, None)
    if isinstance(hardware := found.get("hardware"), dict):
        hardware.pop("gpu_memory_above_gb", None)
    return found


def _same(asked: msgspec.Struct, kind: type[B]) -> B | None:
    return _convert(msgspec.to_builtins(asked), kind)


def _convert(found: dict[str, Any], kind: type[B]) -> B | None:
    """None: the caller sent nothing."""
    return msgspec.convert(found, kind) if found else None


def _webhook(webhook: Webhook | None) -> WebhookBody | None:
    """Without the query of its URL, which may contain a secret."""
    return None if webhook is None else WebhookBody(shown(webhook.url), webhook.events)
