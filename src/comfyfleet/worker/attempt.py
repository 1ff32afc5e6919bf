"""One lease from its receipt to its report: runs the job, reports how it ended, and stops it on request.

The connector knows how a job runs; the hub decides what follows. `heartbeat.py` confirms the lease.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from comfyfleet.model.calls import (
    Completion,
    FailureReport,
    LeasedJob,
    ProgressReport,
    Release,
    ReportReply,
    WorkerReleaseReason,
)
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind, FileTooLarge, ServiceBusy, ServiceFailed, bounded
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.model.payload_digest import leased_sha256
from comfyfleet.ports import Connector, InputSource, OutputReceiver, OutputSource, WorkerApi
from comfyfleet.worker.job_files import TransferRetry, clean_up, gather_bounded, no_source, with_inputs
from comfyfleet.worker.progress_sender import ProgressBuffer, ProgressSender
from comfyfleet.worker.servers import leaves_runs
from comfyfleet.worker.settings import AgentSettings, Backoff, is_retryable, wait_within

_log = logging.getLogger(__name__)

# At these timeouts the connector has already tried to stop the run.
_STOPPED_BY_CONNECTOR = frozenset({FailureKind.START_TIMEOUT, FailureKind.STALL_TIMEOUT})
MAY_BE_THE_CONNECTION = frozenset(
    {
        FailureKind.TRANSIENT,
        FailureKind.CRASHED,
        FailureKind.ACCEPT_TIMEOUT,
        FailureKind.START_TIMEOUT,
        FailureKind.STALL_TIMEOUT,
    }
)
"""These may come from the connection to the server, not from the run on it."""
_MAY_HAVE_FINISHED = MAY_BE_THE_CONNECTION | {FailureKind.UNKNOWN}
_LEASE_IS_LOST = frozenset({RefusalCode.LEASE_LOST, RefusalCode.NOT_FOUND, RefusalCode.WRONG_PHASE})


class _NotTaken(Exception):
    """The hub did not take a report. The agent repeats it outside the slot."""


class StopReason(Enum):
    """Why a run is stopped."""

    CANCELLED = "cancelled"
    RETRY = "retry"
    DRAIN = "drain"
    LEASE_LOST = "lease_lost"
    """The hub said that the lease is over. A report that it does not take is not repeated."""
    ABANDONED = "abandoned"
    """No heartbeat was confirmed for `abandon_share` (80 %) of the lease. The lease may still be alive, so a report is
    repeated until its end."""

    @property
    def release_reason(self) -> WorkerReleaseReason | None:
        """The reason with which the lease is released. None: the worker has lost the lease already."""
        return _RELEASE_REASONS.get(self)


_RELEASE_REASONS: dict[StopReason, WorkerReleaseReason] = {
    StopReason.CANCELLED: "cancelled",
    StopReason.RETRY: "retry",
    StopReason.DRAIN: "drain",
}


_LEASE_IS_OVER = (StopReason.LEASE_LOST, StopReason.ABANDONED)


class AttemptRun:
    """Runs the job in the task that calls `run`: a short job costs no task, timer or future."""

    def __init__(
        self,
        job: LeasedJob,
        connector: Connector,
        api: WorkerApi,
        progress: ProgressSender,
        settings: AgentSettings,
    ) -> None:
        self.job = job
        self.ref = job.ref
        self.ttl_s = job.ttl_s
        self.confirmed_at = asyncio.get_running_loop().time()
        self._connector = connector
        self._api = api
        self._progress = progress
        self._settings = settings
        self._started_at: float | None = None
        """When the service began to execute. Time in the service's own queue is not run time."""
        self._outbox: ProgressBuffer | None = None
        self._runner: asyncio.Task[object] | None = None
        """Set only while the service runs the job."""
        self._stop_reason: StopReason | None = None
        self._interrupter: asyncio.Task[None] | None = None
        self._left: asyncio.Event | None = None
        self._is_torn_off = False
        self._is_occupied = False
        """The service was busy with other work: the lease is declined, and no failure is reported."""
        self._last_try_at: float | None = None
        """Set when the agent drains or stops."""
        self._hurry: asyncio.Event | None = None
        self.is_known_over = True
        """False: the agent stopped before it could report the end. The next start may still report it."""
        self.may_report_later = False
        """Whether `run` may return before the hub has taken the report."""
        self._has_outcome = False
        """The service has finished. Nothing is left to stop there, so only the hub ends the lease."""
        self._patience_s = 0.0
        """How long after the lease a report is still repeated: not at all while it holds a slot."""
        self._end: Callable[[], Awaitable[Failure | None]] | None = None

    @property
    def is_unreported(self) -> bool:
        """The job has ended, and `report` must still tell the hub. The lease needs heartbeats until then."""
        return self._end is not None

    @property
    def is_abandoned(self) -> bool:
        """The run was stopped because nobody confirmed its lease. The hub may still count it."""
        return self._stop_reason is StopReason.ABANDONED

    async def report(self) -> Failure | None:
        """Repeats the report that the hub did not take during `run`."""
        end, self.may_report_later, self._patience_s = self._end, False, self._settings.report_s
        assert end is not None, "this run is already reported"
        failure = await end()
        self._end = None
        return failure

    async def run(self) -> Failure | None:
        """Returns the job's failure, if any, when the lease needs nothing more or when `is_unreported`."""
        try:
            if (refused := _mismatch(self.job)) is not None:
                _log.error("%s", refused.message)
                return await self._told(partial(self._fail, refused, 0.0), refused)
            loop = asyncio.get_running_loop()
            begun_at = loop.time()
            outcome = await self._process() if self._stop_reason is None else None
            seconds = loop.time() - (begun_at if self._started_at is None else self._started_at)
            if isinstance(outcome, Failure) and outcome.kind in _MAY_HAVE_FINISHED and not self._stop_reason:
                outcome = await self._reconcile(outcome)
            if self._stop_reason is not None:
                return await self._end_stopped_run(outcome, seconds)
            self._has_outcome = True
            if isinstance(outcome, JobResult):
                outcome = await self._kept(outcome)
            assert outcome is not None, "a run that nobody stopped has an outcome"
            if isinstance(outcome, JobResult):
                return await self._told(partial(self._complete, outcome, seconds))
            if self._is_occupied:
                return await self._told(partial(self._decline, outcome), outcome)
            return await self._told(partial(self._fail, outcome, seconds), outcome)
        finally:
            if self._outbox is not None:
                self._outbox.close()
                self._outbox = None
            if self._interrupter is not None and not self._interrupter.done():
                self._interrupter.cancel()
                await asyncio.wait({self._interrupter})

    def stop(self, reason: StopReason) -> None:
        """Stops the run. A report under way goes on: whichever commits first wins. After a drain the run
        repeats an unanswered report only for the stop grace."""
        if reason is StopReason.DRAIN and self._last_try_at is None:
            self._last_try_at = asyncio.get_running_loop().time() + self._settings.stop_grace_s
            if self._hurry is not None:
                self._hurry.set()
        if self._stop_reason is None:
            self._stop_reason = reason
            if self._runner is not None:
                self._left = asyncio.Event()
                self._interrupter = asyncio.create_task(self._interrupt())
        elif reason.release_reason is None:
            self._stop_reason = reason

    def abandon(self) -> None:
        """Stops a run that another worker may soon get. A run that has ended waits for the hub instead."""
        if not self._has_outcome:
            self.stop(StopReason.ABANDONED)

    # run

    async def _process(self) -> JobResult | Failure | None:
        """None: the run was torn off, or stopped before it began."""
        runner = self._runner = asyncio.current_task()
        assert runner is not None
        try:
            if self.job.inputs:
                return await self._process_with_inputs()
            return await self._connector.process_job(self.job, self._tell)
        except ServiceFailed as failed:
            self._is_occupied = isinstance(failed, ServiceBusy)
            return failed.failure
        except asyncio.CancelledError as error:
            if runner.cancelling() > self._is_torn_off:
                raise
            # Nobody cancelled this task, so the connector let its own cancellation escape.
            return None if self._is_torn_off else _unexpected(error)
        except Exception as error:
            return _unexpected(error)
        finally:
            self._runner = None
            if self._is_torn_off:
                runner.uncancel()
            if self._left is not None:
                self._left.set()

    async def _process_with_inputs(self) -> JobResult | None:
        if not isinstance(self._api, InputSource):
            raise no_source(self.job)
        with TemporaryDirectory(prefix="comfyfleet-", dir=self._api.spool_folder()) as folder:
            job = await with_inputs(
                self._api, self.job, self._settings, lambda: self.confirmed_at, Path(folder)
            )
            if self._stop_reason is not None:
                return None
            return await self._connector.process_job(job, self._tell)

    def _tell(self, report: ProgressReport) -> None:
        if self._runner is None:
            return
        if report.kind is ProgressKind.STARTED and self._started_at is None:
            self._started_at = asyncio.get_running_loop().time()
        if self._outbox is None:
            self._outbox = self._progress.outbox()
        self._progress.put(self._outbox, report)

    async def _interrupt(self) -> None:
        await self._cancel_on_service()
        assert self._left is not None
        await wait_within(self._left, self._settings.cancel_settle_s)
        if self._runner is not None:
            self._is_torn_off = True
            self._runner.cancel()

    async def _cancel_on_service(self) -> None:
        if self._stop_reason in _LEASE_IS_OVER and leaves_runs(self._connector):
            return
        try:
            async with asyncio.timeout(self._settings.cancel_timeout_s):
                await self._connector.cancel_job(self.job)
        except Exception as error:
            _log.warning("%s could not stop %s: %r", self.job.service, self.ref.attempt_id, error)

    async def _reconcile(self, failure: Failure) -> JobResult | Failure:
        """Asks the service how the attempt ended: the failure may be only in the connection to it."""
        try:
            async with asyncio.timeout(self._settings.reconcile_timeout_s):
                found = await self._connector.reconcile(self.job)
        except Exception:
            return failure
        if found.result is not None:
            return found.result
        # The connector has tried to stop the run already; a second try would only delay the retry.
        if found.state in ("waiting", "running") and failure.kind not in _STOPPED_BY_CONNECTOR:
            await self._cancel_on_service()
        return failure

    # end

    async def _end_stopped_run(self, outcome: JobResult | Failure | None, seconds: float) -> Failure | None:
        assert self._stop_reason is not None
        if self._interrupter is not None:
            await self._interrupter
        if self._is_torn_off:
            # The run was torn off while it submitted the job, which may have arrived after the first cancel.
            await self._cancel_on_service()
        if self._stop_reason is StopReason.DRAIN and isinstance(outcome, JobResult):
            outcome = await self._kept(outcome)
            if isinstance(outcome, JobResult):
                return await self._complete(outcome, seconds)
            return await self._fail(outcome, seconds)
        if (reason := self._stop_reason.release_reason) is not None:
            await self._report(lambda: self._api.release(Release(self.ref, reason)))
        return None

    async def _kept(self, result: JobResult) -> JobResult | Failure:
        """Uploads the output files, if the hub stores files. Heartbeats renew the lease meanwhile."""
        if not isinstance(self._api, OutputReceiver) or not isinstance(self._connector, OutputSource):
            return result
        if not result.files:
            return result
        try:
            files = await gather_bounded([self._keep(file) for file in result.files])
        except ServiceFailed as failed:
            return failed.failure
        return msgspec.structs.replace(result, files=tuple(files))

    async def _keep(self, file: OutputFile) -> OutputFile:
        """Uploads one file and returns it with its id at the hub. Raises `ServiceFailed`."""
        assert isinstance(self._api, OutputReceiver) and isinstance(self._connector, OutputSource)
        patience = TransferRetry(self._settings, lambda: self.confirmed_at)
        while True:
            try:
                file_id = await self._api.store_output(self.ref, file, self._connector)
                return msgspec.structs.replace(file, file_id=file_id)
            except Exception as error:
                if isinstance(error, ServiceFailed) and error.failure.kind is FailureKind.OUTCOME_UNKNOWN:
                    # The output is lost, and another run would have to be paid.
                    raise
                is_refused = isinstance(error, Refusal) and error.code is RefusalCode.TOO_LARGE
                if is_refused or isinstance(error, FileTooLarge):
                    # The work is done: a file that only its server has is better than none.
                    _log.warning("%s is not uploaded and stays on its server: %s", file.filename, error)
                    return file
                is_over = isinstance(error, Refusal) and error.code in _LEASE_IS_LOST
                is_lost = self._stop_reason is not None and self._stop_reason.release_reason is None
                is_old = self._is_over_in(0.0, self._settings.report_s)
                if is_over or is_lost or is_old or self._is_late() or patience.is_over():
                    raise ServiceFailed(
                        Failure(
                            FailureKind.TRANSIENT,
                            f"The output {file.filename} could not be uploaded: {error}",
                        )
                    ) from error
            await self._pause(patience.next_s())

    async def _told(
        self, end: Callable[[], Awaitable[Failure | None]], failure: Failure | None = None
    ) -> Failure | None:
        try:
            return await end()
        except _NotTaken:
            self._end = end
            return failure

    async def _complete(self, result: JobResult, seconds: float) -> Failure | None:
        call = Completion(self.ref, result, seconds)
        answer = await self._report(lambda: self._api.complete(call))
        if isinstance(answer, ReportReply):
            await clean_up(self._connector, self.job, result)
        if not isinstance(answer, Refusal) or answer.code in _LEASE_IS_LOST:
            return None
        # Without a report the job would run again and end the same way.
        return await self._fail(
            Failure(FailureKind.UNKNOWN, f"The hub refused the result ({answer.code}): {answer.message}"),
            seconds,
        )

    async def _fail(self, failure: Failure, seconds: float) -> Failure | None:
        call = FailureReport(self.ref, bounded(failure), seconds)
        await self._report(lambda: self._api.fail(call))
        return failure

    async def _decline(self, failure: Failure) -> Failure:
        await self._report(lambda: self._api.release(Release(self.ref, "declined")))
        return failure

    async def _report(self, call: Callable[[], Awaitable[ReportReply]]) -> ReportReply | Refusal | None:
        """Repeats an idempotent report until it is answered. None: the lease is over."""
        if self._outbox is not None:
            await self._progress.flush(self._outbox)
        backoff: Backoff | None = None
        last: Exception | None = None
        while True:
            try:
                return await call()
            except asyncio.CancelledError:
                self._log_unreported(last or "the worker has stopped")
                raise
            except Exception as error:
                last = error
                if not is_retryable(error):
                    assert isinstance(error, Refusal)
                    if error.code not in _LEASE_IS_LOST:
                        _log.warning("the hub refused the report of %s: %s", self.ref.attempt_id, error)
                    return error
                if self.may_report_later and self._stop_reason is None:
                    _log.info("the hub did not take the report of %s yet: %s", self.ref.attempt_id, error)
                    raise _NotTaken from error
                if backoff is None:
                    backoff = Backoff(self._settings)
                pause_s = backoff.next_s()
                is_lost, is_late = self._stop_reason is StopReason.LEASE_LOST, self._is_late()
                if is_lost or is_late or self._is_over_in(pause_s, self._patience_s):
                    self._log_unreported(error)
                    self.is_known_over = not is_late
                    return None
            try:
                await self._pause(pause_s)
            except asyncio.CancelledError:
                self._log_unreported(last)
                raise

    def _log_unreported(self, cause: object) -> None:
        _log.warning(
            "the end of %s could not be reported; its lease expires, and another worker gets the job: %s",
            self.ref.attempt_id,
            cause,
        )

    def _is_over_in(self, seconds: float, patience_s: float) -> bool:
        """Whether the lease, and the patience after it, will be over then."""
        at = asyncio.get_running_loop().time() + seconds
        return at >= self.confirmed_at + self.ttl_s + patience_s

    def _is_late(self) -> bool:
        return self._last_try_at is not None and asyncio.get_running_loop().time() >= self._last_try_at

    async def _pause(self, pause_s: float) -> None:
        """A stop of the agent ends the pause, so that one more try follows."""
        if self._last_try_at is not None:
            await asyncio.sleep(min(pause_s, self._last_try_at - asyncio.get_running_loop().time()))
            return
        if self._hurry is None:
            self._hurry = asyncio.Event()
        await wait_within(self._hurry, pause_s)


def _mismatch(job: LeasedJob) -> Failure | None:
    """Compares the payload with the lease's digest. Hubs of older versions send no digest."""
    if job.payload_sha256 is None or (found := leased_sha256(job).hex()) == job.payload_sha256:
        return None
    return Failure(
        FailureKind.PAYLOAD_MISMATCH,
        f"The payload that arrived for job {job.job_id} is not the one that was submitted: its SHA-256 is {found}, "
        f"and the lease says {job.payload_sha256}. The worker did not run it.",
    )


def _unexpected(error: BaseException) -> Failure:
    return Failure(
        FailureKind.UNKNOWN,
        f"The connector raised {type(error).__name__}: {error}",
        exception_type=type(error).__name__,
        traceback=tuple(traceback.format_exception(error)),
    )
