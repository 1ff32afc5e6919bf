"""What crosses the two doors: the requests and answers of `JobApi` and `WorkerApi` as plain values.

The engine takes and gives them in process; over HTTP the same values are encoded. No transport is known here.

Everything a store keeps of one job: what another store needs to go on with it as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from comfyfleet.model.dispatch import Attempt, Dispatch, LeaseRef, Phase
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
    """What keeps the nearest worker from it; a warning, not a refusal, unless the caller asked for one."""
    is_repeat: bool = False
    retry_requested: bool = False
    """It runs, and is to run again once its worker has stopped it."""


class JobView(msgspec.Struct, frozen=True):
    """A job as its caller sees it: the record, the routing state, every attempt."""

    job: Job
    dispatch: Dispatch
    attempts: tuple[Attempt, ...] = ()

    @property
    def worker_id(self) -> WorkerId | None:
        """Who runs it, or ran it last."""
        if self.dispatch.lease is not None:
            return self.dispatch.lease.worker_id
        if self.job.worker_id is None and self.dispatch.phase.is_final and self.attempts:
            return self.attempts[-1].worker_id
        return self.job.worker_id

    @property
    def started_at(self) -> float | None:
        """Of the run it is in, or ended with. None while it waits, and where that run never began."""
        return self.job.started_at if self._has_begun(self.job.started_at) else None

    @property
    def prompt_id(self) -> str | None:
        """As `started_at`."""
        run = self._attempt_id
        if self.dispatch.phase is Phase.QUEUED or (run and self.job.prompt_id != prompt_id_of(run)):
            return None
        return self.job.prompt_id

    def _has_begun(self, started_at: float | None) -> bool:
        """Whether that is a time within the run it is in, or ended with."""
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
    """Which jobs a list shows. What is None or empty lets every job through."""

    tenant: TenantId | None = None
    phase: Phase | None = None
    workflow_hash: WorkflowHash | None = None
    metadata: dict[str, str] = {}
    submitted_after: float | None = None
    submitted_before: float | None = None
    unrunnable: bool = False
    """Only those that wait though no worker which is here may take them."""


class JobPage(msgspec.Struct, frozen=True):
    """`after` is where the next page begins. None: this was the last."""

    jobs: tuple[Job, ...]
    after: JobId | None = None


class CancelReply(msgspec.Struct, frozen=True):
    phase: Phase
    cancel_requested: bool


class WorkerMismatch(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why one worker does not take the job: the first reason and all of them."""

    worker_id: WorkerId
    reason: str
    reasons: tuple[str, ...] = ()
    count: int = 1
    """Of workers that the caller does not know by name, how many have these reasons."""


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to "why is my job not running?"."""

    job_id: JobId
    phase: Phase
    summary: str
    workers: tuple[WorkerMismatch, ...] = ()
    able: tuple[WorkerId, ...] = ()
    able_others: int = 0
    """How many can take it beside those that the caller knows by name."""
    nearest: WorkerId | None = None
    position: int | None = None
    estimated_start_s: float | None = None
    id: JobId | None = None
    """The same as `job_id`, as every other answer about a job has it."""


class RegisterWorker(msgspec.Struct, frozen=True, omit_defaults=True):
    worker_id: WorkerId
    capabilities: Capabilities
    slots: int = 1
    live: LiveState = LiveState()
    instance: str = ""
    """Which agent it is, the same after a restart where it ran. Empty: it does not say."""
    offline_reason: str = ""
    """Why its server cannot be used, where none of it ever could: the worker is known, and takes nothing."""


class Poll(msgspec.Struct, frozen=True, omit_defaults=True):
    worker_id: WorkerId
    poll_id: PollId
    wait_s: float = 30.0
    instance: str = ""
    current_load: int | None = None
    """How many of its slots are taken, as it says itself. None: all but those that ask here."""


class LeasedJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A lease with what its holder needs to run the job."""

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
    """Files to fetch from the hub before the run."""
    fetched: tuple[FetchedFile, ...] = ()
    """Those that its worker has fetched; on its own disk, never on a wire."""
    attempt: int = 1
    metadata: dict[str, Any] | None = None
    traceparent: str | None = None
    """The trace that the job belongs to (W3C)."""
    payload_sha256: str | None = None
    """In hexadecimal. The agent runs nothing else (`model/payload_digest.py`). None: a hub that does not say."""
    tenant: TenantId = DEFAULT_TENANT
    priority: int = 0
    requirements: Requirements = Requirements()
    """As the caller asked."""

    @property
    def job_id(self) -> JobId:
        return self.ref.job_id

    @property
    def attempt_id(self) -> str:
        return self.ref.attempt_id


Action = Literal["cancel", "retry", "pause", "resume", "drain", "refresh"]
ACTIONS: frozenset[str] = frozenset(get_args(Action))


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a worker is told with any answer it gets."""

    action: Action
    job_id: JobId | None = None
    lease_number: int = 0
    reason: str = ""


class HeartbeatReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a heartbeat: which leases live on, which are lost, and what to do."""

    ttl_s: float
    alive: tuple[LeaseRef, ...] = ()
    lost: tuple[LeaseRef, ...] = ()
    commands: tuple[Command, ...] = ()
    missing: tuple[str, ...] = ()
    """Node classes and models that jobs wait for and this worker does not have: to be looked for while that is so."""


class ProgressReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """News from a running attempt."""

    ref: LeaseRef
    kind: ProgressKind
    data: dict[str, Any] = {}
    image: bytes | None = None


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    ref: LeaseRef
    result: JobResult
    seconds: float = 0.0


class FailureReport(msgspec.Struct, frozen=True, omit_defaults=True):
    ref: LeaseRef
    failure: Failure
    seconds: float = 0.0


class Release(msgspec.Struct, frozen=True, omit_defaults=True):
    """The worker gives the lease back. `cancelled` confirms that the run was stopped."""

    ref: LeaseRef
    reason: Literal["drain", "cancelled", "declined", "retry"] = "drain"


class ReportReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to a report that ends a lease."""

    phase: Phase
    will_retry: bool = False


class PendingRegistration(msgspec.Struct, frozen=True):
    """A worker without an engine of its own that waits to be admitted, or to be let go."""

    worker_id: WorkerId
    text: bytes
    """What it declares, as it was written. Empty: it leaves."""
    call: RegisterWorker | None = None
    problem: str = ""
    """Why what it declares cannot be read."""


class DirectWorkerFailure(msgspec.Struct, frozen=True):
    """A failure that a worker without an engine has told, and that waits for a verdict."""

    text: bytes
    call: FailureReport


class DirectWorkerCompletion(msgspec.Struct, frozen=True):
    """A run that a worker without an engine completed, and that there may be something to learn from."""

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
    idle_slots: int
    payload_bytes: int
    """What the payloads of all jobs that are open take."""


class DirectWorkerBacklog(msgspec.Struct, frozen=True):
    """What workers without an engine have left for one to do."""

    applicants: tuple[PendingRegistration, ...] = ()
    reports: tuple[DirectWorkerFailure, ...] = ()
    seen: Mapping[WorkerId, float] = {}
    """When each of them last called."""
    finished: int = 0
    """How many of their runs nobody has learned from yet."""


class RunningAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a service knows of an attempt: `unknown`, `waiting`, `running`, or how it ended."""

    state: str
    result: JobResult | None = None


class JobSnapshot(msgspec.Struct, frozen=True):
    dispatch: Dispatch
    job: Job
    facts: tuple[Fact, ...]
    attempts: tuple[Attempt, ...]
