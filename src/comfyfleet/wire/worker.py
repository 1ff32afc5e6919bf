"""The workers' door as bodies: register, poll, heartbeat, progress, the three reports that end a lease, commands.

A lease travels as one object that a worker sends back unchanged. Capabilities travel once; from then on their hash,
as the hub gave it, stands for them, so that a poll stays small.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from comfyfleet.model.calls import (
    ACTIONS,
    Command,
    HeartbeatReply,
    LeasedJob,
    ProgressReport,
    RegisterWorker,
    ReportReply,
)
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure
from comfyfleet.model.file import InputFile
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Attachment, JobResult, Timeouts
from comfyfleet.model.node_classes import NodeSignature, Widget
from comfyfleet.model.requirement import Environment
from comfyfleet.model.worker import Capabilities, LiveState
from comfyfleet.wire.answers import asked_for
from comfyfleet.wire.bodies import Name, Seconds
from comfyfleet.wire.status_names import modern_capabilities, status_name

MAX_SLOTS = 1_000
MAX_REPORTS = 10_000
MAX_WAIT_S = 60.0
MAX_CLASSES = 50_000

Slots = Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
Load = Annotated[int, Meta(ge=0, le=MAX_SLOTS)]
Wait = Annotated[float, Meta(ge=0, le=MAX_WAIT_S)]


class LeaseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker's right to run one job for a while. Sent back as it was received."""

    job_id: Name
    round: Annotated[int, Meta(ge=0, le=2**53)]
    number: Annotated[int, Meta(ge=0, le=2**53)]
    epoch: Annotated[int, Meta(ge=0, le=2**53)]
    token: Name


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class RegisterBody(_Call, frozen=True):
    worker_id: Name
    capabilities: dict[str, Any]
    environment: Environment | None = None
    slots: Slots | None = None
    max_concurrency: Slots | None = None
    """What `slots` was called."""
    live: LiveState | None = None
    instance: Name | None = None
    """Which agent it is, the same after a restart where it ran: another one is refused while this one is heard of."""
    offline_reason: Annotated[str, Meta(max_length=1_000)] | None = None
    """Why no server of the worker can be used. The worker is listed as offline, and needs to name no service."""


class DescribeBody(_Call, frozen=True):
    """For each node class its widgets in the editor's order, each a list: name, default, trait, choices. With what it
    accepts, a list too (inputs by name, output types, whether it comes with ComfyUI), it is kept once for all workers
    that declare the signature of both."""

    worker_id: Name
    definitions: Annotated[dict[str, tuple[Widget, ...]], Meta(max_length=MAX_CLASSES)]
    signatures: Annotated[dict[str, NodeSignature], Meta(max_length=MAX_CLASSES)] = {}


class PollBody(_Call, frozen=True):
    """With capabilities it registers too; with their hash it is refused as `not_found` when the hub has others."""

    worker_id: Name
    poll_id: Name | None = None
    """The same one gets the same lease. Without one, a lease whose answer was lost goes back after `acknowledge_s`."""
    wait_s: Wait = 30.0
    capabilities_hash: Name | None = None
    capabilities: dict[str, Any] | None = None
    environment: Environment | None = None
    slots: Slots | None = None
    max_concurrency: Slots | None = None
    current_load: Load | None = None
    """How many jobs it runs, whoever gave them: of two that suit a job alike the less loaded one gets it."""
    providers: Annotated[tuple[Name, ...], Meta(max_length=100)] = ()
    live: LiveState | None = None
    instance: Name | None = None


class ReportBody(_Call, frozen=True):
    lease: LeaseBody
    kind: ProgressKind
    data: dict[str, Any] = {}
    image: bytes | None = None
    """A preview, in base64."""


