"""The messages of the WebSocket `/hub`, from callers, monitors and workers, and the events it sends.

Names and statuses are the old ones; each message does the same as its HTTP route.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from comfyfleet.model.access import Role
from comfyfleet.model.bounds import Name, Reason, Seconds
from comfyfleet.model.calls import LeasedJob, WorkerReleaseReason
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobResult
from comfyfleet.wire.answers import asked_for
from comfyfleet.wire.bodies import LegacySubmitBody
from comfyfleet.wire.progress import FactBody, FleetBody, ProgressBody, ProgressEventBody
from comfyfleet.wire.route import CALLERS, JOB_READERS, OPERATORS, WORKERS
from comfyfleet.wire.status_names import StatusDialect, parse_status, status_name
from comfyfleet.wire.worker import Load, Slots, Wait

_BESIDE = frozenset({"type", "request_id", "message_id", "timestamp", "client_id", "traceparent"})
"""Fields that any message may have."""


class _Said(msgspec.Struct, frozen=True):
    """Unknown fields are ignored: old clients send many."""


class JobMessage(_Said, frozen=True):
    job_id: Name


class CancelJob(JobMessage, frozen=True):
    reason: Reason = ""


class Monitor(_Said, frozen=True):
    job_id: Name | None = None
    worker_id: Name | None = None
    tenant: Name | None = None
    kind: Name | None = None
    metadata: dict[str, str] = {}


class WorkerMessage(_Said, frozen=True):
    worker_id: Name
    """A worker, or `*` for all."""


class EmptyMessage(_Said, frozen=True):
    pass


class RegisterWorkerMessage(_Said, frozen=True):
    worker_id: Name
    capabilities: dict[str, Any]
    max_concurrency: Slots | None = None
    slots: Slots | None = None
    instance: Name | None = None


class RequestJob(_Said, frozen=True):
    """With capabilities it also registers a worker that is unknown or has other capabilities."""

    worker_id: Name
    capabilities: dict[str, Any] | None = None
    poll_id: Name | None = None
    wait_s: Wait = 0.0
    current_load: Load | None = None


class LeaseMessage(_Said, frozen=True):
    """Without a lease, the job's lease is the one that this connection received."""

    job_id: Name
    worker_id: Name | None = None
    lease: LeaseRef | None = None


class UpdateProgress(LeaseMessage, frozen=True, kw_only=True):
    progress: dict[str, Any] | float


class HeartbeatMessage(_Said, frozen=True):
    worker_id: Name
    leases: Annotated[tuple[LeaseRef, ...], Meta(max_length=1_000)] = ()


class CompleteJob(LeaseMessage, frozen=True):
    result: Any = None
    seconds: Seconds = 0.0


class FailJob(LeaseMessage, frozen=True):
    error: Any = None
    seconds: Seconds = 0.0


class ReleaseJob(LeaseMessage, frozen=True):
    reason: WorkerReleaseReason = "drain"


class MessageKind(NamedTuple):
    roles: frozenset[Role]
    body: type[msgspec.Struct]
    is_old: bool = False
    """HTTP and Server-Sent Events replace it."""


KINDS: dict[str, MessageKind] = {
    "submit_job": MessageKind(CALLERS, LegacySubmitBody, is_old=True),
    "subscribe_progress": MessageKind(JOB_READERS, JobMessage, is_old=True),
    "unsubscribe_progress": MessageKind(JOB_READERS, JobMessage, is_old=True),
    "cancel_job": MessageKind(CALLERS, CancelJob, is_old=True),
    "retry_job": MessageKind(CALLERS, JobMessage, is_old=True),
    "pause_job": MessageKind(CALLERS, JobMessage, is_old=True),
    "resume_job": MessageKind(CALLERS, JobMessage, is_old=True),
    "subscribe_monitor": MessageKind(JOB_READERS, Monitor, is_old=True),
    "unsubscribe_monitor": MessageKind(JOB_READERS, EmptyMessage, is_old=True),
    "drain_worker": MessageKind(OPERATORS, WorkerMessage, is_old=True),
    "pause_worker": MessageKind(OPERATORS, WorkerMessage, is_old=True),
    "resume_worker": MessageKind(OPERATORS, WorkerMessage, is_old=True),
    "pause_queue": MessageKind(OPERATORS, EmptyMessage, is_old=True),
    "resume_queue": MessageKind(OPERATORS, EmptyMessage, is_old=True),
    "register_worker": MessageKind(WORKERS, RegisterWorkerMessage),
    "request_job": MessageKind(WORKERS, RequestJob),
    "update_progress": MessageKind(WORKERS, UpdateProgress),
    "heartbeat": MessageKind(WORKERS, HeartbeatMessage),
    "complete_job": MessageKind(WORKERS, CompleteJob),
    "fail_job": MessageKind(WORKERS, FailJob),
    "release_job": MessageKind(WORKERS, ReleaseJob),
    "ping": MessageKind(JOB_READERS | WORKERS, EmptyMessage),
}

AGENT_PROTOCOL = "comfyfleet.worker.v1"
"""The subprotocol of agents: each message is a call of the worker protocol, each answer names its call."""

