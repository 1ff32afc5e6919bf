"""One attempt as a background job of LangFlow 1.11 and later: submit, events beside status, the end, and the stop.

The attempt id is the idempotency key, so a repeated submit finds the same job while it waits, runs or has completed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind, ServiceBusy, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.worker.connectors.comfyui.api import HttpRefusals
from comfyfleet.worker.connectors.langflow import failures
from comfyfleet.worker.connectors.langflow.api import AnswerTooLarge, LangFlowApi, Unreachable, chunks_of
from comfyfleet.worker.connectors.langflow.events import EventReader, RunEvents, StreamEvent
from comfyfleet.worker.connectors.langflow.failures import fail, interrupted
from comfyfleet.worker.connectors.langflow.job_status import JobState, JobStatus, is_probe, read_status
from comfyfleet.worker.connectors.langflow.outputs import read_result
from comfyfleet.worker.connectors.langflow.payload import FlowCall
from comfyfleet.worker.connectors.langflow.settings import LangFlowSettings

log = logging.getLogger(__name__)

_RETRY_S = 0.25
_MESSAGE_EVERY_S = 0.2


class _Forgotten(Exception):
    """The server has queued the job and does not start it."""


async def submit(
    api: LangFlowApi, settings: LangFlowSettings, body: Mapping[str, Any], within_s: float
) -> str:
    """Returns the job id. A repeat is safe: the key finds the same job. Raises `ServiceFailed`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    refusals = HttpRefusals(settings.refused_s)
    may_have_arrived = False
    while True:
        try:
            answer = await api.submit(body, max(0.01, deadline - loop.time()))
        except Unreachable as error:
            why = str(error)
            may_have_arrived = may_have_arrived or not error.is_refused
            if refusals.are_enough(error):
                failure = Failure(FailureKind.CRASHED, f"Cannot submit to LangFlow: {why}")
                raise (ServiceFailed if may_have_arrived else ServiceBusy)(failure) from error
        else:
            refusals.answered()
            code = failures.code_of(answer.body)
            if answer.is_ok:
                job_id = answer.body.get("job_id") if isinstance(answer.body, Mapping) else None
                if isinstance(job_id, str) and job_id:
                    return job_id
                raise fail(
                    FailureKind.TRANSIENT,
                    "What answers the submit is not LangFlow: it names no job. Check the address of the server.",
                )
            if answer.status == 404 and code == "FLOW_NOT_FOUND":
                raise failures.missing_flow(str(body.get("flow_id")))
            if answer.status not in (409, 500, 502, 503, 504):
                raise failures.refused_request(answer.status, answer.body, "the submit")
            # A run under way with the same key, or a server that is busy for now.
            why = f"status {answer.status} {failures.text_of(answer.body)}".strip()
        if loop.time() + _RETRY_S >= deadline:
            raise fail(
                FailureKind.ACCEPT_TIMEOUT, f"LangFlow did not accept the job within {within_s:g} s: {why}"
            )
        await asyncio.sleep(_RETRY_S)


