"""Requests and replies of the job API and the `WorkerApi` as plain values, without knowledge of a transport.

The engine uses these values in process. Over HTTP the same values are encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import msgspec

from comfyfleet.model.bounds import Seconds
from comfyfleet.model.dispatch import Attempt, Dispatch, LeaseRef, Phase
from comfyfleet.model.estimate import JobEstimate
from comfyfleet.model.fact import Fact, ProgressKind
from comfyfleet.model.failure import Failure
from comfyfleet.model.file import FetchedFile, InputFile
from comfyfleet.model.ids import (
    DEFAULT_TENANT,
    JobId,
    PollId,
    TenantId,
    WorkerId,
    WorkflowHash,
    prompt_id_of,
)
from comfyfleet.model.job import Attachment, Job, JobResult, Timeouts
from comfyfleet.model.requirement import Requirements
from comfyfleet.model.worker import Capabilities, LiveState


class Submitted(msgspec.Struct, frozen=True, omit_defaults=True):
    job_id: JobId
    phase: Phase
    workflow_hash: WorkflowHash
    seeds: dict[str, int] | None = None
    unworkable: tuple[str, ...] = ()
    """Why the nearest worker cannot take the job: a warning, unless the caller set `require_workable`."""
    is_repeat: bool = False
    retry_requested: bool = False
    """The job is running. It runs again when its worker has stopped it."""


class JobView(msgspec.Struct, frozen=True):
    """A job as its caller sees it: the record, the dispatch, all attempts."""

    job: Job
    dispatch: Dispatch
    attempts: tuple[Attempt, ...] = ()

    @property
    def worker_id(self) -> WorkerId | None:
        """The worker that runs the job or ran it last."""
        if self.dispatch.lease is not None:
            return self.dispatch.lease.worker_id
        if self.job.worker_id is None and self.dispatch.phase.is_final and self.attempts:
            return self.attempts[-1].worker_id
        return self.job.worker_id

    @property
    def started_at(self) -> float | None:
        """The start of the current or last run. None if the job waits or this run did not begin."""
        return self.job.started_at if self._has_begun(self.job.started_at) else None

    @property
    def prompt_id(self) -> str | None:
        """The prompt id of the current or last run, or None as for `started_at`."""
        run = self._attempt_id
        if self.dispatch.phase is Phase.QUEUED or (run and self.job.prompt_id != prompt_id_of(run)):
            return None
        return self.job.prompt_id

    def _has_begun(self, started_at: float | None) -> bool:
        """Whether `started_at` belongs to the current or last run, not to an earlier one."""
        if started_at is None or self.dispatch.phase is Phase.QUEUED:
            return False
        if self.dispatch.lease is not None:
            return started_at >= self.dispatch.lease.leased_at
        return not self.attempts or started_at >= self.attempts[-1].started_at

    @property
    def _attempt_id(self) -> str | None:
        if self.dispatch.lease is not None:
            return self.dispatch.lease_ref().attempt_id
        return self.attempts[-1].attempt_id if self.attempts else None


class JobFilter(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which jobs a list shows. A field that is None or empty does not filter."""

    tenant: TenantId | None = None
    phase: Phase | None = None
    workflow_hash: WorkflowHash | None = None
    metadata: dict[str, str] = {}
    submitted_after: float | None = None
    submitted_before: float | None = None
    unrunnable: bool = False
    """Only waiting jobs that no online worker can run."""


class JobPage(msgspec.Struct, frozen=True):
    """`after` is the cursor of the next page. None: this is the last page."""

    jobs: tuple[Job, ...]
    after: JobId | None = None


class CancelReply(msgspec.Struct, frozen=True):
    phase: Phase
    cancel_requested: bool


class WorkerMismatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why one worker does not take the job: the first reason and all reasons."""

    worker_id: WorkerId
    reason: str
    reasons: tuple[str, ...] = ()
    count: int = 1
    """How many workers have these reasons. Workers that the caller may not name are counted together."""


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to "why is my job not running?"."""

    job_id: JobId
    phase: Phase
    summary: str
    workers: tuple[WorkerMismatch, ...] = ()
    able: tuple[WorkerId, ...] = ()
    able_others: int = 0
    """How many further workers can take the job, which the caller may not see by name."""
    nearest: WorkerId | None = None
    position: int | None = None
    estimated_start_s: float | None = None
    """In how many seconds a waiting job is expected to start."""
    id: JobId | None = None
    """The same as `job_id`. Every other reply about a job has this field."""
    estimate: JobEstimate | None = None
    """When the job is expected to start and to end."""


class RegisterWorker(msgspec.Struct, frozen=True, omit_defaults=True):
    worker_id: WorkerId
    capabilities: Capabilities
    slots: int = 1
    live: LiveState = LiveState()
    instance: str = ""
    """Identifies the agent. It stays the same after a restart on the same machine. Empty: not given."""
    offline_reason: str = ""
    """Why none of its servers could be used yet. The worker is registered but takes no jobs."""


