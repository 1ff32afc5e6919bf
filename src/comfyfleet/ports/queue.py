"""The interface of stores: dispatches, leases, attempts, workers, blocks and facts. Each change is one guarded step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.calls import (
    Command,
    DirectWorkerBacklog,
    DirectWorkerCompletion,
    DirectWorkerFailure,
    JobSnapshot,
    PendingRegistration,
)
from comfyfleet.model.dispatch import (
    Attempt,
    Candidate,
    Dispatch,
    LaneKey,
    LeaseOffer,
    LeaseRef,
    Phase,
    Write,
    WriteResult,
)
from comfyfleet.model.fact import Fact, FactDraft
from comfyfleet.model.ids import ClassKey, JobId, PollId, ProfileKey, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Job
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.tenant import TenantShare, TenantTerms
from comfyfleet.model.worker import WorkerDelta, WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta
from comfyfleet.ports.bus import PeerChannel
from comfyfleet.ports.documents import DocumentStore
from comfyfleet.ports.records import Records

MAX_WARM_LANES = 256
"""How many lanes of warm classes a look considers, shared equally among the classes. Of more, some are not seen."""


class EligibilityMatrix(msgspec.Struct, frozen=True):
    """Which profile may take which class. The version grows with each added class or profile."""

    version: int
    classes: Mapping[ClassKey, RequirementClass]
    profiles: frozenset[ProfileKey]


class Peek(msgspec.Struct, frozen=True, gc=False):
    """A query for the heads of the lanes that a kind of idle slot may take, in the store's order."""

    profile: ProfileKey
    worker_id: WorkerId
    slots: int
    lanes: int
    quantum_s: float
    skip: frozenset[str] = frozenset()
    """Workflow hashes to leave out, in addition to the blocks in the store."""
    warm: frozenset[ClassKey] = frozenset()
    """Classes whose models the slots have loaded. Of the priorities and tenants that the answer shows, their lanes come
    first, also where `lanes` older ones wait: after the jobs for the slots, the heads of warm lanes take the places of
    older lanes. The answer stays in the store's order. At most `MAX_WARM_LANES` lanes are looked at for it."""


class QueuePlace(msgspec.Struct, frozen=True, gc=False):
    """Where a waiting job stands."""

    sequence: int
    queued_at: float
    place: int
    """`Dispatch.place`."""


class LaneBacklog(msgspec.Struct, frozen=True, gc=False):
    """The waiting jobs of one lane."""

    lane: LaneKey
    waiting: int
    oldest: QueuePlace
    newest: QueuePlace


class LeaseState(msgspec.Struct, frozen=True, gc=False):
    """One lease in the reply to a heartbeat."""

    ref: LeaseRef
    is_alive: bool
    is_to_stop: bool = False


class Counts(msgspec.Struct, frozen=True):
    waiting: int
    delayed: int
    paused: int
    by_phase: dict[Phase, int]
    payload_bytes: int
    """The size of the payloads of all open jobs."""


class QueueReader(Protocol):
    """The reads that need no engine. The hub's handlers get only these of a store: they change the queue through
    the engine."""

    @property
    def records(self) -> Records: ...
    @property
    def is_shared(self) -> bool:
        """Whether other processes write here too. Then an engine must read the fleet again regularly."""

    async def now(self) -> float: ...
    async def load(self, job_id: JobId) -> Dispatch | None: ...
    async def load_many(self, job_ids: Sequence[JobId]) -> list[Dispatch | None]: ...
    async def leases_of(self, *worker_ids: WorkerId) -> list[Dispatch]: ...
    async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]: ...
    async def attempts(self, job_id: JobId) -> list[Attempt]: ...
    async def get_worker(self, worker_id: WorkerId) -> WorkerRecord | None: ...
    async def workers(self) -> list[WorkerRecord]: ...
    async def counts(self) -> Counts: ...
    async def is_queue_paused(self) -> bool: ...


