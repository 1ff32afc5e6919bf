"""What the author of a connector provides to the contract of connectors, and how the contract drives an attempt.

A `ConnectorScene` starts a server, makes connectors for it and causes faults. It checks nothing: the tests beside this
module do. What a service cannot have, the scene says with the reason.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind, ServiceBusy, ServiceFailed
from comfyfleet.model.ids import JobId, LeaseToken, WorkerId, WorkflowHash
from comfyfleet.model.job import JobResult, Timeouts
from comfyfleet.model.payload import PayloadFormat
from comfyfleet.ports import Connector

CANNOT = "this service cannot have it: "
"""How the reason of a test begins that does not apply to a service."""

HANGS_S = 60.0
"""After so long a test counts as hanging."""

RunState = Literal["waiting", "running", "completed", "failed", "stopped", "removed"]
"""`stopped`: it had begun. `removed`: it had not."""

_BEGUN: tuple[RunState, ...] = ("running", "completed", "failed", "stopped")


class ConnectorFault(StrEnum):
    """What goes wrong at the service or on the way to it. `cause` switches one on, `repair` all off."""

    RUN_FAILS = "run_fails"
    """The next run fails with an error of the service."""
    OUT_OF_MEMORY = "out_of_memory"
    """The next run needs more memory than there is."""
    MISSING_MODEL = "missing_model"
    """The server has lost the model or flow that the payload names."""
    WRONG_KEY = "wrong_key"
    """The server refuses the credentials of every request."""
    OUT_OF_CREDITS = "out_of_credits"
    """The account cannot pay for a run."""
    NEVER_ACCEPTS = "never_accepts"
    """A submit gets no answer and does not arrive."""
    NEVER_STARTS = "never_starts"
    """The service accepts a job and does not begin with it."""
    STALLS = "stalls"
    """Runs stop half-way without progress until `release`, as with `hold`."""
    CRASH = "crash"
    """The server is gone now, with all runs, until `repair`."""
    RESTART = "restart"
    """The server is gone for a moment and returns without its runs."""
    LOST_BEFORE_ACCEPTANCE = "lost_before_acceptance"
    """The connection breaks during the next submit, which the server does not get."""
    LOST_AFTER_ACCEPTANCE = "lost_after_acceptance"
    """The server gets the next submit, and the connection breaks before its answer."""
    LOST_IN_RUN = "lost_in_run"
    """All connections break now. The server goes on."""
    ENDLESS_ANSWER = "endless_answer"
    """All answers have no end."""
    GARBAGE_ANSWER = "garbage_answer"
    """All answers are successful and have no meaning."""
    REDIRECT = "redirect"
    """All requests are redirected to the scene's `elsewhere`."""
    ENDLESS_OUTPUT = "endless_output"
    """Output files have no end."""


class ConnectorAbility(StrEnum):
    """What most services allow and some do not."""

    WAITING = "waiting"
    """A job can wait at the service behind another client's."""
    CANCEL_WAITING = "cancel_waiting"
    CANCEL_RUNNING = "cancel_running"
    STRANGERS = "strangers"
    """Other clients can use the same server."""
    CONTINUES = "continues"
    """A second `process_job` for an attempt that the server has continues it, also from another process."""
    SURVIVES_AGENT = "survives_agent"
    """A run goes on if the task in `process_job` is cancelled."""
    KEEPS_RESULTS = "keeps_results"
    """`reconcile` finds the result of a run that completed."""
    TELLS_BOOT = "tells_boot"
    """`Inventory.boot` changes when the server restarts."""
    TELLS_VERSION = "tells_version"
    TELLS_PROGRESS = "tells_progress"
    MAKES_FILES = "makes_files"


class DeliveryPromise(StrEnum):
    """How often the service runs an attempt whose connection breaks."""

    EXACTLY_ONCE = "exactly_once"
    AT_LEAST_ONCE = "at_least_once"
    AT_MOST_ONCE = "at_most_once"
    """A second run would cost money, so it is never risked."""