class Poll(msgspec.Struct, frozen=True, omit_defaults=True):
    worker_id: WorkerId
    poll_id: PollId
    wait_s: float = 30.0
    instance: str = ""
    current_load: int | None = None
    """How many slots are in use, according to the worker. None: all slots except those that poll."""


class LeasedJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A lease with everything that the worker needs to run the job."""

    ref: LeaseRef
    worker_id: WorkerId
    ttl_s: float
    acknowledge_s: float
    workflow: dict[str, Any]
    workflow_hash: WorkflowHash
    service: str = "comfyui"
    timeouts: Timeouts = Timeouts()
    include_outputs: tuple[str, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    inputs: tuple[InputFile, ...] = ()
    """Files that the worker fetches from the hub before the run."""
    fetched: tuple[FetchedFile, ...] = ()
    """Input files on the worker's disk. They are never sent."""
    attempt: int = 1
    metadata: dict[str, Any] | None = None
    traceparent: str | None = None
    """W3C trace context of the job."""
    payload_sha256: str | None = None
    """Hexadecimal. The agent runs only a payload with this digest. None: the hub sends no digest."""
    tenant: TenantId = DEFAULT_TENANT
    priority: int = 0
    requirements: Requirements = Requirements()

    @property
    def job_id(self) -> JobId:
        return self.ref.job_id

    @property
    def attempt_id(self) -> str:
        return self.ref.attempt_id


Action = Literal["cancel", "retry", "pause", "resume", "drain", "refresh"]
ACTIONS: frozenset[str] = frozenset(get_args(Action))


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """An instruction to a worker. Any reply to the worker can carry it."""

    action: Action
    job_id: JobId | None = None
    lease_number: int = 0
    reason: str = ""


class HeartbeatReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reply to a heartbeat: extended leases, lost leases, and commands."""

    ttl_s: float
    alive: tuple[LeaseRef, ...] = ()
    lost: tuple[LeaseRef, ...] = ()
    commands: tuple[Command, ...] = ()
    missing: tuple[str, ...] = ()
    """Node classes and models that this worker lacks and that waiting jobs need. The agent looks for them again."""


class LeaseReport(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    ref: LeaseRef = msgspec.field(name="lease")


class ProgressReport(LeaseReport, frozen=True):
    """Progress of a running attempt. It may be lost."""

    kind: ProgressKind
    data: dict[str, Any] = {}
    image: bytes | None = None
    """A preview in base64."""


class Completion(LeaseReport, frozen=True):
    result: JobResult = JobResult()
    seconds: Seconds = 0.0


class FailureReport(LeaseReport, frozen=True):
    failure: Failure
    seconds: Seconds = 0.0


WorkerReleaseReason = Literal["drain", "cancelled", "declined", "retry"]
"""`drain`: the worker leaves. `cancelled`: the run was stopped. `retry`: the run was stopped for a requested retry, or
because the worker could not reach the hub. `declined`: the service is busy with other work, or its server is down or
no longer configured. An engine that releases a lease gives its reason in words."""
DECLINED: Final[WorkerReleaseReason] = "declined"


class Release(LeaseReport, frozen=True):
    """The worker gives the lease back. `cancelled` confirms that the run was stopped."""

    reason: WorkerReleaseReason = "drain"


class ReportReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reply to a report that ends a lease."""

    phase: Phase
    will_retry: bool = False


class PendingRegistration(msgspec.Struct, frozen=True):
    """A direct worker that waits for its registration or deregistration."""

    worker_id: WorkerId
    text: bytes
    """The declaration as the worker wrote it. Empty: it deregisters."""
    call: RegisterWorker | None = None
    problem: str = ""
    """Why the declaration cannot be read."""


class DirectWorkerFailure(msgspec.Struct, frozen=True):
    """A failure that a direct worker has reported and that an engine must handle."""

    text: bytes
    call: FailureReport


class DirectWorkerCompletion(msgspec.Struct, frozen=True):
    """A run that a direct worker completed. An engine adds it to the workflow statistics."""

    job_id: JobId
    worker_id: WorkerId
    seconds: float


class QueueStats(msgspec.Struct, frozen=True):
    waiting: int
    delayed: int
    paused: int
    leased: int
    completed: int
    failed: int
    cancelled: int
    workers: int
    """Connected workers."""
    idle_slots: int
    payload_bytes: int
    """Bytes of the payloads of all open jobs."""


class DirectWorkerBacklog(msgspec.Struct, frozen=True):
    """Work that direct workers leave to an engine."""

    registrations: tuple[PendingRegistration, ...] = ()
    reports: tuple[DirectWorkerFailure, ...] = ()
    seen: Mapping[WorkerId, float] = {}
    """When each direct worker last called."""
    finished: int = 0
    """How many completed runs are not in the workflow statistics yet."""


class RunningAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of an attempt at a service: `unknown`, `waiting`, `running`, or its outcome."""

    state: str
    result: JobResult | None = None


class JobSnapshot(msgspec.Struct, frozen=True):
    """Everything that a store holds of one job, so that another store can continue it."""

    dispatch: Dispatch
    job: Job
    facts: tuple[Fact, ...]
    attempts: tuple[Attempt, ...]
