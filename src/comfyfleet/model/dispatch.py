"""The dispatch: the routing state of a job, its lease and its attempts. It holds no payload.

A change of a dispatch is a value (`Change`) that policy computes and a store applies under a `Guard`. Stores compare
and save; they never decide.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from comfyfleet.model.block import Block, Pair, tenant_target
from comfyfleet.model.bounds import Number
from comfyfleet.model.fact import Fact, FactDraft
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import (
    DEFAULT_TENANT,
    ClassKey,
    JobId,
    LeaseToken,
    PollId,
    ProfileKey,
    TenantId,
    WorkerId,
    WorkflowHash,
)
from comfyfleet.model.tenant import DEFAULT_CHARGE_S

TOMBSTONE_S = 60.0
"""How long a store keeps an ended dispatch after its tenant database has settled it. The outbox relay discards what
it read more than 30 s ago (decision 0015); a relay that was delayed less must find the end, not reopen the round."""


class Phase(StrEnum):
    QUEUED = "queued"
    LEASED = "leased"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED)


class Readiness(StrEnum):
    """Whether a queued dispatch can be leased: only `in_lane` can."""

    IN_LANE = "in_lane"
    DELAYED = "delayed"
    PAUSED = "paused"


class Stop(StrEnum):
    """Why the worker must stop a running job."""

    CANCEL = "cancel"
    PAUSE = "pause"
    """The job is paused afterwards."""
    RETRY = "retry"
    """The job returns to its place in the queue for a new attempt."""


class LaneKey(NamedTuple):
    """Jobs with equal keys differ only by age for a lease."""

    class_key: ClassKey
    tenant: TenantId
    priority: int
    workflow_hash: WorkflowHash


class LeaseRef(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """One worker's right to run one job for a while. The worker sends it back as it received it."""

    # Number and epoch are the fencing token.
    job_id: Annotated[JobId, Meta(min_length=1, max_length=256)]
    round: Number
    number: Number
    """The number of the lease within the job."""
    epoch: Number
    token: Annotated[LeaseToken, Meta(min_length=1, max_length=256)]
    """The secret of the lease."""

    @property
    def attempt_id(self) -> str:
        return f"{self.job_id}/{self.round}/{self.number}/{self.epoch}"


class Lease(msgspec.Struct, frozen=True, gc=False):
    worker_id: WorkerId
    number: int
    epoch: int
    token: LeaseToken
    poll_id: PollId
    leased_at: float
    expires_at: float
    is_acknowledged: bool = False
    """The first heartbeat arrived. Until then the lease is short, and its expiry costs no attempt."""
    run_s: float = 0.0
    """The expected duration of the run with its models loaded. 0: not known, as for direct workers."""
    load_s: float = 0.0
    """The expected time to load its models before the run. 0: they are loaded."""