class Store(QueueReader, Protocol):
    """The durable state of the queue: dispatches, leases, attempts, workers, profiles, blocks, facts.

    Every method is one atomic step. Ids, tokens and jitter are arguments, so stores are deterministic.
    """

    @property
    def documents(self) -> DocumentStore: ...
    @property
    def fair_share(self) -> FairShare: ...
    @property
    def epoch(self) -> int: ...
    @property
    def direct_workers(self) -> DirectWorkerInbox | None:
        """The inbox of direct workers, if the store has one."""

    @property
    def peer_channel(self) -> PeerChannel | None:
        """The channel between the processes on this store. Without it they poll for facts of others."""

    async def open(self) -> None:
        """Connect, migrate and check invariants. Called once, before anything else."""

    def listen(
        self,
        wake: Callable[[], None],
        on_command: Callable[[WorkerId, Command], None] | None = None,
        on_new_class: Callable[[], None] | None = None,
    ) -> None:
        """Set callbacks for changes by other processes. `wake`: the queue may have changed, or a tenant is no longer
        held. `on_command`: a command for a worker. `on_new_class`: a new class. Calls may be lost."""

    async def send_command(self, worker_id: WorkerId, command: Command) -> None:
        """Send a command to a worker that another process may serve."""

    # eligibility matrix: an add with an old version returns False and must be repeated
    async def table(self) -> EligibilityMatrix: ...
    async def put_class(
        self, cls: RequirementClass, fits: Collection[ProfileKey], *, version: int
    ) -> bool: ...
    async def put_profile(self, profile: ProfileKey, fits: Collection[ClassKey], *, version: int) -> bool: ...
    async def drop_profiles(self, unused: Collection[ProfileKey]) -> None: ...
    # workers: an add returns False if the worker exists
    async def put_worker(self, worker: WorkerRecord) -> None: ...
    async def add_worker(self, worker: WorkerRecord) -> bool: ...
    async def replace_worker(self, worker: WorkerRecord) -> bool:
        """Store `worker.merged_onto(stored)` if the stored revision is the worker's. False: it is not, or the
        record was removed."""

    async def apply_worker_delta(self, worker_id: WorkerId, delta: WorkerDelta) -> WorkerRecord | None: ...
    async def remove_worker(self, worker_id: WorkerId) -> None: ...

    # dispatches
    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        """None: the class is not in the matrix; put it there and repeat. If the job id exists, or the tenant has a job
        with the same reference, the result is that job without facts, even if it has ended."""

    async def peek(self, query: Peek) -> list[Candidate]: ...
    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        """None: the job was leased, moved or blocked meanwhile, or the worker has another profile now."""

    async def leased_by_poll(self, poll_id: PollId) -> Dispatch | None: ...
    async def write(self, write: Write) -> WriteResult | None:
        """None: the guard failed, or the class of an open job is not in the matrix. Nothing changed."""

    async def heartbeat(self, refs: Sequence[LeaseRef], ttl_s: float) -> list[LeaseState]: ...
    async def due(self, limit: int, after: Dispatch | None = None) -> list[Dispatch]:
        """Ordered by due time, then by id. `after` is the last dispatch of the previous page, unchanged."""

    async def next_due(self) -> float | None: ...
    async def position(self, job_id: JobId) -> int | None: ...
    async def waiting_lanes(self, limit: int) -> list[LaneBacklog]:
        """The lanes in which jobs wait, by descending priority, also those of tenants that are held or at their cap. Of
        more than `limit`, some of the lowest priority shown are left out. The cost does not grow with the jobs."""

    async def dead_letter(self, limit: int, after: JobId | None = None) -> list[Dispatch]: ...
    async def unsettled(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        """Ended dispatches with a tenant database that are not settled, by id. The cost depends on the result only."""

    async def purge(self, phase: Phase, before: float, limit: int) -> int:
        """Delete the oldest ended dispatches. Unsettled ones stay, and settled ones stay for a minute."""

    async def pause_queue(self, is_paused: bool) -> None: ...

    # history of a job
    async def mark_late(self, ref: LeaseRef) -> None: ...

    # blocks and statistics
    async def get_block(self, pair: Pair) -> Block | None: ...
    async def blocks(self, worker_id: WorkerId | None = None) -> list[Block]: ...
    async def put_block(self, block: Block) -> None: ...
    async def lift(self, pairs: Sequence[Pair]) -> list[Block]: ...
    async def expired_blocks(self) -> list[Block]:
        """Remove and return the expired blocks."""

    async def next_block_end(self) -> float | None: ...
    async def get_workflow_stats(self, workflow_hash: WorkflowHash) -> WorkflowStats | None: ...
    async def put_workflow_stats(self, stats: WorkflowStats) -> None: ...
    async def add_workflow_stats(self, delta: WorkflowStatsDelta) -> WorkflowStats: ...
    async def close(self) -> None: ...


class FairShare(Protocol):
    """The terms and the usage of each tenant. The default terms are weight 1, no cap, not held."""

    async def put_terms(self, terms: TenantTerms) -> None: ...
    async def remove_terms(self, tenant: TenantId) -> None: ...
    async def terms(self) -> list[TenantTerms]: ...
    async def charge(self, tenant: TenantId, seconds: float) -> None: ...
    async def get(self, tenant: TenantId) -> TenantShare: ...
    async def next_hold_end(self) -> float | None:
        """The next time at which the hold of a tenant ends."""


class DirectWorkerInbox(Protocol):
    """Requests of direct workers, which call the store's functions. Two engines may process the same one."""

    def listen(self, wake: Callable[[], None]) -> None:
        """Set a callback for new requests. Calls may be lost."""

    async def backlog(self, limit: int) -> DirectWorkerBacklog: ...
    async def admitted(self, registration: PendingRegistration) -> None:
        """The registration or deregistration is written. A newer declaration stays in the inbox."""

    async def refuse(self, registration: PendingRegistration, reason: str) -> None: ...
    async def handled(self, report: DirectWorkerFailure) -> None:
        """The failure is handled, or the lease was over."""

    async def take_finished(self, limit: int) -> list[DirectWorkerCompletion]:
        """Each completion is returned once."""


class JobTransfer(Protocol):
    """Moves jobs between stores. None of the jobs is leased."""

    async def import_jobs(self, jobs: Sequence[JobSnapshot]) -> list[Dispatch] | None:
        """Import jobs in one step, in their order, behind all jobs of this store. Facts, attempts, revision and lease
        number do not change. The place in the queue is new, and so is the start of an ended job's retention.

        Returns the dispatches of this store. A job whose id or reference exists is not imported: the existing dispatch
        is returned. None: the class of an open job is not in the matrix, and nothing was imported.
        """

    async def discard(self, jobs: Sequence[Dispatch]) -> list[bool]:
        """Delete each job that has not changed since it was read. False: it has changed or is leased."""

    async def workflow_stats(self) -> list[WorkflowStats]:
        """All statistics, least recently used first."""


class TransferableStore(Store, Protocol):
    """A store whose jobs can move to another one."""

    @property
    def job_transfer(self) -> JobTransfer: ...