AGENT_MESSAGE_BYTES = 1024 * 1024
"""Every hub accepts messages of this size. Larger ones go over HTTP: compressed, and without delaying heartbeats."""


class AgentKind(NamedTuple):
    route: str
    """The HTTP route with the same body, answer and meaning."""
    answered: str


AGENT_KINDS: dict[str, AgentKind] = {
    "register_worker": AgentKind("worker_register", "worker_registered"),
    "request_job": AgentKind("worker_poll", "job_assigned"),
    "heartbeat": AgentKind("worker_heartbeat", "heartbeat_ack"),
    "update_progress": AgentKind("worker_progress", "progress_ack"),
    "complete_job": AgentKind("worker_complete", "job_completed"),
    "fail_job": AgentKind("worker_fail", "job_failed"),
    "release_job": AgentKind("worker_release", "job_released"),
    "await_commands": AgentKind("worker_commands", "worker_commands"),
    "unregister_worker": AgentKind("worker_unregister", "worker_unregistered"),
}
WITHDRAW = "withdraw"
"""Ends a waiting call, which then gets no answer."""
NO_JOB = "no_job"
ERROR = "error"

_NO_BODY = msgspec.Raw(b"{}")


class AgentCall(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    request_id: Annotated[int, Meta(ge=0, le=2**53)]
    body: msgspec.Raw = _NO_BODY
    traceparent: str | None = None


class AgentAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`status` and `body` are those of the HTTP answer; the body of an `error` is a problem."""

    type: str
    request_id: int
    status: int
    body: msgspec.Raw = _NO_BODY


ALIASES = {"cancel": "cancel_job", "retry": "retry_job", "pause": "pause_job", "resume": "resume_job"}


def read(name: str, message: dict[str, Any]) -> Any:
    given = {field: value for field, value in message.items() if field not in _BESIDE}
    try:
        return msgspec.convert(given, KINDS[name].body)
    except msgspec.ValidationError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the message {name!r} is not valid: {error}") from error


def message_of(event: Any) -> dict[str, Any] | None:
    """An event as a message to old callers and monitors. None: they do not get it."""
    match event:
        case ProgressBody():
            status = status_name(parse_status(event.status), StatusDialect.SOCKET)
            record = {**msgspec.structs.asdict(event), "status": status}
            job_id = record.pop("id")
            return {"type": "job_progress", "job_id": job_id, "progress": event.percentage or 0.0, **record}
        case ProgressEventBody(kind="preview"):
            return {
                "type": "job_preview",
                "job_id": event.id,
                "image": event.image,
                "node": event.data.get("node"),
            }
        case FleetBody():
            return {"type": "monitor_event", "event": event.kind, **_given(event)}
        case FactBody(kind="completed"):
            result = event.result or JobResult()
            return {"type": "job_completed", "job_id": event.id, "status": "completed", "result": result}
        case FactBody(kind="failed"):
            error = "" if event.error is None else event.error.message
            return {
                "type": "job_failed",
                "job_id": event.id,
                "status": "failed",
                "error": error,
                "failure": event.error,
                "attempt": (event.data or {}).get("attempt"),
            }
        case FactBody(kind="cancelled"):
            reason = (event.data or {}).get("reason", "")
            return {"type": "job_cancelled", "job_id": event.id, "status": "cancelled", "reason": reason}
    # The progress that follows shows all other changes.
    return None


def assigned(job: LeasedJob) -> dict[str, Any]:
    return {
        "type": "job_assigned",
        "job_id": job.job_id,
        "worker_id": job.worker_id,
        "lease": job.ref,
        "duration_s": job.ttl_s,
        "acknowledge_s": job.acknowledge_s,
        "job_data": {
            "id": job.job_id,
            "service": job.service,
            "service_type": job.service,
            "workflow_hash": job.workflow_hash,
            "payload": {"workflow": job.workflow, "attachments": job.attachments, "inputs": job.inputs},
            "timeouts": job.timeouts,
            "include_outputs": job.include_outputs,
            "attempt": job.attempt,
            "metadata": job.metadata,
            "traceparent": job.traceparent,
            "payload_sha256": job.payload_sha256,
            "tenant": job.tenant,
            "customer_id": job.tenant,
            "priority": job.priority,
            "requirements": asked_for(job.requirements),
        },
    }


def result_of(given: Any) -> JobResult:
    """A result in the current form. Anything else becomes the output of a node named `result`."""
    if given is None:
        return JobResult()
    if isinstance(given, dict) and given.keys() <= set(JobResult.__struct_fields__):
        try:
            return msgspec.convert(given, JobResult)
        except msgspec.ValidationError:
            pass
    return JobResult(outputs={"result": given if isinstance(given, dict) else {"value": given}})


def failure_of(given: Any) -> Failure:
    """A failure in the current form, or one of kind `unknown` with the given text."""
    if isinstance(given, dict):
        try:
            return msgspec.convert(given, Failure)
        except msgspec.ValidationError:
            return Failure(
                FailureKind.UNKNOWN, str(given.get("message") or given.get("error") or given)[:10_000]
            )
    return Failure(FailureKind.UNKNOWN, str(given or "The worker reported no reason.")[:10_000])


def _given(event: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(event).items() if value is not None}
