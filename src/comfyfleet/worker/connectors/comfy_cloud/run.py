"""Follows one job at Comfy Cloud to its end: reports progress, watches the timeouts, stops it.

Looking at the job is the truth; the event stream only tells earlier. The run is paid, so lost connections are waited
out, and nothing here ever submits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.worker.connectors.comfy_cloud import failures
from comfyfleet.worker.connectors.comfy_cloud.account import CloudAccount
from comfyfleet.worker.connectors.comfy_cloud.api import CloudApi
from comfyfleet.worker.connectors.comfy_cloud.backoff import CloudBackoff, with_jitter
from comfyfleet.worker.connectors.comfy_cloud.event_stream import CloudEvent, CloudEventStream
from comfyfleet.worker.connectors.comfy_cloud.job_state import ENDS, job_in, read_end, stop
from comfyfleet.worker.connectors.comfy_cloud.outputs import read_outputs
from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings
from comfyfleet.worker.connectors.comfyui.api import Unreachable

_MAX_TEXT = 4_000
_FRESH_S = 15.0
"""While events come, the job is looked at rarely."""
_SHARE_OF_AGE = 0.1
"""The pause between two looks grows with the age of the run."""

Reporter = Callable[[ProgressReport], None]


class CloudRun:
    def __init__(
        self,
        job: LeasedJob,
        mark: str,
        report: Reporter,
        api: CloudApi,
        account: CloudAccount,
        settings: ComfyCloudSettings,
    ) -> None:
        self.mark = mark
        self.job_id: str | None = None
        """Set as soon as the job is known at Comfy Cloud."""
        self.is_cancelled = False
        self._job = job
        self._report = report
        self._api = api
        self._account = account
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._accepted_at = 0.0
        self._started_at: float | None = None
        self._sign_at = 0.0
        self._signs: tuple[Any, ...] = ()
        self._links: Any = None
        self._progress: dict[str, Any] = {}
        self._share = 0.0
        self._told_outputs: set[tuple[str, str]] = set()
        self._looked_at = 0.0
        self._heard_at = float("-inf")
        """When the last event came. A stream may be open and bring nothing."""
        self._lost_since: float | None = None
        self._silent_since: float | None = None

    def cancel(self) -> None:
        self.is_cancelled = True
        self._wake.set()

    def accepted(self, job_id: str) -> None:
        self.job_id = job_id
        self._accepted_at = self._sign_at = self._loop.time()
        self._tell(ProgressKind.ACCEPTED, {"prompt_id": self.mark, "service_job": job_id})

    async def follow(self, streams: CloudEventStream) -> JobResult:
        """Raises `ServiceFailed`."""
        assert self.job_id is not None, "a job is followed after it was accepted"
        listener = asyncio.create_task(self._listen(streams))
        backoff = CloudBackoff(self._settings)
        try:
            while True:
                self._wake.clear()
                asked_s = await self._look(backoff)
                if isinstance(asked_s, JobResult):
                    return asked_s
                if (overdue := self._overdue()) is not None:
                    return await self._stop_overdue(overdue)
                await self._pause(asked_s, backoff)
        finally:
            listener.cancel()
            await asyncio.wait({listener})

    async def _look(self, backoff: CloudBackoff) -> JobResult | float:
        """The result, or how long the server asks to wait."""
        assert self.job_id is not None
        self._looked_at = self._loop.time()
        try:
            answer = await self._api.job(self.job_id)
        except Unreachable as error:
            self._no_answer(str(error))
            return 0.0
        if (found := job_in(answer)) is not None:
            self._lost_since = self._silent_since = None
            backoff.reset()
            return self._read(found)
        if answer.status == 404:
            self._lost_since = self._lost_since or self._loop.time()
            if self._loop.time() >= self._lost_since + self._settings.lost_s:
                raise failures.unknown_outcome(
                    self.mark,
                    f"Comfy Cloud accepted the job {self.job_id} and does not know it any more.",
                    self.job_id,
                )
            return 0.0
        if answer.status in (401, 403) and not self._account.is_paused:
            # The run goes on and is paid. Another key may be given meanwhile.
            self._account.refused(answer)
        self._no_answer(f"it answers {answer.status} to the request for the job")
        return answer.retry_after_s or 0.0

    def _no_answer(self, why: str) -> None:
        self._silent_since = self._silent_since or self._loop.time()
        if self._loop.time() >= self._silent_since + self._settings.unreachable_s:
            raise failures.unknown_outcome(
                self.mark,
                f"Comfy Cloud did not tell about the job {self.job_id} for {self._settings.unreachable_s:g} s: {why}.",
                self.job_id,
            )

    def _read(self, job: Mapping[str, Any]) -> JobResult | float:
        status = job["status"]
        urls = job.get("urls")
        self._links = urls.get("events") if isinstance(urls, Mapping) else None
        if status in ENDS:
            if job.get("started_at") is not None or status == "succeeded":
                self._started()
            return self._end(job)
        self._on_progress(job.get("progress"))
        self._tell_outputs(job)
        outputs = job.get("outputs")
        self._note_signs(status, job.get("queue_position"), len(outputs) if isinstance(outputs, list) else 0)
        if status != "queued":
            self._started()
        return 0.0

    def _note_signs(self, *signs: Any) -> None:
        if signs != self._signs:
            self._signs, self._sign_at = signs, self._loop.time()

    def _started(self) -> None:
        if self._started_at is None:
            self._started_at = self._sign_at = self._loop.time()
            self._tell(ProgressKind.STARTED, {"prompt_id": self.mark})

    # the end

    def _end(self, job: Mapping[str, Any]) -> JobResult:
        self._tell_outputs(job)
        return read_end(
            job,
            self._api,
            self._account,
            self._settings,
            self._job.include_outputs,
            is_cancelled=self.is_cancelled,
        )

    # events

    async def _listen(self, streams: CloudEventStream) -> None:
        """Ends when the stream does; the looks go on."""
        assert self.job_id is not None
        async for event in streams.of(self.job_id, lambda: self._links):
            self._hear(event)

    def _hear(self, event: CloudEvent) -> None:
        self._heard_at = self._loop.time()
        match event.name:
            case "status":
                if event.data.get("status") in ENDS:
                    self._wake.set()
                elif event.data.get("status") == "running":
                    self._started()
                self._sign_at = self._loop.time()
            case "progress":
                self._on_progress(event.data)
            case "preview" if event.image is not None:
                self._sign_at = self._loop.time()
                node = event.data.get("node_id")
                data = {"node": node if isinstance(node, str) else None}
                self._tell(ProgressKind.PREVIEW, data, event.image)
            case "output" if self._heard_at >= self._looked_at + self._settings.poll_s:
                # Only the job's own list is complete. A run may have very many outputs.
                self._wake.set()

    def _on_progress(self, found: Any) -> None:
        if not isinstance(found, Mapping) or _number(found.get("value")) is None:
            return
        # Looks and events may come in another order than they were made.
        self._share = max(self._share, min(1.0, _number(found.get("value")) or 0.0))
        step, steps = _number(found.get("step")), _number(found.get("steps"))
        is_step = step is not None and steps is not None and 0 <= step <= steps
        data: dict[str, Any] = {
            "value": step if is_step else None,
            "max": steps if is_step else None,
            "node": _text(found.get("current_node")),
            "percentage": round(100 * self._share, 1),
            "nodes_done": _number(found.get("nodes_done")),
            "nodes_total": _number(found.get("nodes_total")),
        }
        if (message := _text(found.get("message")) or _text(found.get("current_node_class"))) is not None:
            data["message"] = message
        self._started()
        if data != self._progress:
            self._progress = data
            self._sign_at = self._loop.time()
            self._tell(ProgressKind.PROGRESS, data)

    def _tell_outputs(self, job: Mapping[str, Any]) -> None:
        if not isinstance(job.get("outputs"), list):
            return
        with suppress(ServiceFailed):
            result = read_outputs(job, self._api, self._job.include_outputs)
            for node, output in result.outputs.items():
                files = [msgspec.to_builtins(file) for file in result.files if file.node_id == node]
                key = (node, str(len(files)))
                if key not in self._told_outputs:
                    self._told_outputs.add(key)
                    self._tell(ProgressKind.OUTPUT, {"node": node, "output": output, "files": files})

    def _tell(self, kind: ProgressKind, data: dict[str, Any], image: bytes | None = None) -> None:
        self._report(ProgressReport(self._job.ref, kind, data, image))

    # timers

    def _overdue(self) -> Failure | None:
        now, timeouts = self._loop.time(), self._job.timeouts
        if now >= self._accepted_at + self._settings.longest_s:
            return Failure(
                FailureKind.TOTAL_TIMEOUT,
                f"The job did not end at Comfy Cloud within {self._settings.longest_s:g} s (`longest_s`).",
            )
        if self._silent_since is not None or self._lost_since is not None:
            # Nobody can tell, and a stop would not arrive.
            return None
        if self._started_at is None:
            if timeouts.start_s is not None and now >= self._accepted_at + timeouts.start_s:
                return Failure(
                    FailureKind.START_TIMEOUT,
                    f"Comfy Cloud accepted the job and did not start it within {timeouts.start_s:g} s.",
                )
        elif timeouts.stall_s is not None and now >= self._sign_at + timeouts.stall_s:
            return Failure(
                FailureKind.STALL_TIMEOUT, f"The run gave no sign of life for {timeouts.stall_s:g} s."
            )
        return None

    async def _stop_overdue(self, overdue: Failure) -> JobResult:
        """The run may complete at the last moment. A run that cannot be stopped costs money and must not be
        repeated."""
        assert self.job_id is not None
        ended = await stop(self._api, self._settings, self.job_id, self._settings.stop_s)
        if ended is None or ended["status"] not in ENDS:
            raise failures.unknown_outcome(
                self.mark, f"{overdue.message} And it could not be stopped.", self.job_id
            )
        if ended.get("status") == "canceled":
            raise ServiceFailed(overdue)
        return self._end(ended)

    async def _pause(self, asked_s: float, backoff: CloudBackoff) -> None:
        now, settings = self._loop.time(), self._settings
        if asked_s or self._silent_since is not None or self._lost_since is not None:
            pause_s = backoff.next_s(asked_s)
            if self._lost_since is not None:
                pause_s = min(pause_s, max(settings.lost_s / 4, 0.01))
        else:
            pause_s = min(
                settings.poll_max_s, max(settings.poll_s, (now - self._accepted_at) * _SHARE_OF_AGE)
            )
            if now < self._heard_at + _FRESH_S:
                pause_s = settings.poll_max_s
            pause_s = with_jitter(pause_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(pause_s, self._next_timeout() - now))):
                await self._wake.wait()

    def _next_timeout(self) -> float:
        timeouts, moments = self._job.timeouts, [self._accepted_at + self._settings.longest_s]
        if self._silent_since is None and self._lost_since is None:
            if self._started_at is None and timeouts.start_s is not None:
                moments.append(self._accepted_at + timeouts.start_s)
            if self._started_at is not None and timeouts.stall_s is not None:
                moments.append(self._sign_at + timeouts.stall_s)
        return min(moments)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e15:
        return None
    return value if math.isfinite(value) else None


def _text(value: Any) -> str | None:
    return value[:_MAX_TEXT] if isinstance(value, str) and value else None
