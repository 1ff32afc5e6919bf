"""The `Connector` for one Comfy Cloud account.

It owns what the attempts of the account share and the order of their steps: find an earlier run, upload, submit,
follow. The modules beside it carry out the steps. Leases, retries and routing are not known here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from comfyfleet.model.calls import LeasedJob, ProgressReport, RunningAttempt
from comfyfleet.model.failure import FailureKind, ServiceFailed
from comfyfleet.model.file import FetchedFile
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import Attachment, JobResult, OutputFile
from comfyfleet.model.worker import Capabilities
from comfyfleet.model.workflow import with_filename_prefix
from comfyfleet.model.workflow_graph import InvalidWorkflow, Workflow, parse_workflow
from comfyfleet.net.url_guard import AllowedHosts
from comfyfleet.ports import Inventory
from comfyfleet.worker.connectors.comfy_cloud import failures, inventory
from comfyfleet.worker.connectors.comfy_cloud.account import CloudAccount
from comfyfleet.worker.connectors.comfy_cloud.api import CloudAnswer, CloudApi
from comfyfleet.worker.connectors.comfy_cloud.backoff import CloudBackoff
from comfyfleet.worker.connectors.comfy_cloud.event_stream import CloudEventStream
from comfyfleet.worker.connectors.comfy_cloud.failures import fail
from comfyfleet.worker.connectors.comfy_cloud.job_list import CloudJobList, with_mark
from comfyfleet.worker.connectors.comfy_cloud.job_state import job_in, read_end, stop
from comfyfleet.worker.connectors.comfy_cloud.outputs import CloudDownload
from comfyfleet.worker.connectors.comfy_cloud.run import CloudRun
from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings, parse_address
from comfyfleet.worker.connectors.comfy_cloud.submission import CloudSubmission
from comfyfleet.worker.connectors.comfyui import failures as comfyui_failures
from comfyfleet.worker.connectors.comfyui.api import Unreachable

_log = logging.getLogger(__name__)

T = TypeVar("T")

_EARLIER_LEASES = 50
_EARLIER_EPOCHS = 3
_ASSET_TYPE = "core/ASSET"
_UPLOAD_TRIES = 4


class ComfyCloud:
    """One account as a `Connector`, and an async context manager that opens and closes it."""

    service_name = "comfyui"
    continues_earlier_leases = True
    """Another worker may follow the run of a lease that this one has lost, and a stopped run is paid all the same."""

    def __init__(self, url: str, settings: ComfyCloudSettings) -> None:
        """Raises `ValueError` for an invalid address."""
        self.address = parse_address(url, AllowedHosts(settings.allow))
        self.settings = settings
        self.on_connection: Callable[[bool], None] | None = None
        """Called with False when the account can no longer be used."""
        self._api = CloudApi(self.address, settings, self._sends_too_much)
        self._account = CloudAccount(self._api, settings, self._went_down)
        self._jobs = CloudJobList(self._api, settings)
        self._streams = CloudEventStream(self._api, settings)
        self._downloads = CloudDownload(self._api, settings)
        self._runs: dict[str, CloudRun] = {}
        self._submissions: dict[str, tuple[CloudSubmission, asyncio.Task[str]]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._is_open = False

    @property
    def url(self) -> str:
        return self.address.base

    async def __aenter__(self) -> ComfyCloud:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Succeeds even if Comfy Cloud is away."""
        await self._api.open()
        self._is_open = True

    async def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        # Waits a little for submissions: after a cut nobody knows whether the job was made.
        waiting = {task for _, task in self._submissions.values()}
        if waiting:
            await asyncio.wait(waiting, timeout=self.settings.close_s)
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(set(self._background))
        await self._downloads.close()
        await self._api.close()

    # Connector

    @property
    def defect(self) -> str | None:
        """Why the account cannot be used. It contains neither the address nor the key."""
        return self._account.defect

    async def check_health(self) -> bool:
        """Asks who the account is, which costs no credits. False also during a pause for lack of money."""
        return await self._account.check()

    async def inventory(self) -> Inventory:
        """Raises `ServiceFailed`."""
        try:
            await self._account.read_plan()
            service, nodes, is_fake = await inventory.ask(self._api, self.settings)
        except Unreachable as error:
            raise fail(FailureKind.TRANSIENT, f"Cannot read what Comfy Cloud offers: {error}") from error
        return Inventory(
            Capabilities(services=(service,), environment="cloud", is_fake=is_fake), boot="", nodes=nodes
        )

    async def process_job(self, job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        mark = prompt_id_of(job.attempt_id)
        if mark in self._runs:
            raise fail(FailureKind.UNKNOWN, f"Attempt {job.attempt_id} is already running here.")
        # Registered before the first step, so that a cancel always finds it.
        runs = len(self._runs)
        run = self._runs[mark] = CloudRun(job, mark, report, self._api, self._account, self.settings)
        try:
            await self._admit(runs)
            workflow = parse_workflow(job.workflow)
            workflow = with_filename_prefix(workflow, f"{self.settings.subfolder}/{mark}")
            job_id = await self._earlier_run(job)
            if job_id is None:
                graph = with_mark(await self._with_files(job, workflow), mark)
                job_id = await self._submit(run, graph, job.timeouts.accept_s)
            run.accepted(job_id)
            if run.is_cancelled:
                await stop(self._api, self.settings, job_id, self.settings.cancel_s)
            return await run.follow(self._streams)
        except InvalidWorkflow as error:
            raise ServiceFailed(comfyui_failures.invalid_workflow(error)) from error
        finally:
            del self._runs[mark]

    async def cancel_job(self, job: LeasedJob) -> None:
        """Raises `ServiceFailed` if the job is not known to have ended in time."""
        mark = prompt_id_of(job.attempt_id)
        while True:
            run = self._runs.get(mark)
            if run is not None:
                run.cancel()
            job_id = run.job_id if run is not None else None
            job_id = job_id or await self._find_to_stop(mark) or (run.job_id if run is not None else None)
            # The attempt may have begun during the search.
            if job_id is not None or run is not None or mark not in self._runs:
                break
        if job_id is None:
            return
        if await stop(self._api, self.settings, job_id, self.settings.cancel_s) is None:
            raise fail(
                FailureKind.STALL_TIMEOUT,
                f"The job {job_id} at Comfy Cloud has not ended {self.settings.cancel_s:g} s after its cancel. It may "
                "still cost credits: look for it there.",
            )

    async def reconcile(self, job: LeasedJob) -> RunningAttempt:
        """States besides those of the port: `completed` with its result, `interrupted`, `failed`."""
        mark = prompt_id_of(job.attempt_id)
        try:
            job_id = self._jobs.known(mark) or await self._find(mark)
            if job_id is None:
                return RunningAttempt("unknown")
            answer = await self._api.job(job_id)
        except Unreachable as error:
            raise fail(FailureKind.TRANSIENT, f"Cannot ask Comfy Cloud about the attempt: {error}") from error
        if answer.status == 404:
            return RunningAttempt("unknown")
        found = job_in(answer)
        if found is None:
            raise fail(
                FailureKind.TRANSIENT, f"Comfy Cloud answers {answer.status} to the request for the job."
            )
        return self._standing(found, job)

    def _standing(self, found: Mapping[str, Any], job: LeasedJob) -> RunningAttempt:
        match found["status"]:
            case "succeeded":
                result = read_end(found, self._api, self._account, self.settings, job.include_outputs)
                return RunningAttempt("completed", result)
            case "queued":
                return RunningAttempt("waiting")
            case "running" | "canceling":
                return RunningAttempt("running")
            case "canceled":
                return RunningAttempt("interrupted")
            case _:
                return RunningAttempt("failed")

    # files

    async def fetch(self, file: OutputFile) -> bytes:
        """The content of an output. Raises `ServiceFailed`."""
        return await self._downloads.fetch(file)

    async def save(self, file: OutputFile, path: Path) -> int:
        """Saves an output at a path and returns its size. Raises `ServiceFailed`."""
        return await self._downloads.save(file, path)

    # steps of an attempt

    async def _admit(self, runs: int) -> None:
        """Raises `ServiceBusy` if the account is paused or has no free slot."""
        if not self._account.has_plan and not self._account.is_paused:
            try:
                await self._account.read_plan()
            except Unreachable as error:
                raise failures.not_begun(
                    f"The plan of the Comfy Cloud account cannot be read: {error}"
                ) from error
        if (busy := self._account.busy(runs)) is not None:
            raise busy

    async def _earlier_run(self, job: LeasedJob) -> str | None:
        """The run of an earlier lease of this job that is under way or has succeeded. It is paid, so it is used.
        Raises `ServiceBusy` if nobody can tell."""
        if job.ref.number <= 1:
            return None
        marks = {
            prompt_id_of(msgspec.structs.replace(job.ref, number=number, epoch=epoch).attempt_id): number
            for number in range(max(1, job.ref.number - _EARLIER_LEASES), job.ref.number)
            for epoch in range(max(0, job.ref.epoch - _EARLIER_EPOCHS), job.ref.epoch + 1)
        }
        try:
            found = await self._jobs.find(marks)
        except Unreachable as error:
            raise self._account.pause(
                f"the list of its jobs cannot be read ({error}), so an earlier run of a job could be paid again",
                self.settings.poll_max_s,
            ) from error
        usable = [each for each in found if each.may_give_a_result]
        if not usable:
            return None
        # Of the last lease; of several with its mark the oldest.
        last = max(usable, key=lambda each: marks[each.mark])
        _log.info("%s continues with the earlier run %s at Comfy Cloud", job.attempt_id, last.job_id)
        return last.job_id

    async def _with_files(self, job: LeasedJob, workflow: Workflow) -> dict[str, Any]:
        """Uploads the input files and returns the graph that names them."""
        graph = workflow.to_graph()
        attachments: Iterable[Attachment | FetchedFile] = (*job.attachments, *job.fetched)
        for each in attachments:
            if each.node not in graph:
                raise InvalidWorkflow(
                    f"The workflow has no node {each.node!r}, so its input {each.input!r} cannot be set."
                )
            if each.kind == "mask":
                raise fail(
                    FailureKind.MISSING_NODE,
                    "Comfy Cloud takes no separate masks for a file of its assets: send a picture with an alpha "
                    "channel, or let a server of your own run this job.",
                    node_id=each.node,
                )
            content = each.data if isinstance(each, Attachment) else each.path
            asset_id = await self._upload(content, each.filename)
            graph[each.node]["inputs"][each.input] = {
                "__type": _ASSET_TYPE,
                "info": {"id": asset_id, "file_path": each.filename},
            }
        return graph

    async def _upload(self, content: bytes | Path, filename: str) -> str:
        size = len(content) if isinstance(content, bytes) else (await asyncio.to_thread(content.stat)).st_size
        if size > self._account.max_upload_bytes:
            raise fail(
                FailureKind.MISSING_INPUT,
                f"The input file {filename!r} has {size} bytes; Comfy Cloud takes at most "
                f"{self._account.max_upload_bytes}. Send a smaller file.",
                missing=(filename,),
            )
        backoff, tries = CloudBackoff(self.settings), 0
        while True:
            tries += 1
            asked_s: float | None = None
            try:
                answer = await self._api.upload(content, filename)
            except Unreachable as error:
                why = f"The input file {filename!r} did not arrive at Comfy Cloud: {error}"
            else:
                asset_id = answer.body.get("id") if isinstance(answer.body, dict) else None
                if answer.is_ok and isinstance(asset_id, str) and asset_id:
                    return asset_id
                asked_s, why = answer.retry_after_s, self._upload_refused(answer, filename)
            # An upload costs nothing, so it is repeated.
            if tries >= _UPLOAD_TRIES:
                raise fail(FailureKind.TRANSIENT, why)
            await asyncio.sleep(backoff.next_s(asked_s))

    def _upload_refused(self, answer: CloudAnswer, filename: str) -> str:
        """Why the upload is repeated. Raises `ServiceFailed` if that does not help."""
        is_payment = answer.status == 429 and failures.meaning_of_429(answer) is failures.Refusal429.PAYMENT
        if answer.status in (401, 402, 403) or is_payment:
            raise self._account.refused(answer)
        if answer.status in (400, 409, 413, 422):
            raise ServiceFailed(failures.refused_upload(answer, filename))
        return f"Comfy Cloud answers {answer.status} to the upload of {filename!r}: {answer.message}"

    async def _submit(self, run: CloudRun, graph: dict[str, Any], accept_s: float | None) -> str:
        if run.is_cancelled:
            raise fail(FailureKind.INTERRUPTED, "The attempt was cancelled before it was submitted.")
        if self._account.is_paused and (busy := self._account.busy(0)) is not None:
            raise busy
        mark = run.mark
        submission = CloudSubmission(self._api, self.settings, self._account, self._jobs, graph, mark)
        # In its own task: a submission that is cut off may still make a job, and nobody would know.
        task = self._start(submission.submit(self.settings.accept_s if accept_s is None else accept_s))
        self._submissions[mark] = (submission, task)
        task.add_done_callback(lambda _: self._submissions.pop(mark, None))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            submission.cancel()
            self._start(self._take_back(run, task))
            raise
        if task.cancelled():
            raise failures.unknown_outcome(mark, "The connector was closed during the submission.")
        job_id = task.result()
        self._jobs.remember(job_id, mark)
        self._account.accepted()
        return job_id

    async def _take_back(self, run: CloudRun, task: asyncio.Task[str]) -> None:
        """Stops a cancelled job that nobody waits for. Without a cancel only the agent stops, and the next one
        continues with the run."""
        await asyncio.wait({task})
        if task.cancelled() or task.exception() is not None:
            _log.info("nobody knows whether %s was submitted to Comfy Cloud", run.mark)
            return
        self._jobs.remember(task.result(), run.mark)
        if run.is_cancelled:
            await stop(self._api, self.settings, task.result(), self.settings.cancel_s)

    async def _find_to_stop(self, mark: str) -> str | None:
        pending = self._submissions.get(mark)
        if pending is not None:
            submission, task = pending
            submission.cancel()
            await asyncio.wait({task}, timeout=self.settings.cancel_s)
            if not task.done():
                raise fail(
                    FailureKind.STALL_TIMEOUT, "Nobody knows yet whether the job exists at Comfy Cloud."
                )
            if not task.cancelled() and task.exception() is None:
                return task.result()
            return None
        if (known := self._jobs.known(mark)) is not None:
            return known
        try:
            return await self._find(mark)
        except Unreachable as error:
            raise fail(
                FailureKind.CRASHED, f"Cannot reach Comfy Cloud to stop the job of {mark}: {error}"
            ) from error

    async def _find(self, mark: str) -> str | None:
        found = await self._jobs.find({mark})
        return found[0].job_id if found else None

    # state of the account

    def _sends_too_much(self, words: str) -> None:
        self._account.pause(words, self.settings.broken_s)

    def _went_down(self) -> None:
        if self.on_connection is not None:
            self.on_connection(False)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.debug("Comfy Cloud: %r", task.exception())
