"""The architecture on one page: every seam of the product as a protocol, and no implementation.

Two doors in (`JobApi`, `WorkerApi`), one place to decide (the engine with `policy/`), one door to write (`Store`, with
`Records` for the tenant's side), facts out (`Bus`). A `Connector` speaks to one kind of service; a `Clock` and `Chance`
are the only sources of time and randomness.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, Unpack, runtime_checkable

import msgspec

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.calls import (
    Applicant,
    Beat,
    CancelAnswer,
    Command,
    Completion,
    Explanation,
    FailureReport,
    FinishedRun,
    Foreign,
    ForeignReport,
    JobView,
    LeasedJob,
    Poll,
    QueueStats,
    RegisterWorker,
    Release,
    Report,
    RunningAttempt,
    Settled,
    Submitted,
)
from comfyfleet.model.dispatch import (
    Attempt,
    Candidate,
    Dispatch,
    LeaseOffer,
    LeaseRef,
    Phase,
    Write,
    Written,
)
from comfyfleet.model.fact import Event, Fact, FactDraft, News, RunNote
from comfyfleet.model.file import FilePage, FileRecord, FileSaid, Grant, InputFile, PartPlan
from comfyfleet.model.ids import ClassKey, JobId, PollId, ProfileKey, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, JobResult, OutputFile, Submission
from comfyfleet.model.lesson import Lesson, LessonDelta
from comfyfleet.model.node_signatures import NodeCatalog
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.terms import Share, TenantTerms
from comfyfleet.model.whole import WholeJob
from comfyfleet.model.worker import Capabilities, LiveState, WorkerDelta, WorkerRecord


class JobApi(Protocol):
    """The callers' door."""

    async def submit(self, submission: Submission) -> Submitted: ...
    async def get(self, job_id: JobId) -> JobView: ...
    def watch(self, job_id: JobId, after: int = 0) -> AsyncIterator[Fact | News]: ...
    async def cancel(self, job_id: JobId, reason: str = "") -> CancelAnswer: ...
    async def retry(self, job_id: JobId) -> Submitted: ...
    async def pause(self, job_id: JobId) -> None: ...
    async def resume(self, job_id: JobId) -> None: ...
    async def set_priority(self, job_id: JobId, priority: int) -> None: ...
    async def explain(self, job_id: JobId) -> Explanation: ...
    async def stats(self) -> QueueStats: ...


class WorkerApi(Protocol):
    """The workers' door. A poll that parks is an idle slot."""

    async def register(self, call: RegisterWorker) -> WorkerRecord: ...
    async def poll(self, call: Poll) -> LeasedJob | None: ...
    async def heartbeat(self, worker_id: WorkerId, refs: Sequence[LeaseRef]) -> Beat: ...
    async def progress(self, reports: Sequence[Report]) -> Beat: ...
    async def complete(self, call: Completion) -> Settled: ...
    async def fail(self, call: FailureReport) -> Settled: ...
    async def release(self, call: Release) -> Settled: ...
    async def commands(self, worker_id: WorkerId, wait_s: float) -> tuple[Command, ...]:
        """Parks until there is something to tell; heartbeats tell the same, only later."""

    async def unregister(self, worker_id: WorkerId, reason: str) -> None: ...


