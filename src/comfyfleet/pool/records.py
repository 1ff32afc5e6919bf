"""The pool's view of jobs and servers, and the waiters for the end of a job."""

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
    """All starts, whatever ended them."""
    client_id: str | None
    prompt_id: str | None
    queued_at: float
    started_at: float | None
    completed_at: float | None
    last_error: Failure | None
    """The failure of the last failed attempt. Success clears it."""
    result: JobResult | None
    metadata: dict[str, Any]
    seeds: dict[str, int]
    """By node id: the random seed for every `seed: -1`."""
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
    """Why it is in this state, for example the error of an offline server."""
    slots: int
    running: int
    completed: int
    failed: int
    utilisation: float
    """The share of its slots' time since it was added that completed runs used."""
    disconnects: int
    blocked_workflows: int
    success_rate: float | None
    """The share of completed attempts among ended ones. None before the first."""


class PoolStats(msgspec.Struct, frozen=True):
    queued: int
    """Waiting jobs, including delayed and paused ones."""
    running: int
    completed: int
    failed: int
    cancelled: int
    idle_slots: int
    servers: tuple[ServerStats, ...]
    """The current servers. Only the totals include removed ones."""


class BlockedWorkflow(msgspec.Struct, frozen=True):
    """A workflow that is blocked on a server, or has counted failures there."""

    client_id: str
    workflow_hash: str
    failures: int
    blocked_until: float | None
    """None: not blocked yet."""
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
    """Why a server is not used. The reason contains the cause and the next step."""
    return f"{client_id} is offline and is tried again" + (f": {reason}" if reason else "")


class JobWaiters:
    """Wakes the waiters of a job when it or the pool ends."""

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

    def on_event(self, event: Event) -> None:
        if isinstance(event, Fact) and event.kind.is_final:
            for ended in self._waiting.get(event.job_id, ()):
                ended.set()

    def wake_all(self) -> None:
        for waiting in self._waiting.values():
            for ended in waiting:
                ended.set()


@asynccontextmanager
async def within(limit_s: float | None) -> AsyncIterator[None]:
    """`asyncio.timeout` that also works in a task that is being cancelled and still cleans up.

    There, Python before 3.11.4 raises the timeout's own cancellation in place of `TimeoutError`.
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
