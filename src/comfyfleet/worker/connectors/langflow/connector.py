"""The `Connector` for one LangFlow server.

It owns what the attempts on that server share and the order of their steps. `background_run.py` follows a job of
LangFlow 1.11 and later, `direct_run.py` runs a flow on an older server. Leases, retries and routing are not known here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from comfyfleet.model.calls import LeasedJob, ProgressReport, RunningAttempt
from comfyfleet.model.failure import Failure, FailureKind, FileTooLarge, ServiceBusy, ServiceFailed
from comfyfleet.model.file import FetchedFile
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import Attachment, JobResult, OutputFile
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.ports import Inventory
from comfyfleet.worker.connectors.langflow import failures, flows
from comfyfleet.worker.connectors.langflow.api import AnswerTooLarge, LangFlowApi, Unreachable, pieces_of
from comfyfleet.worker.connectors.langflow.background_run import BackgroundRun, stop, submit
from comfyfleet.worker.connectors.langflow.direct_run import DirectRun
from comfyfleet.worker.connectors.langflow.failures import fail, interrupted
from comfyfleet.worker.connectors.langflow.flow_files import FlowFiles, PlacedFiles
from comfyfleet.worker.connectors.langflow.job_status import PROBE, JobState, JobStatus, is_probe, read_status
from comfyfleet.worker.connectors.langflow.outputs import download_path
from comfyfleet.worker.connectors.langflow.payload import SERVICE, FlowCall, read_call
from comfyfleet.worker.connectors.langflow.server_health import ServerHealth
from comfyfleet.worker.connectors.langflow.settings import LangFlowSettings, parse_base

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_WITH_JOBS = 11
"""The minor version with background jobs and idempotency keys: 1.11, or 0.11 of langflow-base without langflow."""

_FIRST_WITH_REFUSED_CODE = 13
"""The minor version that is known to refuse tweaks of code. 1.11 ignores them, so that a probe keeps the key."""
_MAX_REMEMBERED = 10_000
_PROBED_FLOWS = 5
_VERSION = re.compile(r"(\d+)\.(\d+)")


class LangFlow:
    """One LangFlow server as a `Connector`, and an async context manager that opens and closes it."""

    service_name = SERVICE

    def __init__(self, address: str, settings: LangFlowSettings | None = None) -> None:
        self.settings = settings or LangFlowSettings()
        self._api = LangFlowApi(parse_base(address), self.settings)
        self._health = ServerHealth(self._api, self.settings)
        self._files = FlowFiles(self._api, self.settings)
        self._runs: dict[str, BackgroundRun | DirectRun | None] = {}
        self._submits: dict[str, asyncio.Task[str]] = {}
        self._jobs: OrderedDict[str, str] = OrderedDict()
        """The job ids of attempts, also after their end: a cancel can come late."""
        self._background: set[asyncio.Task[Any]] = set()
        self._has_jobs: bool | None = None
        self._refuses_code = False
        self._version: str | None = None

    @property
    def url(self) -> str:
        return self._api.base

    async def __aenter__(self) -> LangFlow:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Succeeds even if the server is away."""
        await self._api.open()

    async def close(self) -> None:
        # After a cut submit nobody knows whether the job arrived, so it gets a little time.
        if self._submits:
            await asyncio.wait(set(self._submits.values()), timeout=self.settings.close_s)
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(set(self._background))
        await self._health.close()
        await self._api.close()

    # Connector

    @property
    def defect(self) -> str | None:
        """Why the last check failed. It contains no server address."""
        return self._health.defect

    async def check_health(self) -> bool:
        return await self._health.check(is_running=bool(self._runs))

    async def inventory(self) -> Inventory:
        """Raises `ServiceFailed` if the server does not answer."""
        try:
            body = await self._read_version()
            answer = await self._api.flows()
        except Unreachable as error:
            raise fail(FailureKind.TRANSIENT, f"Cannot read the list of flows: {error}") from error
        if not answer.is_ok or not isinstance(answer.body, list):
            if answer.status in (401, 403):
                self._health.refused_key(answer.status)
            raise failures.refused_request(answer.status, answer.body, "the list of flows")
        names = frozenset(name for flow in flows.read_flows(answer.body) for name in flow.names)
        service = Service(SERVICE, self.settings.providers, self._version, models=names)
        return Inventory(
            Capabilities(services=(service,), is_fake=body.get("is_fake") is True),
            boot=str(self._health.restarts),
        )

    async def process_job(self, job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        attempt = job.attempt_id
        if attempt in self._runs:
            raise fail(FailureKind.UNKNOWN, f"Attempt {attempt} is already running here.")
        # Registered before the first step, so that a cancel always finds it.
        self._runs[attempt] = None
        placed = PlacedFiles()
        is_kept = False
        try:
            call = read_call(job.workflow)
            if self._has_jobs is None:
                await self._read_version()
            run = (DirectRun if not self._has_jobs or call.globals else BackgroundRun)(
                job, call, report, self._api, self.settings
            )
            if attempt not in self._runs:
                raise interrupted("The attempt was cancelled before it was submitted.")
            self._runs[attempt] = run
            flow_id = await flows.find_flow(self._api, call.flow)
            tweaks = await self._place(job, call, flow_id, placed, is_direct=isinstance(run, DirectRun))
            if run.is_cancelled:
                raise interrupted("The attempt was cancelled before it was submitted.")
            if isinstance(run, DirectRun):
                result = await run.run(flow_id, tweaks)
            else:
                result = await self._run_in_background(run, job, call, flow_id, tweaks, placed)
            is_kept = True
            return result
        except InvalidWorkflow as error:
            raise fail(FailureKind.INVALID_WORKFLOW, str(error)) from error
        except AnswerTooLarge as error:
            raise fail(FailureKind.TRANSIENT, f"LangFlow's answer about the flow has {error}.") from error
        except Unreachable as error:
            # Nothing was submitted yet.
            failure = Failure(FailureKind.TRANSIENT, f"Cannot prepare the run on LangFlow: {error}")
            raise ServiceBusy(failure) from error
        except ServiceFailed as failed:
            if isinstance(failed, failures.KeyRefused):
                self._health.refused_key(None)
            elif failed.failure.kind is FailureKind.CRASHED:
                self._health.restarts += 1
            raise
        finally:
            ended = self._runs.pop(attempt, None)
            if isinstance(ended, DirectRun):
                # Also if it was cancelled before it was sent: a cancel waits for this.
                ended.is_over.set()
            if not is_kept and placed.names:
                self._start(self._files.remove(placed))

    async def cancel_job(self, job: LeasedJob) -> None:
        """Raises `ServiceFailed` if the job could not be stopped in time."""
        attempt, settings = job.attempt_id, self.settings
        deadline = asyncio.get_running_loop().time() + settings.cancel_s
        run = self._runs.get(attempt)
        if run is not None:
            run.cancel()
        elif attempt in self._runs:
            # It has not chosen its way yet, and finds out that it is not wanted.
            del self._runs[attempt]
            return
        if isinstance(run, DirectRun):
            async with asyncio.timeout(settings.cancel_s):
                await run.is_over.wait()
            # LangFlow notices a moment later that we hung up, and tells nobody.
            await asyncio.sleep(settings.hang_up_s)
            return
        if (task := self._submits.get(attempt)) is not None:
            await asyncio.wait({task}, timeout=settings.cancel_s)
        job_id = self._jobs.get(attempt)
        try:
            if job_id is None and run is None:
                job_id = await self._find_by_key(attempt, keeps_key=True)
        except Unreachable as error:
            raise fail(FailureKind.CRASHED, f"Cannot reach LangFlow to stop the run: {error}") from error
        if job_id is not None:
            left_s = max(0.1, deadline - asyncio.get_running_loop().time())
            await stop(self._api, settings, job_id, left_s)

    async def reconcile(self, job: LeasedJob) -> RunningAttempt:
        """States besides those of the port: `completed` with its result, `interrupted`, `failed`."""
        if isinstance(self._runs.get(job.attempt_id), DirectRun):
            return RunningAttempt("running")
        try:
            job_id, status = await self._status_of(job.attempt_id)
        except Unreachable as error:
            raise fail(FailureKind.TRANSIENT, f"Cannot ask LangFlow about the attempt: {error}") from error
        if status is None:
            return RunningAttempt("unknown")
        match status.state:
            case JobState.QUEUED:
                return RunningAttempt("waiting")
            case JobState.RUNNING | JobState.SUSPENDED:
                return RunningAttempt("running")
            case JobState.COMPLETED:
                return await self._completed(job, job_id, status.body)
            case JobState.CANCELLED:
                return RunningAttempt("interrupted")
            case JobState.UNKNOWN:
                return RunningAttempt("unknown")
        return RunningAttempt("failed")

    async def clean_up(self, job: LeasedJob, *, are_outputs_kept: bool) -> None:  # noqa: ARG002
        """Removes the inputs of the attempt. Its outputs belong to the flow. Raises `Unreachable`."""
        if not (job.inputs or job.fetched or job.attachments):
            return
        flow_id = await flows.find_flow(self._api, read_call(job.workflow).flow)
        await self._files.remove_all(flow_id, prompt_id_of(job.attempt_id))

    async def save(self, file: OutputFile, path: Path) -> int:
        """Saves a file of the server at a path and returns its size. Raises `ServiceFailed`."""
        usage = await asyncio.to_thread(shutil.disk_usage, path.parent)
        most = min(self.settings.max_file_bytes, max(0, usage.free - self.settings.min_free_bytes))
        what = f"the file {file.filename[:200]!r} of the flow"
        try:
            size = await self._download(download_path(file), path, most)
            if size is None and (other := await self._files.path_of_user_file(file)) is not None:
                size = await self._download(other, path, most)
        except AnswerTooLarge as error:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            words = f"LangFlow sends {what} with {error}, which is the limit."
            raise FileTooLarge(Failure(FailureKind.UNKNOWN, words)) from error
        except Unreachable as error:
            raise fail(FailureKind.TRANSIENT, f"LangFlow did not send {what}: {error}") from error
        if size is None:
            raise fail(FailureKind.TRANSIENT, f"LangFlow does not have {what} any more.")
        return size

    async def _download(self, source: str, path: Path, most: int) -> int | None:
        """None: there is no such file."""
        async with self._api.download(source) as response:
            if response.status in (400, 404, 422, 500):
                return None
            if response.status != 200:
                raise failures.refused_request(response.status, None, "a download")
            size = 0
            with path.open("wb") as target:
                async for chunk in pieces_of(response, most):
                    target.write(chunk)
                    size += len(chunk)
            return size

    # steps of an attempt

    async def _place(
        self, job: LeasedJob, call: FlowCall, flow_id: str, placed: PlacedFiles, *, is_direct: bool
    ) -> dict[str, dict[str, Any]]:
        """Checks the tweaks and uploads the files. Returns the tweaks with the paths of files."""
        files: list[Attachment | FetchedFile] = [*job.attachments, *job.fetched]
        if not call.tweaks and not files:
            return {}
        components = await flows.read_components(self._api, flow_id, call.flow)
        tweaks = flows.checked_tweaks(call.tweaks, components)
        if files:
            await self._files.place(
                files,
                flow_id,
                prompt_id_of(job.attempt_id),
                components,
                tweaks,
                placed,
                has_files=not is_direct,
            )
        return tweaks

    async def _run_in_background(
        self,
        run: BackgroundRun,
        job: LeasedJob,
        call: FlowCall,
        flow_id: str,
        tweaks: Mapping[str, Any],
        placed: PlacedFiles,
    ) -> JobResult:
        body: dict[str, Any] = {
            "flow_id": flow_id,
            "mode": "background",
            "input_value": call.input_value,
            "tweaks": tweaks,
            # Otherwise all runs of a flow would share one memory.
            "session_id": call.session_id or job.attempt_id,
            "idempotency_key": job.attempt_id,
        }
        if placed.attached:
            body["files"] = placed.attached
        accept_s = job.timeouts.accept_s
        within_s = self.settings.accept_s if accept_s is None else accept_s

        async def submit_once() -> str:
            # In its own task: a submit that is cut off may still arrive, and nobody would know its id.
            task = self._start(submit(self._api, self.settings, body, within_s))
            self._submits[job.attempt_id] = task
            task.add_done_callback(lambda done: self._submitted(job.attempt_id, done))
            await asyncio.wait({task})
            if task.cancelled():
                raise interrupted("The attempt was cancelled while it was submitted.")
            return task.result()

        try:
            return await run.follow(await submit_once(), submit_once)
        except ServiceFailed as failed:
            if failed.failure.kind is FailureKind.MISSING_MODEL:
                raise failures.missing_flow(call.flow) from failed
            raise

    def _submitted(self, attempt: str, task: asyncio.Task[str]) -> None:
        if self._submits.get(attempt) is task:
            del self._submits[attempt]
        if not task.cancelled() and task.exception() is None:
            self._jobs[attempt] = task.result()
            while len(self._jobs) > _MAX_REMEMBERED:
                self._jobs.popitem(last=False)

    async def _find_by_key(self, attempt: str, *, keeps_key: bool) -> str | None:
        """The job of an attempt of which only the id is known, or a probe. None: there can be no such job.

        No route looks up a key. So a run of nothing is submitted with it: LangFlow answers with the job that has the
        key, or else with this probe. With `keeps_key` the probe completes and keeps the key, so a submit that is still
        under way does not start any more. Without, LangFlow refuses its tweak, and the key is free again."""
        if self._has_jobs is None:
            await self._read_version()
        if not self._has_jobs or not (keeps_key or self._refuses_code):
            return None
        for flow in flows.read_flows((await self._api.flows()).body)[:_PROBED_FLOWS]:
            tweaks: dict[str, Any] = {}
            if not keeps_key:
                components = await flows.read_components(self._api, flow.flow_id, flow.name)
                coded = [each.component_id for each in components if "code" in each.fields]
                if not coded:
                    continue
                # LangFlow refuses to replace code. If it did not, the run would still have no component to run.
                tweaks = {coded[0]: {"code": ""}}
            body = {
                "flow_id": flow.flow_id,
                "mode": "background",
                "session_id": PROBE,
                "stop_component_id": PROBE,
                "tweaks": tweaks,
                "idempotency_key": attempt,
            }
            return await submit(self._api, self.settings, body, self.settings.request_s)
        return None

    async def _status_of(self, attempt: str) -> tuple[str, JobStatus | None]:
        """The job of the attempt and its status. None: LangFlow knows no such attempt."""
        job_id = self._jobs.get(attempt)
        is_found = job_id is None
        if job_id is None:
            job_id = await self._find_by_key(attempt, keeps_key=False)
        if job_id is None:
            return "", None
        deadline = asyncio.get_running_loop().time() + self.settings.probe_s
        while True:
            status = read_status(await self._api.status(job_id))
            if status is None:
                raise fail(FailureKind.TRANSIENT, "LangFlow gives no useful answer about the attempt.")
            if is_probe(status.body):
                return job_id, None
            # A probe needs a moment to end.
            if not is_found or status.state.is_over or asyncio.get_running_loop().time() >= deadline:
                return job_id, status
            await asyncio.sleep(self.settings.probe_s / 10)

    async def _completed(self, job: LeasedJob, job_id: str, body: Mapping[str, Any]) -> RunningAttempt:
        try:
            call = read_call(job.workflow)
        except InvalidWorkflow:
            call = FlowCall(flow="")
        run = BackgroundRun(job, call, lambda _: None, self._api, self.settings)
        try:
            result = await run.collect(job_id, body, min(5.0, self.settings.settle_s))
        except ServiceFailed as failed:
            is_cancelled = failed.failure.kind is FailureKind.INTERRUPTED
            return RunningAttempt("interrupted" if is_cancelled else "failed")
        return RunningAttempt("completed", result)

    # state of the server

    async def _read_version(self) -> Mapping[str, Any]:
        """Raises `Unreachable`, and `ServiceFailed` if something else answers."""
        answer = await self._api.version()
        if answer.status in (401, 403):
            raise failures.KeyRefused(answer.status)
        version = answer.body.get("version") if isinstance(answer.body, Mapping) else None
        if not answer.is_ok or not isinstance(version, str):
            raise fail(
                FailureKind.TRANSIENT,
                f"What answers there is not LangFlow (status {answer.status} to /api/v1/version). Check the address.",
            )
        found = _VERSION.match(version)
        has_jobs = found is not None and (int(found[1]) > 1 or int(found[2]) >= FIRST_WITH_JOBS)
        if not has_jobs and self._has_jobs is not False:
            log.warning(
                "LangFlow %s has no background jobs (they came with 1.11): a run is lost when the connection or this "
                "worker is lost, and shows little progress. Update LangFlow to avoid this.",
                version[:50],
            )
        self._version, self._has_jobs = version[:50], has_jobs
        self._refuses_code = found is not None and (
            int(found[1]) > 1 or int(found[2]) >= _FIRST_WITH_REFUSED_CODE
        )
        assert isinstance(answer.body, Mapping)
        return answer.body

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("%s: %r", self.url, task.exception())