class Table(msgspec.Struct, frozen=True):
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
    def cabinet(self) -> Cabinet: ...
    @property
    def shares(self) -> Shares: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_shared(self) -> bool:
        """Whether other processes write here too; then what an engine knows of the fleet is read again and again."""

    @property
    def foreign(self) -> ForeignWorkers | None:
        """The door of workers that have no engine, where the store has one."""

    @property
    def relay(self) -> Relay | None:
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
    async def table(self) -> Table: ...
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
    async def enqueue(self, dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> Written | None:
        """None: the class is not in the table (any more); put it there and repeat. If there is a job of this id, or the
        tenant has one of the same reference, that one is the answer, without facts; it may have ended."""

    async def load(self, job_id: JobId) -> Dispatch | None: ...
    async def load_many(self, job_ids: Sequence[JobId]) -> list[Dispatch | None]: ...
    async def peek(self, query: Peek) -> list[Candidate]: ...
    async def lease(self, job_id: JobId, offer: LeaseOffer) -> Written | None:
        """None: the job was taken, moved or blocked in between, or the worker has another profile by now."""

    async def lease_next(self, offer: LeaseOffer) -> Written | None: ...
    async def leased_by_poll(self, poll_id: PollId) -> Dispatch | None: ...
    async def write(self, write: Write) -> Written | None:
        """None: the guard did not hold, or an open job's class is not in the table; nothing was changed."""

    async def finish_and_lease_next(
        self, write: Write, offer: LeaseOffer
    ) -> tuple[Written | None, Written | None]: ...
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
    async def get_lesson(self, workflow_hash: WorkflowHash) -> Lesson | None: ...
    async def put_lesson(self, lesson: Lesson) -> None: ...
    async def learn(self, delta: LessonDelta) -> Lesson: ...
    async def close(self) -> None: ...


class Shares(Protocol):
    """What each tenant has had of the fleet, and on which terms. Who has none has weight 1, no cap, and is not held."""

    async def put_terms(self, terms: TenantTerms) -> None: ...
    async def remove_terms(self, tenant: TenantId) -> None: ...
    async def terms(self) -> list[TenantTerms]: ...
    async def charge(self, tenant: TenantId, seconds: float) -> None: ...
    async def of(self, tenant: TenantId) -> Share: ...
    async def next_hold_end(self) -> float | None:
        """The next time at which a tenant that is held comes free by itself."""


class Records(Protocol):
    """The tenant's side: jobs with payload and result. Where it shares the store's database it joins its writes."""

    async def get(self, job_id: JobId) -> Job | None: ...
    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None: ...
    async def listing(
        self,
        *,
        tenant: TenantId | None,
        phase: Phase | None,
        limit: int,
        after: JobId | None,
        newest_first: bool = False,
    ) -> list[Job]:
        """In the order of submission, or against it. `after` is the last job seen on the way, or an id between two."""


class ForeignWorkers(Protocol):
    """Workers in other languages that call the store's own functions. Each step here may be taken by two engines."""

    def listen(self, wake: Callable[[], None]) -> None:
        """`wake` is called when there may be something to do: a hint that may be lost."""

    async def look(self, limit: int) -> Foreign: ...
    async def admitted(self, applicant: Applicant) -> None:
        """Its record is written, or its leaving is. What it declared since then waits on."""

    async def refuse(self, applicant: Applicant, reason: str) -> None: ...
    async def settled(self, report: ForeignReport) -> None:
        """Its verdict is written, or the lease was over."""

    async def take_finished(self, limit: int) -> list[FinishedRun]:
        """Each is answered once, to whoever asks first."""


class Relay(Protocol):
    """What the processes on one store say to each other. It may lose a message, and nobody hears himself."""

    def listen(self, hear: Callable[[bytes], None], hear_run: Callable[[Fact | News], None]) -> None: ...
    async def watch(self) -> None: ...  # for a while `hear_run` hears of workers without an engine
    async def say(self, message: bytes) -> None: ...
    async def announce(self, message: bytes) -> None: ...  # for readers of the store's own
    async def keep_progress(self, job_id: JobId, note: RunNote) -> None: ...  # for an hour
    async def kept_progress(self, job_ids: Sequence[JobId]) -> list[bytes | None]: ...  # theirs too


class Document(msgspec.Struct, frozen=True, gc=False):
    """One small document of a cabinet, with the number of times it was written."""

    name: str
    body: bytes
    version: int


class Cabinet(Protocol):
    """Small documents beside the queue, in the same store: keys, enrolments, deliveries, the audit log. A body has at
    most 64 KB. What is refused has changed nothing.

    Names are ordered; those that must be ordered in time are version 7 UUIDs.
    """

    async def get(self, drawer: str, name: str) -> Document | None: ...
    async def put(self, drawer: str, name: str, body: bytes, *, version: int | None) -> bool:
        """False: it is not at that version. 0 means that it must be new, None that anything will do."""

    async def remove(self, drawer: str, name: str) -> bool: ...
    async def listing(self, drawer: str, after: str = "", limit: int = 100) -> list[Document]: ...
    async def drawers(self) -> list[str]:
        """Those that have a document in them."""


class Subscription(Protocol):
    """A bounded view of the bus. Facts are never dropped from it; news is, newest wins."""

    def offer(self, event: Event) -> None:
        """As if the bus had told of it, to this one alone."""

    def __aiter__(self) -> AsyncIterator[Event]: ...
    def close(self) -> None: ...


class Bus(Protocol):
    """News and wake-ups. It may lose a message and holds no state."""

    def publish(self, event: Event) -> None: ...
    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]: ...
    def subscribe(self, job_id: JobId | None = None) -> Subscription: ...
    def close(self) -> None:
        """Every subscription ends with what it has."""


class Inventory(msgspec.Struct, frozen=True):
    """What a server really has, as its connector found it."""

    capabilities: Capabilities
    live: LiveState = LiveState()
    boot: str = ""
    """Changes when the server was started anew."""
    nodes: NodeCatalog | None = None
    """Of its node classes, where the service has such."""


class Connector(Protocol):
    """Speaks to one kind of service. Knows no leases, tenants or hub."""

    service_name: str

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def inventory(self) -> Inventory: ...
    async def check_health(self) -> bool: ...
    async def process_job(self, job: LeasedJob, report: Callable[[Report], None]) -> JobResult:
        """Runs the attempt to its end. Raises `ServiceFailed` with a classified failure.

        Called again for an attempt that the service has, it goes on with that one: an agent may have been killed.
        """

    async def cancel_job(self, job: LeasedJob) -> None:
        """Stops the attempt, waiting or running, and returns once it is over; never touches another's prompt.

        Of the job nothing but its attempt need be known."""

    async def reconcile(self, job: LeasedJob) -> RunningAttempt:
        """Did it finish while we were away?"""