class HeartbeatBody(_Call, frozen=True):
    worker_id: Name
    leases: Annotated[tuple[LeaseBody, ...], Meta(max_length=MAX_SLOTS)] = ()
    reports: Annotated[tuple[ReportBody, ...], Meta(max_length=MAX_REPORTS)] = ()
    """How far they are: spares a worker that has little to tell a call of its own."""
    inputs: bool = False
    """Answer with fresh links to the inputs of these leases too."""


class ProgressBatch(_Call, frozen=True):
    reports: Annotated[tuple[ReportBody, ...], Meta(max_length=MAX_REPORTS)]


class NextPoll(_Call, frozen=True):
    """Asks for the next lease with the end of the last. Not waited for: where there is none now, the worker polls."""

    poll_id: Name


class CompleteBody(_Call, frozen=True):
    lease: LeaseBody
    result: JobResult = JobResult()
    seconds: Seconds = 0.0
    next: NextPoll | None = None


class FailBody(_Call, frozen=True):
    lease: LeaseBody
    failure: Failure
    seconds: Seconds = 0.0
    next: NextPoll | None = None


class ReleaseBody(_Call, frozen=True):
    lease: LeaseBody
    reason: Literal["drain", "cancelled", "declined", "retry"] = "drain"


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
    """At least this often, lease or not."""
    lost_after_s: float
    connected_at: float
    last_seen_at: float
    profile: str
    knows_nodes: bool | None = None
    """Whether the hub has been told what nodes of this signature accept. None: none was declared."""
    id: str = ""
    """The same as `worker_id`."""


class LeasedPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    workflow: dict[str, Any]
    attachments: tuple[Attachment, ...] = ()
    inputs: tuple[InputFile, ...] = ()
    """Files to fetch, check, and give to a node's input before the run. Without a `url`: it is not there any more."""


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
    """The trace that the job belongs to, for logs and for whoever is asked on its behalf (W3C)."""
    payload_sha256: str | None = None
    """Of what this lease runs, in hexadecimal. A worker that computes another one runs nothing, and fails the attempt
    as `payload_mismatch`."""
    tenant: str | None = None
    """Whose job it is."""
    priority: int = 0
    requirements: dict[str, Any] | None = None
    """What the caller said that it needs, as in a submission; none where nothing was said."""


class LeaseAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The lease ends after `duration_s` unless a heartbeat renews it, and after `acknowledge_s` unless a first one
    comes. A worker counts on its own clock.
    """

    lease: LeaseBody
    worker_id: str
    duration_s: float
    acknowledge_s: float
    job: LeasedBody


class LeaseInputs(msgspec.Struct, frozen=True):
    lease: LeaseBody
    inputs: tuple[InputFile, ...]


class CommandBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Actions that a worker does not know it passes over."""

    action: str
    job_id: str | None = None
    lease_number: int = 0
    reason: str = ""
    timestamp: float = 0.0
    """When the hub told it."""


class HeartbeatAnswer(msgspec.Struct, frozen=True):
    duration_s: float
    alive: tuple[LeaseBody, ...] = ()
    lost: tuple[LeaseBody, ...] = ()
    commands: tuple[CommandBody, ...] = ()
    inputs: tuple[LeaseInputs, ...] = ()
    """Of leases that are alive and have some, where they were asked for."""
    missing: tuple[str, ...] = ()
    """Node classes and models that jobs wait for and this worker does not have. One that finds them registers anew."""


class ReportAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    status: str
    will_retry: bool = False
    next: LeaseAnswer | None = None


class CommandsAnswer(msgspec.Struct, frozen=True):
    """Without commands before its time, it says that a heartbeat has something new."""

    commands: tuple[CommandBody, ...] = ()


_CANONICAL = msgspec.json.Encoder(order="deterministic")


def capabilities_hash(capabilities: Capabilities) -> str:
    """Workers need not know how it is made: they send back what they were given."""
    return hashlib.sha256(_CANONICAL.encode(capabilities)).hexdigest()[:32]


