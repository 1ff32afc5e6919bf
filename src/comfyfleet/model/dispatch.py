"""The broker's routing envelope for a job, and the lease on it. No payload: blobs never enter the queue store.

A change of a dispatch is a value (`Change`) that policy makes and a store applies under a `Guard`. Stores compare and
keep; they never decide.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from comfyfleet.model.block import Block, Pair, tenant_target
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
"""So long the end of a dispatch whose record lies apart is kept once it is settled: a relay gives up what it read more
than 30 s ago (decision 0015), and one that was held up for less must find the end, or it would bring the round back."""


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
    """Where a queued dispatch stands. Only one that stands in its lane can be leased."""

    IN_LANE = "in_lane"
    DELAYED = "delayed"
    PAUSED = "paused"


class Stop(StrEnum):
    """Why the worker of a running job is to stop it."""

    CANCEL = "cancel"
    PAUSE = "pause"
    """It waits as paused then."""
    RETRY = "retry"
    """It waits at its place in line then, for a new attempt."""


class LaneKey(NamedTuple):
    """Jobs that no lease can tell apart except by age."""

    class_key: ClassKey
    tenant: TenantId
    priority: int
    workflow_hash: WorkflowHash


class LeaseRef(msgspec.Struct, frozen=True, gc=False):
    """What a worker shows to prove that a lease is its own. Number and epoch are the fencing token."""

    job_id: JobId
    round: int
    number: int
    epoch: int
    token: LeaseToken

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
    """The first heartbeat came. Until then the lease is short and its end costs nobody anything."""


class Dispatch(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """At most about a kilobyte, whatever the job carries."""

    job_id: JobId
    class_key: ClassKey
    workflow_hash: WorkflowHash
    priority: int
    """Effective: what the store orders by."""
    sequence: int = 0
    """The place in line, given at the first enqueue and kept through retries."""
    tenant: TenantId = DEFAULT_TENANT
    round: int = 1
    revision: int = 0
    phase: Phase = Phase.QUEUED
    standing: Readiness = Readiness.IN_LANE
    queued_at: float = 0.0
    wake_at: float | None = None
    """When policy wants to look at this dispatch again. The end of its lease is the lease's own."""
    not_before: float | None = None
    lease: Lease | None = None
    lease_number: int = 0
    attempts: int = 0
    """Every start counts here, whoever is charged for it."""
    charged: int = 0
    worker_faults: int = 0
    releases: int = 0
    max_attempts: int = 3
    failed_on: tuple[WorkerId, ...] = ()
    expired_on: tuple[WorkerId, ...] = ()
    cancel_requested_at: float | None = None
    relaxed_class: ClassKey | None = None
    """The class it moves to at `relax_at`: a preference that was waited for long enough stops restricting."""
    relax_at: float | None = None
    base_priority: int = 0
    """Without what a near deadline adds."""
    priority_ceiling: int | None = None
    """The most that its tenant may have, a near deadline or not."""
    deadline_at: float | None = None
    fails_at_deadline: bool = True
    expires_at: float | None = None
    """The end of the total time this job was given, from its submit."""
    is_held: bool = False
    """It waits for other jobs, and stands in no lane until they completed."""
    is_awaited: bool = False
    """Other jobs wait for this one: whoever ends it tells them."""
    payload_bytes: int = 0
    """How large the payload is that is kept for this job: as JSON, and attachments as they are."""
    payload_sha256: bytes | None = None
    """Of what its lease runs (`model/payload_digest.py`). None: not known before the lease, as of a job that waits for
    files of others, or is encrypted (a digest would confirm a guess), or was taken by an older version."""
    has_tenant_database: bool = msgspec.field(default=False, name="is_apart")
    """Its record lies in a tenant's database, where its end is to be settled."""
    settled_at: float | None = None
    """When the tenant's database had taken in the end of this round."""
    server_deaths: int = 0
    """How many servers died while they ran it."""
    pause_requested_at: float | None = None
    """While it is leased: its worker is to stop it, then it waits as paused."""
    retry_requested_at: float | None = None
    """While it is leased: its worker is to stop it, then it waits at its place in line. Of the two only one is set."""
    cancel_reason: str = ""
    """Why it is to be cancelled, or was, in the words of whoever asked for it."""

    @property
    def stop(self) -> Stop | None:
        """What its worker is to stop it for. A cancel comes before the others."""
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
        """The next moment at which something must happen to this dispatch, whoever is watching."""
        if self.lease is None:
            return self.wake_at
        return self.lease.expires_at if self.wake_at is None else min(self.wake_at, self.lease.expires_at)

    @property
    def lane(self) -> LaneKey:
        return LaneKey(self.class_key, self.tenant, self.priority, self.workflow_hash)

    @property
    def block_targets(self) -> tuple[str, str, str]:
        """What a block may name to keep this job from a worker: its workflow for everybody or for its tenant, and
        itself alone."""
        return self.workflow_hash, tenant_target(self.workflow_hash, self.tenant), self.job_id

    @property
    def stands_in_lane(self) -> bool:
        return self.phase is Phase.QUEUED and self.standing is Readiness.IN_LANE

    @property
    def is_unsettled(self) -> bool:
        """It has ended, and the tenant's database does not know yet: whoever finds it goes and tells."""
        return self.has_tenant_database and self.settled_at is None and self.phase.is_final

    def lease_ref(self) -> LeaseRef:
        assert self.lease is not None, "only a leased dispatch has a lease to refer to"
        return LeaseRef(self.job_id, self.round, self.lease.number, self.lease.epoch, self.lease.token)


class AttemptOutcome(StrEnum):
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    RELEASED = "released"
    CANCELLED = "cancelled"


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
    failure: Failure | None = None
    reported_late: bool = False


class HeldBy(msgspec.Struct, frozen=True, gc=False):
    """The dispatch is leased under exactly this lease."""

    ref: LeaseRef


class AtRevision(msgspec.Struct, frozen=True, gc=False):
    """Nobody has written the dispatch since it was read."""

    revision: int


Guard = HeldBy | AtRevision


class Change(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """New values for fields of a dispatch. What is unset stays as it is."""

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
    is_held: bool | UnsetType = UNSET
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
    """For how long it had the worker: what the estimate of the lease is put right to. None: the estimate stands."""


class Write(msgspec.Struct, frozen=True, omit_defaults=True):
    """One atomic step of a store: all of it happens, or nothing does."""

    job_id: JobId
    guard: Guard
    change: Change
    attempt_end: AttemptEnd | None = None
    facts: tuple[FactDraft, ...] = ()
    blocks: tuple[Block, ...] = ()
    lifted: tuple[Pair, ...] = ()
    job: dict[str, Any] | None = None
    """New values for the job's record, where records live in the store's own database."""


class WriteResult(msgspec.Struct, frozen=True):
    dispatch: Dispatch
    facts: tuple[Fact, ...]


class LeaseOffer(msgspec.Struct, frozen=True, gc=False):
    """Everything a lease needs that is not in the dispatch: who, under which poll, how long, and its random proof."""

    worker_id: WorkerId
    profile: ProfileKey
    poll_id: PollId
    token: LeaseToken
    ttl_s: float
    acknowledge_s: float
    charge_s: float = DEFAULT_CHARGE_S
    """For how long it is expected to have the worker: what its tenant is charged with, where tenants have terms."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A waiting job as a round sees it."""

    job_id: JobId
    lane: LaneKey
    sequence: int
    queued_at: float
    virtual_time: float = 0.0
    weight: float = 0.0
    """Of its tenant. 0: no tenant has terms, and nobody is charged."""