class ConnectorScene(ABC):
    """A server with a connector. Each test has a new one. Give the connector short timeouts."""

    service: str
    """The connector's `service_name`."""
    promise: DeliveryPromise
    cannot: Mapping[Any, str] = {}
    """What the service cannot have, by `ConnectorFault` and `ConnectorAbility`, and why."""
    payload_format: PayloadFormat | None = None
    patience_s: float = 30.0
    """All that must end ends within this time."""
    memory_bytes: int = 64 << 20
    """A hostile server cannot make the connector use more."""
    secret: str | None = None
    """The password or key. No message may contain it."""
    elsewhere: str = ""
    """An address of a stranger, for `REDIRECT`."""

    def __init__(self) -> None:
        self.jobs: dict[int, list[LeasedJob]] = {}
        """The attempts that the contract made, by mark."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def stop(self) -> None: ...

    @abstractmethod
    def connect(self) -> Connector:
        """A connector to the server, not yet open. Each call makes another one, as another process would."""

    @abstractmethod
    def payload(self, mark: int) -> dict[str, Any]:
        """A payload whose output tells the mark, a number from 1001 to 9999. Payloads differ only by it."""

    @abstractmethod
    async def made_from(self, result: JobResult, connector: Connector, folder: Path) -> int:
        """The mark that the content of the output tells. Files may be saved in the folder."""

    @abstractmethod
    async def hold(self) -> None:
        """Runs stop half-way, without progress, until `release`. They still react to a stop by the service."""

    @abstractmethod
    async def release(self) -> None: ...

    @abstractmethod
    def runs(self, mark: int) -> Sequence[RunState]:
        """What the server knows of each run with this mark, whoever started it, also from before a crash."""

    @abstractmethod
    async def cause(self, fault: ConnectorFault) -> None: ...

    @abstractmethod
    async def repair(self) -> None:
        """Ends all faults. A server that is gone comes back."""

    async def start_stranger(self, mark: int) -> None:
        """Another client submits `payload(mark)` and does not wait for its end."""
        raise NotImplementedError(f"implement start_stranger, or declare {ConnectorAbility.STRANGERS!r}")


class ConnectorAttempt:
    """An attempt in a task, with everything that it reported."""

    def __init__(self, connector: Connector, job: LeasedJob) -> None:
        self.job = job
        self.reports: list[ProgressReport] = []
        self._news = asyncio.Event()
        self.task: asyncio.Task[JobResult] = asyncio.create_task(connector.process_job(job, self._hear))
        self.task.add_done_callback(lambda _: self._news.set())

    def _hear(self, report: ProgressReport) -> None:
        self.reports.append(report)
        self._news.set()

    def has_heard(self, *kinds: ProgressKind) -> bool:
        return any(report.kind in kinds for report in self.reports)

    async def end(self) -> JobResult | ServiceFailed:
        """How it ended. Any other end fails the test."""
        async with asyncio.timeout(HANGS_S):
            await asyncio.wait({self.task})
        error = self.task.exception()
        if error is not None and not isinstance(error, ServiceFailed):
            raise AssertionError(f"`process_job` raises only ServiceFailed, not {error!r}") from error
        return error or self.task.result()

    async def result(self) -> JobResult:
        end = await self.end()
        assert isinstance(end, JobResult), f"the attempt failed: {end.failure}"
        return end

    async def failure(self) -> Failure:
        end = await self.end()
        assert isinstance(end, ServiceFailed), f"the attempt completed: {end}"
        return end.failure


# The agent asks how such an attempt ended: the failure may come from the connection.
_MAY_HAVE_FINISHED = frozenset(
    {
        FailureKind.TRANSIENT,
        FailureKind.CRASHED,
        FailureKind.ACCEPT_TIMEOUT,
        FailureKind.START_TIMEOUT,
        FailureKind.STALL_TIMEOUT,
        FailureKind.UNKNOWN,
    }
)


class ConnectorBench:
    """A scene whose server runs, with one open connector, and short methods for tests."""

    def __init__(self, scene: ConnectorScene, connector: Connector, folder: Path) -> None:
        self.scene = scene
        self.connector = connector
        self.folder = folder
        self._marks = itertools.count(1001)
        self._numbers = itertools.count(1)
        self._attempts: list[ConnectorAttempt] = []

    async def end_attempts(self) -> None:
        """Ends what a failed test left running."""
        tasks = [attempt.task for attempt in self._attempts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def needs(self, *names: ConnectorFault | ConnectorAbility) -> None:
        """Ends the test with the scene's reason if the service cannot have one of these."""
        for name in names:
            if (reason := self.scene.cannot.get(name)) is not None:
                assert reason.strip(), (
                    f"the scene gives no reason why {self.scene.service} cannot have {name}"
                )
                pytest.skip(f"{CANNOT}{name}: {reason}")

    async def cause(self, fault: ConnectorFault) -> None:
        try:
            await self.scene.cause(fault)
        except Exception as error:
            raise AssertionError(
                f"the scene does not cause ConnectorFault.{fault.name}: {error!r}. Implement it in `cause`, or "
                "give in `cannot` the reason why the service cannot have it"
            ) from error

    def job(self, mark: int | None = None, timeouts: Timeouts | None = None) -> LeasedJob:
        mark = next(self._marks) if mark is None else mark
        payload = self.scene.payload(mark)
        reader = self.scene.payload_format
        read = None if reader is None else reader.read(payload)
        job = LeasedJob(
            ref=LeaseRef(JobId(f"job-{mark}-{next(self._numbers)}"), 1, 1, 1, LeaseToken("token")),
            worker_id=WorkerId("worker"),
            ttl_s=60.0,
            acknowledge_s=10.0,
            workflow=payload if read is None else read.payload,
            workflow_hash=WorkflowHash("hash") if read is None else read.workflow_hash,
            service=self.scene.service,
            timeouts=timeouts or Timeouts(),
        )
        self.scene.jobs.setdefault(mark, []).append(job)
        return job

    def next_lease(self, job: LeasedJob) -> LeasedJob:
        """The same job after a retry by the hub, or after its lease expired: another attempt id."""
        ref = msgspec.structs.replace(job.ref, number=job.ref.number + 1, epoch=job.ref.epoch + 1)
        leased = msgspec.structs.replace(job, ref=ref, attempt=job.attempt + 1, timeouts=Timeouts())
        self.scene.jobs[self.mark_of(job)].append(leased)
        return leased

    def mark_of(self, job: LeasedJob) -> int:
        return next(mark for mark, jobs in self.scene.jobs.items() if job in jobs)

    def new_mark(self) -> int:
        return next(self._marks)

    def start(self, job: LeasedJob | None = None) -> ConnectorAttempt:
        self._attempts.append(ConnectorAttempt(self.connector, job or self.job()))
        return self._attempts[-1]

    async def running(self, job: LeasedJob | None = None) -> ConnectorAttempt:
        """An attempt that the server runs and holds, and that the connector knows to run."""
        await self.scene.hold()
        attempt = self.start(job)
        mark = self.mark_of(attempt.job)
        is_told = ConnectorAbility.TELLS_PROGRESS not in self.scene.cannot
        await self.eventually(
            lambda: (
                attempt.task.done()
                or (
                    "running" in self.scene.runs(mark)
                    and (not is_told or attempt.has_heard(ProgressKind.STARTED))
                )
            ),
            "the server runs the job, and the connector reports STARTED"
            if is_told
            else "the server runs the job",
        )
        assert not attempt.task.done(), f"a held run ended: {attempt.task}"
        return attempt

    async def made_from(self, result: JobResult) -> int:
        return await self.scene.made_from(result, self.connector, self.folder)

    async def assert_made_from(self, result: JobResult, job: LeasedJob) -> None:
        made, mark = await self.made_from(result), self.mark_of(job)
        assert made == mark, f"the output was made from {made}, the job's payload has {mark}"

    def begun(self, job_or_mark: LeasedJob | int) -> int:
        """How often the server began to run it."""
        mark = job_or_mark if isinstance(job_or_mark, int) else self.mark_of(job_or_mark)
        return sum(state in _BEGUN for state in self.scene.runs(mark))

    async def as_an_agent(self, job: LeasedJob) -> JobResult | ServiceFailed:
        """Runs the attempt as an agent does: after a failure that may come from the connection it asks the service."""
        return await self.settled(self.start(job))

    async def settled(self, attempt: ConnectorAttempt) -> JobResult | ServiceFailed:
        end = await attempt.end()
        if isinstance(end, JobResult | ServiceBusy):
            return end
        if end.failure.kind not in _MAY_HAVE_FINISHED:
            return end
        try:
            async with asyncio.timeout(HANGS_S):
                found = await self.connector.reconcile(attempt.job)
        except (ServiceFailed, OSError):
            return end
        return end if found.result is None else found.result

    async def completes_anew(self, job: LeasedJob) -> None:
        """The next attempt of the job completes."""
        job = self.next_lease(job)
        async with asyncio.timeout(HANGS_S):
            while True:
                end = await self.as_an_agent(job)
                if not isinstance(end, ServiceBusy):
                    break
                # The hub offers a declined job again after a while.
                await asyncio.sleep(0.05)
        assert isinstance(end, JobResult), f"a new attempt failed: {end.failure}"
        await self.assert_made_from(end, job)

    async def eventually(self, is_met: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        if not await self.within(self.scene.patience_s, is_met):
            raise AssertionError(f"not within {self.scene.patience_s:g} s: {what}")

    async def within(self, seconds: float, is_met: Callable[[], bool | Awaitable[bool]]) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            met = is_met()
            if met if isinstance(met, bool) else await met:
                return True
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(0.01)

    async def ends_in_time(self, work: Awaitable[Any], what: str) -> Any:
        """The value, or the exception as a value, except that of an assertion. Fails if it takes longer than the
        scene's patience."""
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=self.scene.patience_s)
        if not done:
            task.cancel()
            raise AssertionError(f"{what} did not end within {self.scene.patience_s:g} s")
        error = task.exception()
        if isinstance(error, AssertionError):
            raise error
        return error or task.result()

    def assert_says_no_secret(self, *values: object) -> None:
        secret = self.scene.secret
        for value in values:
            text = str(msgspec.to_builtins(value)) if isinstance(value, msgspec.Struct) else str(value)
            assert not secret or secret not in text, f"it tells the secret: {text.replace(secret, '***')}"