@runtime_checkable
class OutputSource(Protocol):
    """A connector whose outputs can be fetched."""

    async def save(self, file: OutputFile, path: Path) -> int: ...


@runtime_checkable
class OutputKeeper(Protocol):
    """A workers' door that takes in what a run left, so that its caller need not reach the server."""

    async def keep(self, ref: LeaseRef, file: OutputFile, source: OutputSource) -> str | None:
        """The name under which it is kept. None: nothing is kept there."""


@runtime_checkable
class NodeKeeper(Protocol):
    """A workers' door that wants to know a server's node classes: to convert workflows of the editor, and to know which
    graphs the server accepts. One that has been told of equal nodes by another worker need not be told again."""

    async def describe(self, worker_id: WorkerId, nodes: NodeCatalog) -> None: ...


@runtime_checkable
class InputSource(Protocol):
    """A workers' door that has the files a job brings."""

    def spooling(self) -> Path | None:
        """Where files may lie on their way. None: where the system has its temporary ones."""

    async def fetch_input(self, job: LeasedJob, file: InputFile, path: Path) -> None:
        """What is kept, as it is, to a path that it is written anew to; whoever asks compares. `not_found`: nothing is
        kept there (any more)."""


class Assets(Protocol):
    """Where files lie, and short-lived grants to them. What a file is for, and who may have it, is the hub's."""

    in_use: Callable[[str], Awaitable[bool]]
    """Set by the hub: a file in use is kept, however old."""

    async def reserve(self, tenant: TenantId, **said: Unpack[FileSaid]) -> FileRecord: ...
    async def get(self, file_id: str, tenant: TenantId | None = None) -> FileRecord | None:
        """`tenant`: whose it should be, where that is known. Whether it is, is the hub's to ask."""

    async def forget_tenant(self, tenant: TenantId) -> int:
        """All files of the tenant, in use or not; how many there were. May be repeated."""

    async def keep_thumbnail(self, file_id: str, size: int, thumbnail: str) -> None: ...
    async def derived(self, record: FileRecord, after: str = "", limit: int = 100) -> FilePage: ...
    async def listing(self, after: str, limit: int, tenant: TenantId | None = None) -> FilePage: ...
    async def forget(self, record: FileRecord) -> None: ...
    async def tidy(self) -> None: ...
    def is_old(self, record: FileRecord) -> bool:
        """Its time is over: no other job may bring it, and it stays for those that do."""

    async def complete(self, file_id: str) -> FileRecord:
        """It is there and is what was said of it, which is looked at here. Asked again, the same answer."""

    async def grant(self, record: FileRecord, method: Literal["GET", "PUT"]) -> Grant: ...
    def parts(self, record: FileRecord) -> PartPlan | None:
        """How it may go up in parts. None: it goes up in one piece."""

    async def part_grants(self, record: FileRecord, digests: Mapping[int, str]) -> list[Grant]:
        """A link for each of these parts, by its number, bound to the SHA-256 of the part."""

    async def receive(self, record: FileRecord, pieces: AsyncIterator[bytes]) -> FileRecord: ...
    def arriving(self, tenant: TenantId, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]: ...
    def read(self, record: FileRecord) -> AsyncGenerator[bytes, None]:
        """Piece by piece, none larger than a mebibyte or so. `not_found`: it is not here."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """`now` is the time of day; somebody may set it, so it jumps and goes back. `monotonic` only passes: for what lasts
    in this process. A timer is as far away as that time is now; a clock that is set later moves none."""

    def now(self) -> float: ...
    def monotonic(self) -> float: ...
    def call_at(self, when: float, callback: Callable[[], None]) -> Timer: ...


class Chance(Protocol):
    def job_id(self, now: float) -> JobId: ...
    def token(self) -> str: ...
    def fraction(self) -> float:
        """Uniform in [0, 1)."""

    def seed(self) -> int: ...


class Moving(Protocol):
    """What a store gives to, and takes from, another store. No job in it is leased."""

    async def adopt(self, jobs: Sequence[WholeJob]) -> list[Dispatch] | None:
        """Takes jobs in, in one step and in their order, behind everything that is here. Facts, attempts, revision and
        lease number stay as they are; the place in line and, of a job that has ended, the time to keep it from are new.

        Each is answered with its dispatch as it is here now. A job whose id or reference is known here is not taken in:
        it is answered with what is known. None: a class of an open job is not in the table; nothing was taken in.
        """

    async def discard(self, jobs: Sequence[Dispatch]) -> list[bool]:
        """Forgets each job that is as it was read; one that was written since then, or is leased, is answered False."""

    async def lessons(self) -> list[Lesson]:
        """All of them, the longest unused first."""


class Movable(Store, Protocol):
    """A store whose jobs can move to another one."""

    @property
    def moving(self) -> Moving: ...