async def stop(api: LangFlowApi, settings: LangFlowSettings, job_id: str, within_s: float) -> JobStatus:
    """Stops exactly this job and returns how it ended. Raises `ServiceFailed` if that is not known in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    is_asked = is_unclear = False
    why = ""
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                if not is_asked:
                    answer = await api.stop(job_id)
                    is_asked = answer.is_ok or answer.status in (404, 409, 422)
                    why = failures.text_of(answer.body)
                status = read_status(await api.status(job_id))
            if status is not None and status.state.is_over and status.state is not JobState.UNCLEAR:
                return status
            if status is not None:
                why = f"it is {status.state.value}"
                # A stop that came before the start can be lost.
                is_unclear = status.state is JobState.UNCLEAR
                is_asked = is_asked and is_unclear
        except TimeoutError:
            why = why or "no answer in time"
        except Unreachable as error:
            if error.is_closed:
                raise fail(FailureKind.CRASHED, f"Cannot reach LangFlow to stop the run: {error}") from error
            why = str(error)
        if loop.time() >= deadline:
            if is_unclear:
                return JobStatus(JobState.CANCELLED)
            raise fail(
                FailureKind.STALL_TIMEOUT,
                f"The LangFlow job {job_id} did not stop within {within_s:g} s: {why}. A component that blocks the "
                "server's process cannot be interrupted.",
            )
        await asyncio.sleep(min(settings.cancel_interval_s, max(0.0, deadline - loop.time())))


class BackgroundRun:
    def __init__(
        self,
        job: LeasedJob,
        call: FlowCall,
        report: Callable[[ProgressReport], None],
        api: LangFlowApi,
        settings: LangFlowSettings,
    ) -> None:
        self.job_id: str | None = None
        self.is_cancelled = False
        self._job = job
        self._call = call
        self._report = report
        self._api = api
        self._settings = settings
        self._events = RunEvents()
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_started = False
        self._is_deaf = False
        self._room = settings.max_message_bytes
        self._news_at = self._loop.time()
        self._told_at = float("-inf")

    def cancel(self) -> None:
        self.is_cancelled = True
        self._wake.set()

    async def follow(self, job_id: str, resubmit: Callable[[], Any]) -> JobResult:
        """Until the end of the job. Raises `ServiceFailed`."""
        start_s = self._job.timeouts.start_s
        limit = self._loop.time() + (self._settings.start_s if start_s is None else start_s)
        patience_s = self._settings.queued_s
        while True:
            self.job_id = job_id
            self._tell(ProgressKind.ACCEPTED, {"prompt_id": job_id})
            listener = asyncio.create_task(self._listen(job_id))
            try:
                return await self._until_end(job_id, patience_s, limit)
            except _Forgotten:
                await stop(self._api, self._settings, job_id, self._settings.cancel_s)
                log.warning(
                    "LangFlow job %s stayed queued for %g s; it is submitted anew", job_id, patience_s
                )
            finally:
                listener.cancel()
                await asyncio.wait({listener})
            if self.is_cancelled:
                raise interrupted("The run was cancelled while it was queued.")
            # A job that waits behind others loses its place with each new submit, so the pauses grow.
            patience_s *= 2
            self._events = RunEvents()
            job_id = await resubmit()

    async def collect(self, job_id: str, body: Mapping[str, Any], within_s: float) -> JobResult:
        """The result of a completed job. Raises `ServiceFailed` if a component failed."""
        listener = asyncio.create_task(self._listen(job_id))
        try:
            return await self._completed(body, within_s)
        finally:
            listener.cancel()
            await asyncio.wait({listener})

    # the status

    async def _until_end(self, job_id: str, patience_s: float, limit: float) -> JobResult:
        settings, loop = self._settings, self._loop
        queued_until = loop.time() + patience_s
        refusals = HttpRefusals(settings.refused_s)
        silent_since: float | None = None
        unclear_until: float | None = None
        soon_s = 0.1
        self._news_at = loop.time()
        while True:
            self._wake.clear()
            status: JobStatus | None = None
            try:
                answer = await self._api.status(job_id)
                refusals.answered()
                if answer.status in (401, 403):
                    raise fail(FailureKind.DEAD_WORKER, failures.KEY_REFUSED.format(status=answer.status))
                status = read_status(answer)
                why = f"status {answer.status} {failures.text_of(answer.body)}".strip()
            except AnswerTooLarge as error:
                await self._give_up(job_id)
                raise fail(
                    FailureKind.NODE_ERROR,
                    f"The result of the flow has {error}, which is the limit. Return less, or raise max_answer_bytes.",
                ) from error
            except Unreachable as error:
                why = str(error)
                if refusals.are_enough(error):
                    raise fail(FailureKind.CRASHED, f"LangFlow is gone: {why}") from error
            now = loop.time()
            if status is None:
                silent_since = now if silent_since is None else silent_since
                if now >= silent_since + settings.unresponsive_s:
                    raise fail(
                        FailureKind.CRASHED,
                        f"LangFlow gave no useful answer for {settings.unresponsive_s:g} s: {why}",
                    )
                await self._wait(min(1.0, settings.poll_s))
                continue
            silent_since = None
            match status.state:
                case JobState.QUEUED if not self._events.has_started:
                    if now >= limit:
                        await self._give_up(job_id)
                        raise fail(
                            FailureKind.START_TIMEOUT,
                            "LangFlow did not start the job in time: it is queued behind others. Give this worker as "
                            "many slots as LangFlow runs jobs (LANGFLOW_BACKGROUND_MAX_CONCURRENCY).",
                        )
                    if now >= queued_until and not self.is_cancelled:
                        raise _Forgotten
                    self._news_at = now
                case JobState.QUEUED | JobState.RUNNING:
                    self._started()
                    stall_s = self._job.timeouts.stall_s
                    if stall_s is not None and now >= self._news_at + stall_s:
                        await self._give_up(job_id)
                        raise fail(
                            FailureKind.STALL_TIMEOUT, f"The flow showed no progress for {stall_s:g} s."
                        )
                case JobState.SUSPENDED:
                    await self._give_up(job_id)
                    raise fail(
                        FailureKind.INVALID_WORKFLOW,
                        "The flow waits for a person (human in the loop), and nobody can answer it from here. The run "
                        "was stopped. Remove that component from the flow.",
                    )
                case JobState.COMPLETED:
                    self._started()
                    return await self._completed(status.body, settings.settle_s)
                case JobState.UNCLEAR:
                    unclear_until = now + settings.settle_s if unclear_until is None else unclear_until
                    if now >= unclear_until:
                        if self.is_cancelled:
                            raise interrupted("The run was cancelled.")
                        raise ServiceFailed(failures.terminated())
                    await asyncio.sleep(min(settings.cancel_interval_s, settings.settle_s / 4))
                    continue
                case JobState.FAILED:
                    self._started()
                    assert status.failure is not None, "a failed job has a failure"
                    raise ServiceFailed(status.failure)
                case JobState.CANCELLED:
                    who = (
                        "The run was cancelled."
                        if self.is_cancelled
                        else "Somebody stopped the run in LangFlow."
                    )
                    raise interrupted(who)
                case JobState.UNKNOWN:
                    raise fail(
                        FailureKind.CRASHED,
                        "LangFlow does not know the job any more: its database was replaced or cleaned up.",
                    )
            # The status can be a little later than the last event.
            pause_s = settings.poll_s
            if self._events.has_ended:
                pause_s, soon_s = min(pause_s, soon_s), soon_s * 2
            stall_s = self._job.timeouts.stall_s
            await self._wait(pause_s if stall_s is None else min(pause_s, max(0.01, stall_s / 4)))

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _completed(self, body: Mapping[str, Any], within_s: float) -> JobResult:
        deadline = self._loop.time() + within_s
        # The events name the files, and the components that failed in a run that counts as completed.
        while not self._events.has_ended and not self._is_deaf and self._loop.time() < deadline:
            self._wake.clear()
            await self._wait(deadline - self._loop.time())
        # LangFlow 1.11 does not name the session of a completed job.
        if is_probe(body) or (self._events.ran_nothing and not body.get("outputs")):
            raise interrupted(
                "The run had no component: the attempt was cancelled before it was submitted, or the flow is empty."
            )
        if self._events.invalid is not None:
            raise ServiceFailed(self._events.invalid)
        if not self._events.has_ended:
            log.warning(
                "the events of LangFlow job %s are incomplete; files of its messages can be missing",
                body.get("job_id"),
            )
        return read_result(body, self._events, self._call, self._job.include_outputs, self._api.base)

    async def _give_up(self, job_id: str) -> None:
        """Stops a run that has failed for us. The failure is reported in any case."""
        try:
            await stop(self._api, self._settings, job_id, min(5.0, self._settings.cancel_s))
        except ServiceFailed as error:
            log.warning("%s", error)

    # the events

    async def _listen(self, job_id: str) -> None:
        events = self._events
        while not events.has_ended:
            try:
                async with self._api.events(job_id, events.last_id) as response:
                    if response.status == 200:
                        await self._read(response)
            except AnswerTooLarge as error:
                self._is_deaf = True
                log.warning("LangFlow job %s: %s; they are not read any more", job_id, error)
                self._wake.set()
                return
            except Unreachable as error:
                log.debug("the events of LangFlow job %s broke off: %s", job_id, error)
            if not events.has_ended:
                await asyncio.sleep(self._settings.reconnect_s)

    async def _read(self, response: Any) -> None:
        reader = EventReader(self._settings.max_message_bytes)
        async for chunk in chunks_of(response):
            # Also bounds what reconnects repeat.
            self._room -= len(chunk)
            if self._room < 0:
                raise AnswerTooLarge(f"its events have more than {self._settings.max_message_bytes} bytes")
            for event in reader.feed(chunk):
                self._heard(event)
            if self._events.has_ended:
                return
        for event in reader.finish():
            self._heard(event)

    def _heard(self, event: StreamEvent) -> None:
        before = self._events.progress
        kind = self._events.take(event)
        self._news_at = self._loop.time()
        if self._events.has_started:
            self._started()
        if self._events.has_ended or kind == "error":
            self._wake.set()
        data = event.content.get("data")
        data = data if isinstance(data, Mapping) else {}
        if kind == "output" and isinstance(node := data.get("component_id"), str):
            included = self._job.include_outputs
            if not included or node in included:
                output = self._events.outputs.get(node, {})
                self._tell(ProgressKind.OUTPUT, {"node": node, "output": output, "files": []})
        message = data.get("message") if kind == "log" else None
        done, count = self._events.progress
        is_message_due = isinstance(message, str) and self._news_at >= self._told_at + _MESSAGE_EVERY_S
        if count and (before != (done, count) or is_message_due):
            self._told_at = self._news_at
            progress = {
                "value": done,
                "max": count,
                "node": self._events.component,
                "percentage": round(100 * done / count, 1),
            }
            if isinstance(message, str):
                progress["message"] = message[:200]
            self._tell(ProgressKind.PROGRESS, progress)

    def _started(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._tell(ProgressKind.STARTED, {"prompt_id": self.job_id})

    def _tell(self, kind: ProgressKind, data: dict[str, Any]) -> None:
        self._report(ProgressReport(self._job.ref, kind, data))
