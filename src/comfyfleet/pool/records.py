"""What a pool shows of its jobs and servers, in the words its users know: client, running, last error.

Who waits for the end of which job, and for how long: woken by the fact that ends it, or by the end of the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import msgspec

from comfyfleet.model.block import Block
from comfyfleet.model.calls import JobView
from comfyfleet.model.dispatch import Attempt, Phase, Readiness, Stop
from comfyfleet.model.errors import ComfyFleetError
from comfyfleet.model.fact import Event, Fact
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import JobResult, NodeTiming

JobStatus = Literal["queued", "running", "completed", "failed", "cancelled"]

STATUS: Mapping[Phase, JobStatus] = {
    Phase.QUEUED: "queued",
    Phase.LEASED: "running",
    Phase.COMPLETED: "completed",
    Phase.FAILED: "failed",
    Phase.CANCELLED: "cancelled",
}


class JobRecord(msgspec.Struct, frozen=True):
    id: str
    workflow_hash: str
    status: JobStatus
    priority: int
    attempts: int
    """Every start counts, whoever was to blame for its end."""
    client_id: str | None
    prompt_id: str | None
    queued_at: float
    started_at: float | None
    completed_at: float | None
    last_error: Failure | None
    """Of the last attempt that failed; cleared on success."""
    result: JobResult | None
    metadata: dict[str, Any]
    seeds: dict[str, int]
    """By node id: what every `seed: -1` was resolved to."""
    cancel_requested: bool
    history: tuple[Attempt, ...]
    is_paused: bool = False
    pause_requested: bool = False
    retry_requested: bool = False
    cancel_reason: str = ""

    @property
    def node_timings(self) -> tuple[NodeTiming, ...]:
        return () if self.result is None else self.result.timings

    @property
    def is_final(self) -> bool:
        return self.status in ("completed", "failed", "cancelled")


class ServerStats(msgspec.Struct, frozen=True):
    id: str
    url: str | None
    state: str
    reason: str
    """Why it is in that state, where there is something to say: what an offline server answered."""
    slots: int
    running: int
    completed: int
    failed: int
    utilisation: float
    """The share of its slots' time, since it was added, that was spent on completed runs."""
    disconnects: int
    blocked_workflows: int
    success_rate: float | None
    """The share of completed attempts among those that ended; None before the first."""


class PoolStats(msgspec.Struct, frozen=True):
    queued: int
    """Waiting for a server, delayed and paused ones included."""
    running: int
    completed: int
    failed: int
    cancelled: int
    idle_slots: int
    servers: tuple[ServerStats, ...]
    """The servers of the pool now. What a removed one ran is in the totals only."""


class BlockedWorkflow(msgspec.Struct, frozen=True):
    """A workflow that a server does not get, or that counts failures towards it."""

    client_id: str
    workflow_hash: str
    failures: int
    blocked_until: float | None
    """None: it only counts so far."""
    reason: str


class JobFailed(ComfyFleetError):
    """The job ended without a result; `record` has every attempt and its error."""

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        failure = record.last_error
        why = "no reason is known" if failure is None else f"{failure.kind.value}: {failure.message.strip()}"
        tried = f"after {record.attempts} attempt(s)" if record.attempts else "and no attempt was made"
        super().__init__(f"job {record.id} failed {tried}: {why}")


class JobCancelled(ComfyFleetError):
    def __init__(self, record: JobRecord) -> None:
        self.record = record
        super().__init__(f"job {record.id} was cancelled")


def block_of(block: Block) -> BlockedWorkflow:
    return BlockedWorkflow(
        block.worker_id, block.workflow_hash, block.failures, block.blocked_until, block.reason.value
    )


def record_of(view: JobView) -> JobRecord:
    job, dispatch = view.job, view.dispatch
    return JobRecord(
        id=job.reference or job.job_id,
        workflow_hash=job.workflow_hash,
        status=STATUS[dispatch.phase],
        priority=job.payload.priority if job.priority is None else job.priority,
        attempts=dispatch.attempts,
        client_id=view.worker_id,
        prompt_id=view.prompt_id,
        queued_at=job.submitted_at,
        started_at=view.started_at,
        completed_at=job.completed_at,
        last_error=job.failure,
        result=job.result,
        metadata=job.payload.metadata or {},
        seeds=job.seeds or {},
        cancel_requested=dispatch.cancel_requested_at is not None,
        history=view.attempts,
        is_paused=dispatch.phase is Phase.QUEUED and dispatch.standing is Readiness.PAUSED,
        pause_requested=dispatch.phase is Phase.LEASED and dispatch.stop is Stop.PAUSE,
        retry_requested=dispatch.phase is Phase.LEASED and dispatch.stop is Stop.RETRY,
        cancel_reason=dispatch.cancel_reason,
    )


def offline_words(client_id: str, reason: str) -> str:
    """Why a server is not used, wherever it is told: the cause, and what to look at next, stand in the reason."""
    return f"{client_id} is offline and is tried again" + (f": {reason}" if reason else "")


class JobWaiters:
    def __init__(self) -> None:
        self._waiting: dict[JobId, set[asyncio.Event]] = {}

    @contextmanager
    def for_end_of(self, job_id: JobId) -> Iterator[asyncio.Event]:
        ended = asyncio.Event()
        waiting = self._waiting.setdefault(job_id, set())
        waiting.add(ended)
        try:
            yield ended
        finally:
            waiting.discard(ended)
            if not waiting:
                self._waiting.pop(job_id, None)

    def hear(self, event: Event) -> None:
        if isinstance(event, Fact) and event.kind.is_final:
            for ended in self._waiting.get(event.job_id, ()):
                ended.set()

    def wake_all(self) -> None:
        for waiting in self._waiting.values():
            for ended in waiting:
                ended.set()


@asynccontextmanager
async def within(limit_s: float | None) -> AsyncIterator[None]:
    """`asyncio.timeout`, for those too who wait while they are being cancelled, to take back what they began.

    There Python before 3.11.4 lets the cancellation out by which a timeout works, and nobody hears that time is over.
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine that waits has a task"
    requests = task.cancelling()
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except asyncio.CancelledError:
        if limit.expired() and task.cancelling() <= requests:
            raise TimeoutError from None
        raise
