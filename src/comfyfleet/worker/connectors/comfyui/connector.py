"""The `Connector` for one ComfyUI server.

It owns what the attempts on that server share (session, WebSocket, submits) and the order of their steps. The
modules beside it carry out the steps. Leases, retries and routing are not known here.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from comfyfleet.model.calls import LeasedJob, ProgressReport, RunningAttempt
from comfyfleet.model.failure import Failure, FailureKind, FileTooLarge, ServiceBusy, ServiceFailed
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.model.worker import Capabilities, LiveState
from comfyfleet.model.workflow import with_filename_prefix
from comfyfleet.model.workflow_graph import InvalidWorkflow, parse_workflow
from comfyfleet.net.reachability import not_comfyui
from comfyfleet.ports import Inventory
from comfyfleet.worker.connectors.comfyui import failures, inventory
from comfyfleet.worker.connectors.comfyui.api import AnswerTooLarge, ComfyApi, Unreachable, pieces_of
from comfyfleet.worker.connectors.comfyui.failures import fail
from comfyfleet.worker.connectors.comfyui.inventory import BootWatch, ServerMachine
from comfyfleet.worker.connectors.comfyui.listener import WebSocketListener
from comfyfleet.worker.connectors.comfyui.outputs import SentPictures, read_entry
from comfyfleet.worker.connectors.comfyui.progress_estimate import NodeDurations
from comfyfleet.worker.connectors.comfyui.prompt_state import (
    CancelResult,
    PromptState,
    fetch_prompt_state,
    parse_version,
    stop,
)
from comfyfleet.worker.connectors.comfyui.run import PromptExecution
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings, parse_address
from comfyfleet.worker.connectors.comfyui.submission import (
    AcceptedPrompt,
    PromptSubmission,
    UnwantedPrompt,
    place,
    remove_own,
)
from comfyfleet.worker.connectors.comfyui.thread_health import ThreadHealth

log = logging.getLogger(__name__)

T = TypeVar("T")


class ComfyUI:
    """One ComfyUI server as a `Connector`, and an async context manager that opens and closes it."""

    service_name = "comfyui"

    def __init__(self, url: str, settings: ComfyUISettings | None = None) -> None:
        self.address = parse_address(url)
        self.settings = settings or ComfyUISettings()
        self.on_connection: Callable[[bool], None] | None = None
        """Called when the WebSocket is lost unexpectedly, and when it is back."""
        self.client_id: str | None = None
        """The client to which the server sends a prompt's events, the same after a restart of this
        program."""
        self._api = ComfyApi(self.address, self.settings, self._sends_too_much)
        self._listener: WebSocketListener | None = None
        self._client_id = ""
        self._runs: dict[str, PromptExecution] = {}
        self._submits: dict[str, asyncio.Task[AcceptedPrompt]] = {}
        self._background: set[asyncio.Task[Any]] = set()
        self._boot = BootWatch()
        self._losses_seen = 0
        self._machine: ServerMachine | None = None
        self._thread_health = ThreadHealth(self._api, self.settings)
        self._durations = NodeDurations()
        self._unreached: str | None = None

    @property
    def url(self) -> str:
        return self.address.base

    @property
    def server_id(self) -> str:
        return self.address.server_id

    async def __aenter__(self) -> ComfyUI:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Succeeds even if the server is away; the listener waits for it."""
        if self._listener is not None:
            return
        await self._api.open()
        self._client_id = self.client_id or uuid.uuid4().hex
        self._losses_seen = 0
        self._listener = WebSocketListener(
            self._api, self.settings, self._client_id, self._restarted, self._tell_connection
        )
        self._listener.start()

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        # Waits a little for submits: after a cut nobody knows whether the prompt arrived.
        if self._submits:
            await asyncio.wait(set(self._submits.values()), timeout=self.settings.close_s)
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(set(self._background))
        await listener.close()
        await self._api.close()

    # Connector

    @property
    def defect(self) -> str | None:
        """Why the last check failed, or what a run found wrong. It contains no server address."""
        return self._thread_health.defect or self._unreached

    async def check_health(self) -> bool:
        """Also False while the server answers but its execution thread is dead or occupied."""
        if self._thread_health.is_broken:
            return False
        self._unreached = None
        try:
            answer = await self._api.queue_length()
            if not answer.is_ok or not isinstance(answer.body, dict):
                self._unreached = not_comfyui(answer.status, answer.body)
                return False
            listener = self._listening()
            return not await self._thread_health.is_dead(listener.losses, is_listening=listener.is_open)
        except Unreachable as error:
            self._unreached = str(error)
            return False

    async def inventory(self) -> Inventory:
        """Raises `ServiceFailed` if the server does not answer."""
        try:
            await self._notice_restart()
            service, machine, nodes = await inventory.ask(
                self._api,
                self.settings.inventory_s,
                self.settings.providers,
                2 * self.settings.max_answer_bytes,
            )
        except Unreachable as error:
            raise fail(FailureKind.TRANSIENT, f"Cannot read the server's inventory: {error}") from error
        self._machine = machine
        return Inventory(
            capabilities=Capabilities(
                services=(service,), hardware=machine.hardware, is_fake=machine.is_fake
            ),
            live=LiveState(machine.free_vram_gb, machine.available_ram_gb),
            boot=self._boot.value,
            nodes=nodes,
        )

    async def find(self, names: frozenset[str]) -> frozenset[str]:
        return await inventory.find(self._api, self.settings.inventory_s, names)

    async def process_job(self, job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        listener = self._listening()
        prompt_id = prompt_id_of(job.attempt_id)
        if prompt_id in self._runs:
            raise fail(FailureKind.UNKNOWN, f"Attempt {job.attempt_id} is already running here.")
        folder = f"{self.settings.subfolder}/{prompt_id}"
        # Registered before the first step, so that a cancel always finds it.
        patience_s = self._thread_health.patience_s
        weights = self._durations.weights(job.workflow_hash, job.workflow)
        run = self._runs[prompt_id] = PromptExecution(
            job, prompt_id, report, self._api, listener, self.settings, patience_s, weights
        )
        listener.attach(prompt_id, run)
        try:
            # An invalid graph could kill the server's only execution thread.
            workflow = parse_workflow(job.workflow)
            # With its own prefix, outputs of two attempts never mix, and a cached run names no removed file.
            workflow = with_filename_prefix(workflow, folder)
            await self._learn()
            run.vram_gb = self._vram_gb
            workflow = await place(
                self._api, self.settings, (*job.attachments, *job.fetched), workflow, folder
            )
            # Cached results end the run before the submit is answered: listen first.
            await listener.wait_connected(self.settings.listen_s)
            run.submitting()
            accepted = await self._submit(run, workflow.to_graph(), job.timeouts.accept_s)
            run.accepted(accepted.number)
            result = await run.until_end(lambda: self._take_back(prompt_id))
            result = await run.with_pictures(result, folder)
        except InvalidWorkflow as error:
            raise ServiceFailed(failures.invalid_workflow(error)) from error
        except ServiceFailed as failed:
            if isinstance(failed, ServiceBusy) and run.ahead is not None:
                self._thread_health.found_occupied(run.ahead, listener.losses)
            elif failed.failure.kind is FailureKind.DEAD_WORKER:
                self._thread_health.found_dead(prompt_id, listener.losses, failed.failure.message)
            raise
        finally:
            listener.detach(prompt_id)
            del self._runs[prompt_id]
            run.close()
        self._boot.remembered = prompt_id
        self._thread_health.found_alive()
        self._durations.record(job.workflow_hash, job.workflow, result.timings)
        return result

    async def cancel_job(self, job: LeasedJob) -> None:
        """Raises `ServiceFailed` if the prompt could not be stopped in time."""
        self._listening()
        prompt_id = prompt_id_of(job.attempt_id)
        run = self._runs.get(prompt_id)
        if run is not None:
            run.cancelled()
        await self._learn()
        stopped = await self._stop_all_of(prompt_id)
        if run is not None:
            run.stopped(stopped.status)

    async def reconcile(self, job: LeasedJob) -> RunningAttempt:
        """States besides those of the port: `completed` with its result, `interrupted`, `failed`."""
        try:
            standing = await fetch_prompt_state(self._api, prompt_id_of(job.attempt_id))
        except Unreachable as error:
            raise fail(FailureKind.TRANSIENT, f"Cannot ask the server about the attempt: {error}") from error
        if standing.entry is None:
            return RunningAttempt(standing.state.value)
        outcome = read_entry(standing.entry, self.address.base, included=job.include_outputs)
        if isinstance(outcome, JobResult):
            if SentPictures(job.workflow, job.include_outputs, 0).are_wanted:
                # They were sent over the WebSocket, and the history does not have them.
                return RunningAttempt("failed")
            return RunningAttempt("completed", outcome)
        return RunningAttempt("interrupted" if outcome.kind is FailureKind.INTERRUPTED else "failed")

    async def clean_up(self, job: LeasedJob, *, are_outputs_kept: bool) -> None:
        """Raises `OSError` or `Unreachable`."""
        prompt_id, settings = prompt_id_of(job.attempt_id), self.settings
        if settings.folder is not None:
            await asyncio.to_thread(
                remove_own, settings.folder, settings.subfolder, prompt_id, with_outputs=are_outputs_kept
            )
        if settings.clears_history:
            if self._boot.remembered == prompt_id:
                # Its missing entry would look like a restart of the server.
                self._boot.remembered = None
            await self._api.forget(prompt_id)

    # files

    async def fetch(self, file: OutputFile) -> bytes:
        """The content of a file on the server. Raises `ServiceFailed`."""
        parts: list[bytes] = []
        await self._stream(file, parts.append, self.settings.max_fetch_bytes)
        return b"".join(parts)

    async def save(self, file: OutputFile, path: Path) -> int:
        """Saves a file of the server at a path and returns its size. Raises `ServiceFailed`."""
        usage = await asyncio.to_thread(shutil.disk_usage, path.parent)
        free = max(0, usage.free - self.settings.min_free_bytes)
        try:
            with path.open("wb") as target:
                return await self._stream(file, target.write, min(self.settings.max_file_bytes, free))
        except FileTooLarge:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise

    async def _stream(self, file: OutputFile, write: Callable[[bytes], object], most: int) -> int:
        size = 0
        try:
            async with self._api.view(file) as response:
                if response.status != 200:
                    what = f"the file {file.filename!r} in {file.folder}/{file.subfolder}"
                    raise ServiceFailed(failures.refused_file(response.status, what))
                is_size_told = response.content_length is not None
                try:
                    async for chunk in pieces_of(response, most):
                        write(chunk)
                        size += len(chunk)
                except AnswerTooLarge as error:
                    words = f"The file {file.filename!r} has {error}, which is the limit."
                    if not is_size_told:
                        # A file on disk has a size: this one may never end.
                        self._sends_too_much(f"its files do not end: {file.filename[:100]!r} has {error}")
                    raise FileTooLarge(Failure(FailureKind.UNKNOWN, words)) from error
        except Unreachable as error:
            raise fail(
                FailureKind.TRANSIENT, f"The file {file.filename!r} did not arrive: {error}"
            ) from error
        return size

    # steps of an attempt

    def _listening(self) -> WebSocketListener:
        if self._listener is None:
            raise RuntimeError("the ComfyUI connector is not open: call open() first")
        return self._listener

    async def _submit(
        self, run: PromptExecution, graph: dict[str, Any], accept_s: float | None
    ) -> AcceptedPrompt:
        if run.is_cancelled:
            raise fail(FailureKind.INTERRUPTED, "The attempt was cancelled before it was submitted.")
        prompt_id = run.prompt_id
        submission = PromptSubmission(self._api, self.settings, graph, prompt_id, self._client_id)
        # In its own task: a submit that is cut off may still arrive, and nobody would know.
        task = self._start(submission.submit(self.settings.accept_s if accept_s is None else accept_s))
        self._submits[prompt_id] = task
        task.add_done_callback(lambda _: self._submits.pop(prompt_id, None))
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            self._start(self._take_back_when_submitted(prompt_id, task, submission))
            raise
        if task.cancelled():
            raise fail(FailureKind.INTERRUPTED, "The attempt was cancelled while it was submitted.")
        try:
            accepted = task.result()
        except UnwantedPrompt as unwanted:
            await self._take_back(unwanted.prompt_id)
            raise unwanted.failure from unwanted
        except ServiceFailed:
            if submission.may_arrive_late:
                self._start(self._sweep(prompt_id))
            raise
        if accepted.is_fresh and self._boot.numbered(accepted.number, len(self._runs)):
            self._machine = None
        return accepted

    async def _take_back_when_submitted(
        self, prompt_id: str, task: asyncio.Task[AcceptedPrompt], submission: PromptSubmission
    ) -> None:
        await asyncio.wait({task})
        if not task.cancelled() and (task.exception() is None or submission.may_arrive_late):
            await self._sweep(prompt_id)

    async def _sweep(self, prompt_id: str) -> None:
        """Removes a prompt that nobody waits for if it appears late."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.sweep_s
        while loop.time() < deadline:
            try:
                stopped = await self._stop(prompt_id, deadline - loop.time())
            except Unreachable:
                return
            if stopped.was_seen or stopped.status.state is PromptState.ENDED:
                return
            await asyncio.sleep(min(self.settings.poll_s, max(self.settings.settle_s, 0.05)))

    async def _take_back(self, prompt_id: str) -> None:
        """Tries for a limited time and leaves the rest to the server."""
        try:
            await self._stop(prompt_id, self.settings.stop_s)
        except Unreachable as error:
            log.warning("cannot stop prompt %s on %s: %s", prompt_id, self.server_id, error)

    async def _stop(self, prompt_id: str, within_s: float) -> CancelResult:
        version = parse_version(self._machine.version) if self._machine is not None else None
        stopped = await stop(self._api, self.settings, prompt_id, version, within_s)
        if stopped.status.state is PromptState.RUNNING:
            self._thread_health.found_busy(prompt_id, self._listening().losses)
        return stopped

    async def _stop_all_of(self, prompt_id: str) -> CancelResult:
        """Stops the prompt, and again if its submit was still under way."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.cancel_s
        while True:
            submit = self._submits.get(prompt_id)
            # Read before the lookup: a submit that arrives in between is found in the next round.
            was_submitted = submit is None or submit.done()
            try:
                stopped = await self._stop(prompt_id, deadline - loop.time())
            except Unreachable as error:
                raise fail(
                    FailureKind.CRASHED,
                    f"Cannot reach the server to stop prompt {prompt_id}: {error}",
                ) from error
            if stopped.status.state in (PromptState.WAITING, PromptState.RUNNING):
                raise fail(
                    FailureKind.STALL_TIMEOUT,
                    f"Prompt {prompt_id} is still {stopped.status.state.value} {self.settings.cancel_s:g} s after "
                    "the cancel: a node does not react, or the execution thread is dead.",
                )
            if submit is None or was_submitted:
                return stopped
            if stopped.was_seen or stopped.status.state is PromptState.ENDED or loop.time() >= deadline:
                # It has arrived or will be swept, so the answer of the submit does not matter.
                submit.cancel()
                if not stopped.was_seen:
                    self._start(self._sweep(prompt_id))
                return stopped
            await asyncio.wait({submit}, timeout=self.settings.cancel_interval_s)

    # state of the server

    @property
    def _vram_gb(self) -> float | None:
        return (self._machine.hardware.gpu.memory_gb or None) if self._machine is not None else None

    async def _learn(self) -> None:
        """Reads the version, which decides how to interrupt a run. Unknown counts as the oldest."""
        if self._machine is not None:
            return
        try:
            answer = await self._api.system_stats()
        except Unreachable:
            return
        if answer.is_ok and isinstance(answer.body, dict):
            self._machine = inventory.read_machine(answer.body)

    def _sends_too_much(self, words: str) -> None:
        log.warning("%s is not used for %g s: %s", self.server_id, self.settings.broken_s, words)
        self._thread_health.found_broken(words)
        # The agent then checks the server and starts no more jobs there.
        self._tell_connection(False)

    def _restarted(self) -> None:
        self._boot.restarted()
        self._machine = None

    def _tell_connection(self, is_connected: bool) -> None:
        if self.on_connection is not None:
            self.on_connection(is_connected)

    async def _notice_restart(self) -> None:
        losses = self._listening().losses
        remembered = self._boot.remembered
        if remembered is not None and losses > self._losses_seen:
            standing = await fetch_prompt_state(self._api, remembered)
            if standing.state is PromptState.UNKNOWN:
                self._restarted()
        self._losses_seen = losses

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.debug("%s: %r", self.server_id, task.exception())
