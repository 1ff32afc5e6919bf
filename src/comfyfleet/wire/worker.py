"""Bodies of the worker protocol: register, poll, heartbeat, progress, the reports that end a lease, and commands.

A worker sends a lease back unchanged. It sends capabilities once and then their hash, so that polls stay small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from comfyfleet.model.bounds import Name
from comfyfleet.model.calls import (
    ACTIONS,
    Command,
    Completion,
    FailureReport,
    HeartbeatReply,
    LeasedJob,
    ProgressReport,
    RegisterWorker,
    ReportReply,
)
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.file import InputFile
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkerId
from comfyfleet.model.job import Attachment, Timeouts
from comfyfleet.model.node_classes import NodeSignature, Widget
from comfyfleet.model.requirement import Environment, Requirements
from comfyfleet.model.worker import Capabilities, LiveState
from comfyfleet.wire.answers import asked_for
from comfyfleet.wire.status_names import modern_capabilities, status_name
from comfyfleet.wire.views import view_of

MAX_SLOTS = 1_000
MAX_REPORTS = 10_000
MAX_WAIT_S = 60.0
MAX_CLASSES = 50_000

Slots = Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
Load = Annotated[int, Meta(ge=0, le=MAX_SLOTS)]
Wait = Annotated[float, Meta(ge=0, le=MAX_WAIT_S)]


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class RegisterBody(_Call, frozen=True):
    worker_id: Name
    capabilities: dict[str, Any]
    environment: Environment | None = None
    slots: Slots | None = None
    max_concurrency: Slots | None = None
    live: LiveState | None = None
    instance: Name | None = None
    """An id of the agent that survives its restarts. The hub refuses another agent with the same worker id while this
    one is connected."""
    offline_reason: Annotated[str, Meta(max_length=1_000)] | None = None
    """Why no server of the worker can be used. The worker is then listed as offline and may have no services."""


class DescribeBody(_Call, frozen=True):
    """Node classes of a server. The hub stores them once for all workers with the same signature."""

    worker_id: Name
    definitions: Annotated[dict[str, tuple[Widget, ...]], Meta(max_length=MAX_CLASSES)]
    """By class: its widgets in the editor's order, each a list of name, default, trait and choices."""
    signatures: Annotated[dict[str, NodeSignature], Meta(max_length=MAX_CLASSES)] = {}
    """By class: a list of inputs by name, output types, and whether the class comes with ComfyUI."""


class PollBody(_Call, frozen=True):
    """With capabilities the poll also registers. With an outdated hash it is refused with `not_found`."""

    worker_id: Name
    poll_id: Name | None = None
    """Your own id of this poll: a repeat gets the same lease. Without one, a lease whose answer was lost returns to the
    queue after `acknowledge_s`."""
    wait_s: Wait = 30.0
    capabilities_hash: Name | None = None
    capabilities: dict[str, Any] | None = None
    environment: Environment | None = None
    slots: Slots | None = None
    max_concurrency: Slots | None = None
    current_load: Load | None = None
    """How many jobs the worker runs. Of two equally suitable workers the less loaded one gets the job."""
    providers: Annotated[tuple[Name, ...], Meta(max_length=100)] = ()
    live: LiveState | None = None
    instance: Name | None = None


class HeartbeatBody(_Call, frozen=True):
    worker_id: Name
    leases: Annotated[tuple[LeaseRef, ...], Meta(max_length=MAX_SLOTS)] = ()
    reports: Annotated[tuple[ProgressReport, ...], Meta(max_length=MAX_REPORTS)] = ()
    """Progress reports, so that a worker with few of them needs no separate call."""
    inputs: bool = False
    """Whether the answer should have new links to the inputs of these leases."""


class ProgressBatch(_Call, frozen=True):
    reports: Annotated[tuple[ProgressReport, ...], Meta(max_length=MAX_REPORTS)]


class NextPoll(_Call, frozen=True):
    """Asks for the next lease together with a report. The hub does not wait for a job."""

    poll_id: Name


class CompleteBody(Completion, frozen=True):
    next: NextPoll | None = None


class FailBody(FailureReport, frozen=True):
    next: NextPoll | None = None


class CommandsBody(_Call, frozen=True):
    worker_id: Name
    wait_s: Wait = 30.0


class UnregisterBody(_Call, frozen=True):
    worker_id: Name
    reason: Annotated[str, Meta(max_length=1_000)] = ""


class EnrolBody(_Call, frozen=True):
    token: Name
    worker_id: Name


class RegisteredBody(msgspec.Struct, frozen=True, omit_defaults=True):
    worker_id: str
    capabilities: Capabilities
    capabilities_hash: str
    slots: int
    heartbeat_s: float
    """The worker sends a heartbeat at least every so many seconds, also without a lease."""
    lost_after_s: float
    connected_at: float
    last_seen_at: float
    profile: str
    knows_nodes: bool | None = None
    """Whether the hub has the node classes of this signature. Absent: the worker declared no signature."""
    id: str = ""
    """The same as `worker_id`."""


class LeasedPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    workflow: dict[str, Any]
    attachments: tuple[Attachment, ...] = ()
    inputs: tuple[InputFile, ...] = ()
    """Files that the worker downloads, verifies and gives to inputs of nodes before the run. A file without a `url` was
    deleted."""