def registration(body: RegisterBody | PollBody) -> RegisterWorker:
    assert body.capabilities is not None, "a poll without capabilities registers nobody"
    given, free_gb = modern_capabilities(body.capabilities)
    try:
        capabilities = msgspec.convert(given, Capabilities, strict=False)
    except msgspec.ValidationError as error:
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"the capabilities cannot be understood: {error}"
        ) from error
    offline_reason = (isinstance(body, RegisterBody) and body.offline_reason) or ""
    names = [each.name for each in capabilities.services]
    if len(set(names)) != len(names) or not (names or offline_reason):
        raise Refusal(RefusalCode.INVALID_REQUEST, "capabilities name at least one service, and each once")
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


def lease_ref(body: LeaseBody) -> LeaseRef:
    return msgspec.convert(msgspec.structs.asdict(body), LeaseRef)


def lease_body(ref: LeaseRef) -> LeaseBody:
    return LeaseBody(ref.job_id, ref.round, ref.number, ref.epoch, ref.token)


def report(body: ReportBody) -> ProgressReport:
    return ProgressReport(lease_ref(body.lease), body.kind, body.data, body.image)


def lease_answer(job: LeasedJob) -> LeaseAnswer:
    return LeaseAnswer(
        lease_body(job.ref),
        job.worker_id,
        job.ttl_s,
        job.acknowledge_s,
        LeasedBody(
            job.job_id,
            job.service,
            job.workflow_hash,
            LeasedPayload(job.workflow, job.attachments, job.inputs),
            job.timeouts,
            job.include_outputs,
            job.attempt,
            job.metadata,
            job.traceparent,
            job.payload_sha256,
            job.tenant,
            job.priority,
            asked_for(job.requirements) or None,
        ),
    )


def leased_job(answer: LeaseAnswer) -> LeasedJob:
    """The other way, at the worker."""
    job = answer.job
    return LeasedJob(
        ref=lease_ref(answer.lease),
        worker_id=WorkerId(answer.worker_id),
        ttl_s=answer.duration_s,
        acknowledge_s=answer.acknowledge_s,
        workflow=job.payload.workflow,
        workflow_hash=WorkflowHash(job.workflow_hash),
        service=job.service,
        timeouts=job.timeouts,
        include_outputs=job.include_outputs,
        attachments=job.payload.attachments,
        inputs=job.payload.inputs,
        attempt=job.attempt,
        metadata=job.metadata,
        traceparent=job.traceparent,
        payload_sha256=job.payload_sha256,
        tenant=DEFAULT_TENANT if job.tenant is None else TenantId(job.tenant),
        priority=job.priority,
    )


def beat_answer(beat: HeartbeatReply, at: float, inputs: tuple[LeaseInputs, ...] = ()) -> HeartbeatAnswer:
    return HeartbeatAnswer(
        beat.ttl_s,
        tuple(map(lease_body, beat.alive)),
        tuple(map(lease_body, beat.lost)),
        command_bodies(beat.commands, at),
        inputs,
        beat.missing,
    )


def command_bodies(commands: Iterable[Command], at: float) -> tuple[CommandBody, ...]:
    return tuple(
        CommandBody(each.action, each.job_id, each.lease_number, each.reason, at) for each in commands
    )


def commands_in(bodies: Iterable[CommandBody]) -> tuple[Command, ...]:
    """At the worker: those that it knows. A newer hub may have others."""
    return tuple(
        msgspec.convert(msgspec.structs.asdict(each), Command) for each in bodies if each.action in ACTIONS
    )


def beat(answer: HeartbeatAnswer) -> HeartbeatReply:
    return HeartbeatReply(
        answer.duration_s,
        tuple(map(lease_ref, answer.alive)),
        tuple(map(lease_ref, answer.lost)),
        commands_in(answer.commands),
        answer.missing,
    )


def settled_answer(settled: ReportReply, following: LeasedJob | None = None) -> ReportAnswer:
    return ReportAnswer(
        status_name(settled.phase), settled.will_retry, None if following is None else lease_answer(following)
    )
