"""The port of stores: dispatches, leases, attempts, workers, blocks and facts, each change one guarded step."""

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


class EligibilityMatrix(msgspec.Struct, frozen=True):
    """Which profile may take which class. The version grows with each class and each profile that is added."""

    version: int
    classes: Mapping[ClassKey, RequirementClass]
    profiles: frozenset[ProfileKey]


class Peek(msgspec.Struct, frozen=True, gc=False):
    """What one kind of idle slot wants to see: the heads of lanes it may take, in the store's order."""

    profile: ProfileKey
    worker_id: WorkerId
    slots: int
    lanes: int
    quantum_s: float
    skip: frozenset[str] = frozenset()
    """Workflow hashes to leave out, beside those the store has blocks for."""


class LeaseState(msgspec.Struct, frozen=True, gc=False):
    """One lease in the answer to a heartbeat."""

    ref: LeaseRef
    is_alive: bool
    is_to_stop: bool = False


class Counts(msgspec.Struct, frozen=True):
    waiting: int
    delayed: int
    paused: int
    by_phase: dict[Phase, int]
    payload_bytes: int
    """Of all jobs that are open, waiting or leased."""


class Store(Protocol):
    """What must survive on the broker's side: dispatches, leases, attempts, workers, profiles, blocks, facts.

    Every method is one atomic step. Ids, tokens and jitter are arguments, so two stores fed alike answer alike.
    """

    @property
    def records(self) -> Records: ...
    @property
    def documents(self) -> DocumentStore: ...
    @property
    def shares(self) -> FairShare: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_shared(self) -> bool:
        """Whether other processes write here too; then what an engine knows of the fleet is read again and again."""

    @property
    def direct_workers(self) -> DirectWorkerInbox | None:
        """The door of workers that have no engine, where the store has one."""

    @property
    def peer_channel(self) -> PeerChannel | None:
        """Between the processes on this store, where it has one. Without, they find each other's facts by looking."""

    async def open(self) -> None:
        """Connects, migrates, checks that what must hold does. Called once, before anything else."""

    def listen(
        self,
        wake: Callable[[], None],
        hear: Callable[[WorkerId, Command], None] | None = None,
        relearn: Callable[[], None] | None = None,
    ) -> None:
        """`wake` is called when another process may have changed what waits, or a tenant came free; `hear` with what
        another has told a worker, `relearn` when another has put a class into the table. Hints that may be lost."""

    async def tell(self, worker_id: WorkerId, command: Command) -> None:
        """A command for a worker that another process may serve; nothing to do where there is no other process."""

    async def now(self) -> float: ...
    # the table profile × class: an add that saw an old version is refused (False) and repeated
    async def table(self) -> EligibilityMatrix: ...
    async def put_class(
        self, cls: RequirementClass, fits: Collection[ProfileKey], *, version: int
    ) -> bool: ...
    async def put_profile(self, profile: ProfileKey, fits: Collection[ClassKey], *, version: int) -> bool: ...
    async def drop_profiles(self, unused: Collection[ProfileKey]) -> None: ...
    # workers: an add is refused (False) where there is one of this name
    async def put_worker(self, worker: WorkerRecord) -> None: ...
    async def add_worker(self, worker: WorkerRecord) -> bool: ...
    async def replace_worker(self, worker: WorkerRecord) -> bool:
        """`worker.over` the record that has its revision. False: it was removed or written since; nothing is."""

    async def note_worker(self, worker_id: WorkerId, delta: WorkerDelta) -> WorkerRecord | None: ...
    async def get_worker(self, worker_id: WorkerId) -> WorkerRecord | None: ...
    async def workers(self) -> list[WorkerRecord]: ...
    async def remove_worker(self, worker_id: WorkerId) -> None: ...

    # dispatches
    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> WriteResult | None:
        """None: the class is not in the table (any more); put it there and repeat. If there is a job of this id, or the
        tenant has one of the same reference, that one is the answer, without facts; it may have ended."""

    async def load(self, job_id: JobId) -> Dispatch | None: ...
    async def load_many(self, job_ids: Sequence[JobId]) -> list[Dispatch | None]: ...
    async def peek(self, query: Peek) -> list[Candidate]: ...
    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        """None: the job was taken, moved or blocked in between, or the worker has another profile by now."""

    async def lease_next(self, offer: LeaseOffer) -> WriteResult | None: ...
    async def leased_by_poll(self, poll_id: PollId) -> Dispatch | None: ...
    async def write(self, write: Write) -> WriteResult | None:
        """None: the guard did not hold, or an open job's class is not in the table; nothing was changed."""

    async def finish_and_lease_next(
        self, write: Write, offer: LeaseOffer
    ) -> tuple[WriteResult | None, WriteResult | None]: ...
    async def heartbeat(self, refs: Sequence[LeaseRef], ttl_s: float) -> list[LeaseState]: ...
    async def leases_of(self, *worker_ids: WorkerId) -> list[Dispatch]: ...
    async def due(self, limit: int, after: Dispatch | None = None) -> list[Dispatch]:
        """By the time they fell due, then by id. `after`: the last one of the page before, as it was answered."""

    async def next_due(self) -> float | None: ...
    async def counts(self) -> Counts: ...
    async def position(self, job_id: JobId) -> int | None: ...
    async def dead_letter(self, limit: int, after: JobId | None = None) -> list[Dispatch]: ...
    async def unsettled(self, limit: int, after: JobId | None = None) -> list[Dispatch]:
        """What has ended, is apart and not settled, by id. It costs by what it answers, not by what is kept."""

    async def purge(self, phase: Phase, before: float, limit: int) -> int:
        """Those that ended first go first. What is unsettled stays, and so does for a minute what was settled."""

    async def pause_queue(self, is_paused: bool) -> None: ...
    async def is_queue_paused(self) -> bool: ...

    # what is kept with a job
    async def facts(self, job_id: JobId, after: int = 0) -> list[Fact]: ...
    async def attempts(self, job_id: JobId) -> list[Attempt]: ...
    async def mark_late(self, ref: LeaseRef) -> None: ...

    # blocks and lessons
    async def get_block(self, pair: Pair) -> Block | None: ...
    async def blocks(self, worker_id: WorkerId | None = None) -> list[Block]: ...
    async def put_block(self, block: Block) -> None: ...
    async def lift(self, pairs: Sequence[Pair]) -> list[Block]: ...
    async def expired_blocks(self) -> list[Block]:
        """Removes and answers those whose time is over."""

    async def next_block_end(self) -> float | None: ...
    async def get_workflow_stats(self, workflow_hash: WorkflowHash) -> WorkflowStats | None: ...
    async def put_workflow_stats(self, stats: WorkflowStats) -> None: ...
    async def learn(self, delta: WorkflowStatsDelta) -> WorkflowStats: ...
    async def close(self) -> None: ...


