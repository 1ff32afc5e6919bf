"""The `Connector` for one server of the A1111 family.

It owns what the attempts on that server share (session, the turn, kept pictures) and the order of their steps; `run.py`
has one attempt. The server keeps no result, so a run whose connection is lost is repeated: jobs run at least once.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from comfyfleet.model.calls import LeasedJob, ProgressReport, RunningAttempt
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.ids import prompt_id_of
from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.model.worker import Capabilities, LiveState, Service
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.ports import Inventory
from comfyfleet.worker.connectors.a1111 import failures, inventory
from comfyfleet.worker.connectors.a1111.api import A1111Api
from comfyfleet.worker.connectors.a1111.failures import fail
from comfyfleet.worker.connectors.a1111.inventory import A1111Server, ListedCheckpoint
from comfyfleet.worker.connectors.a1111.names import plain
from comfyfleet.worker.connectors.a1111.outputs import KeptPictures
from comfyfleet.worker.connectors.a1111.payload import SERVICE
from comfyfleet.worker.connectors.a1111.request import build_request, named_checkpoint, with_checkpoint
from comfyfleet.worker.connectors.a1111.run import A1111Run
from comfyfleet.worker.connectors.a1111.server_state import look_at_server, look_at_task, pending_ids
from comfyfleet.worker.connectors.a1111.settings import A1111Settings
from comfyfleet.worker.connectors.comfyui.api import Unreachable
from comfyfleet.worker.connectors.comfyui.settings import parse_address

log = logging.getLogger(__name__)

_ENDED_KEPT = 16
_HEARD_S = 30.0
"""A run whose server answered in this time needs no health check."""


class A1111:
    """One server as a `Connector`, and an async context manager that opens and closes it."""

    service_name = SERVICE

    def __init__(self, url: str, settings: A1111Settings | None = None) -> None:
        self.address = parse_address(url, "a server of the A1111 family", "http://gpu-a:7860")
        self.settings = settings or A1111Settings()
        self.on_connection: Callable[[bool], None] | None = None
        """Called with False when a run finds that the server is gone."""
        self._api = A1111Api(self.address, self.settings, self._sends_too_much)
        self._pictures = KeptPictures(self.settings)
        self._server: A1111Server | None = None
        self._runs: dict[str, A1111Run] = {}
        self._tasks: dict[str, asyncio.Task[JobResult]] = {}
        self._ended: dict[str, JobResult | Failure] = {}
        self._turn = asyncio.Lock()
        self._stale_ids: frozenset[str] = frozenset()
        """Task ids that wait for ever, because their requests failed before they started."""
        self._stale_sign: object = None
        """Of a run of ours that failed. SD.Next shows it until the next one begins."""
        self._defect: str | None = None
        self._broken_until = float("-inf")
        self._boots = 0
        self._instance = uuid.uuid4().hex[:12]
        self._was_refused = False
        self._remembered: str | None = None
        """The id of our last finished run."""
        self._loaded: ListedCheckpoint | None = None
        self._version = ""
        self._is_open = False

    @property
    def url(self) -> str:
        return self.address.base

    @property
    def defect(self) -> str | None:
        """Why the last check failed. It contains no server address."""
        return self._defect

    async def __aenter__(self) -> A1111:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Succeeds even if the server is away."""
        if not self._is_open:
            await asyncio.to_thread(self._pictures.open)
            await self._api.open()
            self._is_open = True

    async def close(self) -> None:
        """A run that is under way goes on at the server, and its pictures are lost."""
        if not self._is_open:
            return
        self._is_open = False
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=self.settings.close_s)
        for task in list(self._tasks.values()):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()))
        # Their pictures go now.
        self._ended.clear()
        await self._api.close()
        await asyncio.to_thread(self._pictures.close)

    # Connector

    async def check_health(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._broken_until:
            return False
        if any(now < run.heard_at + _HEARD_S for run in self._runs.values() if run.is_started):
            # A busy server may be slow to answer; its run is a better sign.
            self._defect = None
            return True
        try:
            answer = await self._api.progress(self.settings.health_s)
            if answer.is_ok and isinstance(answer.body, Mapping) and "state" in answer.body:
                self._answers()
                self._defect = None
                return True
            has_web_ui = (
                answer.status == 404 and (await self._api.get("/internal/ping", self.settings.health_s)).is_ok
            )
            self._defect = failures.not_web_ui(answer.status, has_web_ui=has_web_ui)
        except Unreachable as error:
            self._was_refused = self._was_refused or error.is_closed
            self._defect = str(error)
        return False

    async def inventory(self) -> Inventory:
        """Raises `ServiceFailed` if the server does not answer or has no checkpoint yet."""
        try:
            server = await self._ask_server()
            await self._notice_restart(server)
        except Unreachable as error:
            raise fail(FailureKind.TRANSIENT, f"Cannot read the server's inventory: {error}") from error
        self._server = server
        live = server.live
        if self._loaded is not None:
            # After a run with another checkpoint than that of the options, that one stays in memory.
            live = msgspec.structs.replace(live, loaded_models=self._loaded.names)
        version = " ".join(filter(None, (server.flavour, self._version or server.version)))
        service = Service(
            SERVICE,
            providers=self.settings.providers,
            version=version,
            models=server.models,
            node_classes=server.node_classes,
        )
        return Inventory(
            Capabilities(services=(service,), hardware=server.hardware, is_fake=server.is_fake),
            LiveState(live.free_vram_gb, live.available_ram_gb, live.loaded_models),
            boot=f"{self._instance}-{self._boots}",
        )

    async def process_job(self, job: LeasedJob, report: Callable[[ProgressReport], None]) -> JobResult:
        """Runs the job at least once: a server cannot tell the result of a run whose connection was lost."""
        task_id = prompt_id_of(job.attempt_id)
        if not self._is_open:
            raise RuntimeError("the A1111 connector is not open: call open() first")
        if (known := self._ended.pop(task_id, None)) is not None:
            return _result(known)
        run = self._runs.get(task_id)
        if run is None:
            run = self._runs[task_id] = A1111Run(job, task_id, self._api, self.settings, self._pictures)
            self._tasks[task_id] = asyncio.create_task(self._carry_out(job, run))
            # Nobody may wait for it in the end: `_ended` keeps the outcome.
            self._tasks[task_id].add_done_callback(lambda each: each.cancelled() or each.exception())
        run.report = report
        task = self._tasks[task_id]
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            run.report = _nobody
            run.cancelled.set()
            raise
        self._ended.pop(task_id, None)
        if task.cancelled():
            raise fail(FailureKind.INTERRUPTED, "The connector was closed during the run.")
        return task.result()

    async def cancel_job(self, job: LeasedJob) -> None:
        """Raises `ServiceFailed` if the run could not be stopped in time."""
        task_id = prompt_id_of(job.attempt_id)
        run = self._runs.get(task_id)
        if run is not None:
            run.cancelled.set()
            if run.post is None:
                return
        try:
            is_over = await self._stop(task_id, run, self.settings.cancel_s)
        except Unreachable as error:
            raise fail(FailureKind.CRASHED, f"Cannot reach the server to stop the run: {error}") from error
        if not is_over:
            raise fail(
                FailureKind.STALL_TIMEOUT,
                f"The run still goes on {self.settings.cancel_s:g} s after the cancel.",
            )

    async def reconcile(self, job: LeasedJob) -> RunningAttempt:
        """`failed` for a run that completed without us: its pictures are lost."""
        task_id = prompt_id_of(job.attempt_id)
        if (known := self._ended.get(task_id)) is not None:
            if isinstance(known, JobResult):
                return RunningAttempt("completed", known)
            return RunningAttempt("interrupted" if known.kind is FailureKind.INTERRUPTED else "failed")
        run = self._runs.get(task_id)
        if run is not None:
            return RunningAttempt("running" if run.is_started else "waiting")
        try:
            task = await look_at_task(self._api, task_id)
            look = await look_at_server(self._api)
        except Unreachable as error:
            raise fail(FailureKind.TRANSIENT, f"Cannot ask the server about the attempt: {error}") from error
        if task is None or not task.is_known:
            return RunningAttempt("unknown")
        if task.is_completed:
            return RunningAttempt("failed")
        if look.is_idle:
            # What is active or queued on an idle server has failed.
            return RunningAttempt("failed")
        return RunningAttempt("running" if task.is_active else "waiting")

    # files

    async def save(self, file: OutputFile, path: Path) -> int:
        """Copies a picture of an ended run to a path and returns its size. Raises `ServiceFailed`."""
        return await asyncio.to_thread(self._pictures.save, file, path)

    async def fetch(self, file: OutputFile) -> bytes:
        """The content of a picture of an ended run. Raises `ServiceFailed`."""
        return await asyncio.to_thread(self._pictures.read, file)

    async def clean_up(self, job: LeasedJob, *, are_outputs_kept: bool) -> None:
        if are_outputs_kept:
            await asyncio.to_thread(self._pictures.remove, prompt_id_of(job.attempt_id))

    # steps of an attempt

    async def _carry_out(self, job: LeasedJob, run: A1111Run) -> JobResult:
        task_id = run.task_id
        outcome: JobResult | Failure = Failure(FailureKind.INTERRUPTED, "The connector was closed.")
        try:
            outcome = await self._run(job, run)
            return outcome
        except InvalidWorkflow as error:
            outcome = Failure(FailureKind.INVALID_WORKFLOW, str(error))
            raise ServiceFailed(outcome) from error
        except ServiceFailed as failed:
            outcome = failed.failure
            if outcome.kind is FailureKind.CRASHED:
                self._was_refused = True
                self._tell_lost()
            raise
        finally:
            del self._runs[task_id], self._tasks[task_id]
            self._ended[task_id] = outcome
            while len(self._ended) > _ENDED_KEPT:
                del self._ended[next(iter(self._ended))]

    async def _run(self, job: LeasedJob, run: A1111Run) -> JobResult:
        route, body = await asyncio.to_thread(build_request, job, run.task_id, self.settings)
        named = named_checkpoint(body)
        await self._take_turn(job, run)
        try:
            checkpoint = None
            try:
                has_tasks = await self._has_tasks()
                await self._wait_until_free(job, run, has_tasks)
                if not route.startswith("extra"):
                    checkpoint = await self._find_checkpoint(body)
                    body = body if checkpoint is None else with_checkpoint(body, checkpoint.title)
            except Unreachable as error:
                # Nothing was sent.
                self._was_refused = self._was_refused or error.is_closed
                kind = FailureKind.CRASHED if error.is_closed else FailureKind.TRANSIENT
                raise failures.busy(f"The server cannot be reached: {error}", kind) from error
            if run.cancelled.is_set():
                raise _cancelled()
            post = run.send(route, body, checkpoint, named=named, has_tasks=has_tasks, vram_gb=self._vram_gb)
        except BaseException:
            self._turn.release()
            raise
        # The turn belongs to the request: whoever waits for this attempt may leave before it ends.
        post.add_done_callback(self._give_turn)
        try:
            result = await run.until_end(lambda: self._stop(run.task_id, run, self.settings.stop_s))
        except ServiceFailed:
            with suppress(Unreachable, ServiceFailed):
                self._stale_sign = (await look_at_server(self._api)).sign if post.done() else None
            raise
        finally:
            post.cancel()
        self._loaded = checkpoint or self._loaded
        if run.answer is not None:
            self._version = str(run.answer.told.get("version") or self._version)
        self._remembered = run.task_id if run.has_tasks else self._remembered
        return result

    async def _take_turn(self, job: LeasedJob, run: A1111Run) -> None:
        """One request at a time: more than forty that wait make a server deaf."""
        turn = asyncio.create_task(self._turn.acquire())
        cancelled = asyncio.create_task(run.cancelled.wait())
        try:
            await asyncio.wait(
                {turn, cancelled}, timeout=job.timeouts.start_s, return_when=asyncio.FIRST_COMPLETED
            )
        except BaseException:
            if turn.done():
                self._turn.release()
            raise
        finally:
            cancelled.cancel()
            turn.cancel()
        if turn.done():
            return
        if run.cancelled.is_set():
            raise _cancelled()
        raise failures.busy("An earlier run of this worker still occupies the server.")

    def _give_turn(self, _: object) -> None:
        self._turn.release()

    async def _wait_until_free(self, job: LeasedJob, run: A1111Run, has_tasks: bool) -> None:
        """Raises `Unreachable`, or `ServiceBusy` if others keep the server."""
        loop = asyncio.get_running_loop()
        begun = sign_at = loop.time()
        idle_since: float | None = None
        sign: object = None
        await self._await_earlier(run)
        while True:
            look = await look_at_server(self._api)
            waiting = (await pending_ids(self._api)) - self._stale_ids if has_tasks else frozenset()
            self._answers()
            now = loop.time()
            is_idle = look.is_idle or look.sign == self._stale_sign
            if is_idle and not waiting:
                return
            if is_idle:
                idle_since = now if idle_since is None else idle_since
                if now >= idle_since + self.settings.settle_s:
                    self._stale_ids |= waiting
                    return
            else:
                idle_since = None
            if look.sign != sign:
                sign, sign_at = look.sign, now
            start_s = job.timeouts.start_s
            is_late = start_s is not None and now >= begun + start_s
            if is_late or now >= sign_at + self.settings.occupied_s:
                raise failures.busy("The server is occupied by another run, perhaps of somebody else.")
            try:
                async with asyncio.timeout(min(self.settings.poll_s, self.settings.settle_s)):
                    await run.cancelled.wait()
            except TimeoutError:
                continue
            raise _cancelled()

    async def _await_earlier(self, run: A1111Run) -> None:
        """An agent that was killed may have sent this attempt already. Its pictures are lost."""
        loop = asyncio.get_running_loop()
        idle_since: float | None = None
        while True:
            task = await look_at_task(self._api, run.task_id)
            if task is None or not task.is_known:
                return
            if task.is_completed:
                raise fail(
                    FailureKind.TRANSIENT,
                    "The server has completed this attempt already, and its pictures are lost. It runs again.",
                )
            if not (await look_at_server(self._api)).is_idle:
                idle_since = None
            elif idle_since is None:
                # It may have ended between the two looks.
                idle_since = loop.time()
            elif loop.time() >= idle_since + self.settings.settle_s:
                # It failed, and nobody was told.
                return
            if run.cancelled.is_set():
                raise _cancelled()
            await asyncio.sleep(min(self.settings.poll_s, self.settings.settle_s))

    async def _find_checkpoint(self, body: Mapping[str, Any]) -> ListedCheckpoint | None:
        """A server ignores a name that it does not have. None: the job names none, and the server does not tell which
        one it will use. Raises `ServiceFailed` or `Unreachable`."""
        timeout_s = self.settings.inventory_s
        wanted = named_checkpoint(body) or await inventory.configured_checkpoint(self._api, timeout_s)
        if not wanted:
            return None
        listed = await inventory.list_checkpoints(self._api, timeout_s)
        found = inventory.find_checkpoint(listed, wanted)
        if found is None:
            raise fail(
                FailureKind.MISSING_MODEL,
                f"The server does not have the checkpoint {wanted[:200]!r}.",
                (plain(wanted),),
            )
        return found

    async def _stop(self, task_id: str, run: A1111Run | None, within_s: float) -> bool:
        """Interrupts the run while it is surely ours. Otherwise it waits for its end. Raises `Unreachable`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within_s
        idle_since: float | None = None
        while True:
            post = None if run is None or run.is_lost else run.post
            if post is not None and post.done():
                return True
            task = await look_at_task(self._api, task_id) if self.settings.exclusive else None
            # Without ids: nobody else uses the server, and we wait for this request.
            is_ours = post is not None and self.settings.exclusive and run is not None and run.is_without_id
            if not is_ours and (task is None or not (task.is_active or task.is_queued)):
                if post is None:
                    return True  # Unknown, ended, or not to be told from the run of somebody else.
            elif (await look_at_server(self._api)).is_idle:
                # What is active or queued on an idle server has failed, unless it is just about to begin.
                idle_since = loop.time() if idle_since is None else idle_since
                if post is None and loop.time() >= idle_since + self.settings.settle_s:
                    return True
            else:
                idle_since = None
                if is_ours or (task is not None and task.is_active):
                    if run is not None:
                        run.interrupts += 1
                    await self._api.interrupt()
            if loop.time() >= deadline:
                return False
            pause_s = min(self.settings.poll_s, max(0.0, deadline - loop.time()))
            if post is None:
                await asyncio.sleep(pause_s)
            else:
                await asyncio.wait({post}, timeout=pause_s)

    # state of the server

    async def _ask_server(self) -> A1111Server:
        return await inventory.ask(self._api, self.settings.inventory_s, 2 * self.settings.max_answer_bytes)

    async def _has_tasks(self) -> bool:
        if self._server is None:
            self._server = await self._ask_server()
        return self._server.has_tasks

    @property
    def _vram_gb(self) -> float | None:
        return (self._server.hardware.gpu.memory_gb or None) if self._server is not None else None

    def _answers(self) -> None:
        if self._was_refused:
            self._was_refused = False
            self._restarted()

    async def _notice_restart(self, server: A1111Server) -> None:
        self._answers()
        if self._remembered is not None and server.has_tasks:
            task = await look_at_task(self._api, self._remembered)
            if task is None or not task.is_known:
                self._restarted()

    def _restarted(self) -> None:
        self._boots += 1
        self._remembered = self._loaded = None
        self._stale_ids = frozenset()

    def _sends_too_much(self, words: str) -> None:
        log.warning("%s is not used for %g s: %s", self.address.server_id, self.settings.broken_s, words)
        self._defect = words
        self._broken_until = asyncio.get_running_loop().time() + self.settings.broken_s
        self._tell_lost()

    def _tell_lost(self) -> None:
        if self.on_connection is not None:
            self.on_connection(False)


def _result(outcome: JobResult | Failure) -> JobResult:
    if isinstance(outcome, Failure):
        raise ServiceFailed(outcome)
    return outcome


def _cancelled() -> ServiceFailed:
    return fail(FailureKind.INTERRUPTED, "The attempt was cancelled before it was sent to the server.")


def _nobody(_: ProgressReport) -> None: ...