class Dispatch(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """At most about a kilobyte, independent of the payload."""

    job_id: JobId
    class_key: ClassKey
    workflow_hash: WorkflowHash
    priority: int
    """The effective priority, by which the store orders."""
    sequence: int = 0
    """The place in the queue. The first enqueue assigns it, and retries keep it."""
    place: int = 0
    """How many jobs of its priority or a higher one waited in lanes when it was first enqueued, plus the value with
    which it came: 1 if no slot was idle. Retries keep it."""
    tenant: TenantId = DEFAULT_TENANT
    round: int = 1
    revision: int = 0
    phase: Phase = Phase.QUEUED
    standing: Readiness = Readiness.IN_LANE
    queued_at: float = 0.0
    """When the job was submitted. Retries keep it."""
    wake_at: float | None = None
    """When policy must look at this dispatch again. The lease has its own end."""
    not_before: float | None = None
    lease: Lease | None = None
    lease_number: int = 0
    attempts: int = 0
    """All leases of all rounds, whether they count towards `max_attempts` or not."""
    charged: int = 0
    """How many attempts of this round count towards `max_attempts`. Credits are not meant."""
    worker_faults: int = 0
    releases: int = 0
    """How often the job was released in this round. Declined leases do not count."""
    max_attempts: int = 3
    failed_on: tuple[WorkerId, ...] = ()
    expired_on: tuple[WorkerId, ...] = ()
    cancel_requested_at: float | None = None
    relaxed_class: ClassKey | None = None
    """The class that replaces `class_key` at `relax_at`: a preference restricts only for a limited time."""
    relax_at: float | None = None
    base_priority: int = 0
    """The priority without the bonus of a near deadline."""
    priority_ceiling: int | None = None
    """The tenant's maximum. It also limits the bonus of a near deadline."""
    deadline_at: float | None = None
    fails_at_deadline: bool = True
    expires_at: float | None = None
    """The end of the total timeout, which starts at the submit. The end of the lease is `lease.expires_at`."""
    awaits_jobs: bool = msgspec.field(default=False, name="is_held")
    """The job waits for the jobs in its `after`, and is in no lane until they have completed."""
    is_awaited: bool = False
    """Other jobs wait for this one, so its end must notify them."""
    payload_bytes: int = 0
    """The size of the stored payload: JSON plus raw attachments."""
    payload_sha256: bytes | None = None
    """Digest of what a lease runs (`model/payload_digest.py`). None: not known before the lease, because the job
    waits for files of other jobs, is encrypted (a digest would confirm a guess), or came from an older version."""
    has_tenant_database: bool = msgspec.field(default=False, name="is_apart")
    """The job record is in a tenant database, which must settle the end of the job."""
    settled_at: float | None = None
    """When the tenant database settled the end of this round."""
    server_deaths: int = 0
    """How many servers died while they ran this job."""
    pause_requested_at: float | None = None
    """Set while leased: the worker must stop the job, which is then paused."""
    retry_requested_at: float | None = None
    """Set while leased: the worker must stop the job, which then waits again. Excludes `pause_requested_at`."""
    cancel_reason: str = ""
    """The reason that the canceller gave."""

    @property
    def stop(self) -> Stop | None:
        """Why the worker must stop the job. A cancellation takes precedence."""
        if self.cancel_requested_at is not None:
            return Stop.CANCEL
        if self.pause_requested_at is not None:
            return Stop.PAUSE
        return None if self.retry_requested_at is None else Stop.RETRY

    @property
    def stop_requested_at(self) -> float | None:
        match self.stop:
            case Stop.CANCEL:
                return self.cancel_requested_at
            case Stop.PAUSE:
                return self.pause_requested_at
            case _:
                return self.retry_requested_at

    @property
    def due_at(self) -> float | None:
        """The next time at which the sweeper must act on this dispatch."""
        if self.lease is None:
            return self.wake_at
        return self.lease.expires_at if self.wake_at is None else min(self.wake_at, self.lease.expires_at)

    @property
    def lane(self) -> LaneKey:
        return LaneKey(self.class_key, self.tenant, self.priority, self.workflow_hash)

    @property
    def block_targets(self) -> tuple[str, str, str]:
        """Targets of blocks that apply to this job: its workflow, its workflow for its tenant, the job itself."""
        return self.workflow_hash, tenant_target(self.workflow_hash, self.tenant), self.job_id

    @property
    def stands_in_lane(self) -> bool:
        return self.phase is Phase.QUEUED and self.standing is Readiness.IN_LANE

    @property
    def is_unsettled(self) -> bool:
        """The job has ended, and the tenant database must still settle it."""
        return self.has_tenant_database and self.settled_at is None and self.phase.is_final

    def lease_ref(self) -> LeaseRef:
        assert self.lease is not None, "only a leased dispatch has a lease"
        return LeaseRef(self.job_id, self.round, self.lease.number, self.lease.epoch, self.lease.token)


class AttemptOutcome(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    """The lease expired after its first heartbeat."""
    RELEASED = "released"
    """The lease was released without a result, or was never acknowledged."""
    CANCELLED = "cancelled"
    """The run was stopped: a cancel, a pause, a retry, or the end of the total timeout."""


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one lease with its outcome."""

    attempt_id: str
    worker_id: WorkerId
    lease_number: int
    round: int
    started_at: float
    outcome: AttemptOutcome = AttemptOutcome.RUNNING
    ended_at: float | None = None
    charged_to: str | None = None
    """The limit that the attempt counts against (`policy/retry.py`): `attempts`, `worker_faults` or `nothing`."""
    failure: Failure | None = None
    reported_late: bool = False
    """The worker reported the end after the lease had expired or was revoked."""


class HeldBy(msgspec.Struct, frozen=True, gc=False):
    """The dispatch is leased under exactly this lease."""

    ref: LeaseRef


class AtRevision(msgspec.Struct, frozen=True, gc=False):
    """The dispatch has not changed since it was read."""

    revision: int


Guard = HeldBy | AtRevision


class Change(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """New values for fields of a dispatch. Unset fields do not change."""

    phase: Phase | UnsetType = UNSET
    standing: Readiness | UnsetType = UNSET
    class_key: ClassKey | UnsetType = UNSET
    priority: int | UnsetType = UNSET
    base_priority: int | UnsetType = UNSET
    priority_ceiling: int | UnsetType | None = UNSET
    round: int | UnsetType = UNSET
    wake_at: float | UnsetType | None = UNSET
    not_before: float | UnsetType | None = UNSET
    lease: Lease | UnsetType | None = UNSET
    charged: int | UnsetType = UNSET
    attempts: int | UnsetType = UNSET
    worker_faults: int | UnsetType = UNSET
    releases: int | UnsetType = UNSET
    failed_on: tuple[WorkerId, ...] | UnsetType = UNSET
    expired_on: tuple[WorkerId, ...] | UnsetType = UNSET
    cancel_requested_at: float | UnsetType | None = UNSET
    relaxed_class: ClassKey | UnsetType | None = UNSET
    relax_at: float | UnsetType | None = UNSET
    deadline_at: float | UnsetType | None = UNSET
    expires_at: float | UnsetType | None = UNSET
    awaits_jobs: bool | UnsetType = msgspec.field(default=UNSET, name="is_held")
    is_awaited: bool | UnsetType = UNSET
    settled_at: float | UnsetType | None = UNSET
    payload_sha256: bytes | UnsetType | None = UNSET
    server_deaths: int | UnsetType = UNSET
    pause_requested_at: float | UnsetType | None = UNSET
    retry_requested_at: float | UnsetType | None = UNSET
    cancel_reason: str | UnsetType = UNSET

    def apply(self, dispatch: Dispatch) -> Dispatch:
        values = {name: value for name in _CHANGEABLE if (value := getattr(self, name)) is not UNSET}
        return msgspec.structs.replace(dispatch, revision=dispatch.revision + 1, **values)


_CHANGEABLE: tuple[str, ...] = Change.__struct_fields__


class AttemptEnd(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How the attempt that held the lease ended."""

    outcome: AttemptOutcome
    charged_to: str | None = None
    failure: Failure | None = None
    used_s: float | None = None
    """How long the attempt used the worker. It corrects the estimated charge. None: the estimate stays."""


class Write(msgspec.Struct, frozen=True, omit_defaults=True):
    """One atomic step of a store."""

    job_id: JobId
    guard: Guard
    change: Change
    attempt_end: AttemptEnd | None = None
    facts: tuple[FactDraft, ...] = ()
    blocks: tuple[Block, ...] = ()
    lifted: tuple[Pair, ...] = ()
    job: dict[str, Any] | None = None
    """New values for the job record, if the store also holds the records."""


class WriteResult(msgspec.Struct, frozen=True):
    dispatch: Dispatch
    facts: tuple[Fact, ...]


class LeaseOffer(msgspec.Struct, frozen=True, gc=False):
    """Everything that a lease needs and the dispatch does not contain."""

    worker_id: WorkerId
    profile: ProfileKey
    poll_id: PollId
    token: LeaseToken
    ttl_s: float
    acknowledge_s: float
    charge_s: float = DEFAULT_CHARGE_S
    """The expected duration. Fair share counts it as the tenant's use until the lease ends; credits are not meant."""
    run_s: float = 0.0
    load_s: float = 0.0
    """What the lease says about the run (`Lease`)."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A waiting job as a matching pass sees it."""

    job_id: JobId
    lane: LaneKey
    sequence: int
    queued_at: float
    virtual_time: float = 0.0
    weight: float = 0.0
    """The tenant's weight. 0: no tenant has terms, and no tenant is charged."""
    waiting: int = 1
    """How many jobs wait in its lane, this one included."""
    place: int = 0
    """`Dispatch.place`."""