class FairShare(Protocol):
    """What each tenant has had of the fleet, and on which terms. Who has none has weight 1, no cap, and is not held."""

    async def put_terms(self, terms: TenantTerms) -> None: ...
    async def remove_terms(self, tenant: TenantId) -> None: ...
    async def terms(self) -> list[TenantTerms]: ...
    async def charge(self, tenant: TenantId, seconds: float) -> None: ...
    async def of(self, tenant: TenantId) -> TenantShare: ...
    async def next_hold_end(self) -> float | None:
        """The next time at which a tenant that is held comes free by itself."""


class DirectWorkerInbox(Protocol):
    """Workers in other languages that call the store's own functions. Each step here may be taken by two engines."""

    def listen(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there may be something to do: a hint that may be lost."""

    async def look(self, limit: int) -> DirectWorkerBacklog: ...
    async def admitted(self, applicant: PendingRegistration) -> None:
        """Its record is written, or its leaving is. What it declared since then waits on."""

    async def refuse(self, applicant: PendingRegistration, reason: str) -> None: ...
    async def settled(self, report: DirectWorkerFailure) -> None:
        """Its verdict is written, or the lease was over."""

    async def take_finished(self, limit: int) -> list[DirectWorkerCompletion]:
        """Each is answered once, to whoever asks first."""


class JobTransfer(Protocol):
    """What a store gives to, and takes from, another store. No job in it is leased."""

    async def import_jobs(self, jobs: Sequence[JobSnapshot]) -> list[Dispatch] | None:
        """Takes jobs in, in one step and in their order, behind everything that is here. Facts, attempts, revision and
        lease number stay as they are; the place in line and, of a job that has ended, the time to keep it from are new.

        Each is answered with its dispatch as it is here now. A job whose id or reference is known here is not taken in:
        it is answered with what is known. None: a class of an open job is not in the table; nothing was taken in.
        """

    async def discard(self, jobs: Sequence[Dispatch]) -> list[bool]:
        """Forgets each job that is as it was read; one that was written since then, or is leased, is answered False."""

    async def workflow_stats(self) -> list[WorkflowStats]:
        """All of them, the longest unused first."""


class TransferableStore(Store, Protocol):
    """A store whose jobs can move to another one."""

    @property
    def moving(self) -> JobTransfer: ...