class LeasedBody(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    service: str
    workflow_hash: str
    payload: LeasedPayload
    timeouts: Timeouts = Timeouts()
    include_outputs: tuple[str, ...] = ()
    attempt: int = 1
    metadata: dict[str, Any] | None = None
    traceparent: str | None = None
    """The W3C trace context of the job."""
    payload_sha256: str | None = None
    """The SHA-256 of the payload, in hexadecimal. A worker that computes another one fails the attempt with
    `payload_mismatch`."""
    tenant: str | None = None
    priority: int = 0
    requirements: dict[str, Any] | None = None
    """The requirements of the submission, if it had any."""


class LeaseAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The lease expires after `acknowledge_s` without a first heartbeat, and later after `duration_s` without one.
    Workers measure this with their own clock.
    """

    lease: LeaseRef
    worker_id: str
    duration_s: float
    acknowledge_s: float
    job: LeasedBody


class LeaseInputs(msgspec.Struct, frozen=True):
    lease: LeaseRef
    inputs: tuple[InputFile, ...]


class CommandBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Workers ignore unknown actions."""

    action: str
    job_id: str | None = None
    lease_number: int = 0
    reason: str = ""
    timestamp: float = 0.0
    """When the hub sent the command, in seconds since 1970."""


class HeartbeatAnswer(msgspec.Struct, frozen=True):
    duration_s: float
    alive: tuple[LeaseRef, ...] = ()
    lost: tuple[LeaseRef, ...] = ()
    commands: tuple[CommandBody, ...] = ()
    inputs: tuple[LeaseInputs, ...] = ()
    """New links to the inputs of live leases, if they were requested."""
    missing: tuple[str, ...] = ()
    """Node classes and models that waiting jobs need and the worker does not have. A worker that finds one registers
    again."""


class ReportAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    status: str
    will_retry: bool = False
    next: LeaseAnswer | None = None


class CommandsAnswer(msgspec.Struct, frozen=True):
    """An empty answer before `wait_s` has passed means: send a heartbeat."""

    commands: tuple[CommandBody, ...] = ()


_CANONICAL = msgspec.json.Encoder(order="deterministic")


def capabilities_hash(capabilities: Capabilities) -> str:
    """Workers do not compute it: they send back what the hub returned."""
    return hashlib.sha256(_CANONICAL.encode(capabilities)).hexdigest()[:32]


def registration(body: RegisterBody | PollBody) -> RegisterWorker:
    assert body.capabilities is not None, "a poll without capabilities registers nobody"
    given, free_gb = modern_capabilities(body.capabilities)
    try:
        capabilities = msgspec.convert(given, Capabilities, strict=False)
    except msgspec.ValidationError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the capabilities are not valid: {error}") from error
    offline_reason = (isinstance(body, RegisterBody) and body.offline_reason) or ""
    names = [each.name for each in capabilities.services]
    if len(set(names)) != len(names) or not (names or offline_reason):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            "the capabilities must name at least one service, and each service once",
        )
    if body.environment is not None:
        capabilities = msgspec.structs.replace(capabilities, environment=body.environment)
    if isinstance(body, PollBody) and body.providers:
        services = tuple(
            msgspec.structs.replace(each, providers=each.providers or body.providers)
            for each in capabilities.services
        )
        capabilities = msgspec.structs.replace(capabilities, services=services)
    live = body.live or LiveState(available_ram_gb=free_gb)
    slots = body.slots or body.max_concurrency or concurrent_jobs(body.capabilities) or 1
    return RegisterWorker(
        WorkerId(body.worker_id), capabilities, slots, live, body.instance or "", offline_reason
    )


def concurrent_jobs(capabilities: dict[str, Any]) -> int | None:
    performance = capabilities.get("performance")
    count = performance.get("concurrent_jobs") if isinstance(performance, dict) else None
    return count if isinstance(count, int) and 1 <= count <= MAX_SLOTS else None


def lease_answer(job: LeasedJob) -> LeaseAnswer:
    return LeaseAnswer(
        job.ref,
        job.worker_id,
        job.ttl_s,
        job.acknowledge_s,
        view_of(
            LeasedBody,
            job,
            id=job.job_id,
            payload=view_of(LeasedPayload, job),
            requirements=asked_for(job.requirements) or None,
        ),
    )


def leased_job(answer: LeaseAnswer) -> LeasedJob:
    """The lease as the worker's agent uses it."""
    job = answer.job
    return view_of(
        LeasedJob,
        job,
        ref=answer.lease,
        worker_id=WorkerId(answer.worker_id),
        ttl_s=answer.duration_s,
        acknowledge_s=answer.acknowledge_s,
        workflow=job.payload.workflow,
        attachments=job.payload.attachments,
        inputs=job.payload.inputs,
        fetched=(),
        tenant=DEFAULT_TENANT if job.tenant is None else TenantId(job.tenant),
        requirements=Requirements(),
    )


def heartbeat_answer(
    reply: HeartbeatReply, at: float, inputs: tuple[LeaseInputs, ...] = ()
) -> HeartbeatAnswer:
    return HeartbeatAnswer(
        reply.ttl_s,
        reply.alive,
        reply.lost,
        command_bodies(reply.commands, at),
        inputs,
        reply.missing,
    )


def command_bodies(commands: Iterable[Command], at: float) -> tuple[CommandBody, ...]:
    return tuple(
        CommandBody(each.action, each.job_id, each.lease_number, each.reason, at) for each in commands
    )


def commands_in(bodies: Iterable[CommandBody]) -> tuple[Command, ...]:
    """The commands that the worker knows. A newer hub may send others."""
    return tuple(
        msgspec.convert(msgspec.structs.asdict(each), Command) for each in bodies if each.action in ACTIONS
    )


def heartbeat_reply(answer: HeartbeatAnswer) -> HeartbeatReply:
    return HeartbeatReply(
        answer.duration_s,
        answer.alive,
        answer.lost,
        commands_in(answer.commands),
        answer.missing,
    )


def report_answer(reply: ReportReply, following: LeasedJob | None = None) -> ReportAnswer:
    return ReportAnswer(
        status_name(reply.phase), reply.will_retry, None if following is None else lease_answer(following)
    )
