"""One attempt on one server of the A1111 family, from the free check to its result, with the timers of an attempt.

The request stays open until the pictures are done, so it has a task of its own: whoever waits for the attempt may be
cancelled, and the run goes on. If the connection is lost the pictures are lost too; then the run is watched to its end,
so that no second one begins beside it. Cancelling is in `connector.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.worker.connectors.a1111 import failures
from comfyfleet.worker.connectors.a1111.api import A1111Api
from comfyfleet.worker.connectors.a1111.failures import fail
from comfyfleet.worker.connectors.a1111.inventory import ListedCheckpoint, used_checkpoint
from comfyfleet.worker.connectors.a1111.names import Route, plain
from comfyfleet.worker.connectors.a1111.outputs import (
    GenerationAnswer,
    KeptPictures,
    read_answer,
    result_of,
)
from comfyfleet.worker.connectors.a1111.request import picture_count
from comfyfleet.worker.connectors.a1111.server_state import (
    ServerLook,
    TaskLook,
    look_at_server,
    look_at_task,
)
from comfyfleet.worker.connectors.a1111.settings import A1111Settings
from comfyfleet.worker.connectors.comfyui.api import AnswerTooLarge, ApiAnswer, HttpRefusals, Unreachable

Stop = Callable[[], Any]


class A1111Run:
    """`post` is set once the request is sent. From then on only its end, or a timer, ends the run."""

    def __init__(
        self, job: LeasedJob, task_id: str, api: A1111Api, settings: A1111Settings, pictures: KeptPictures
    ) -> None:
        self.task_id = task_id
        self.report: Callable[[ProgressReport], None] = lambda _: None
        self.cancelled = asyncio.Event()
        self.post: asyncio.Task[ApiAnswer] | None = None
        self.interrupts = 0
        """How many we sent."""
        self.is_lost = False
        """The request broke, and the run is watched without it."""
        self.has_tasks = False
        self.is_without_id = False
        """The server has no ids of tasks, as SD.Next and one without its web UI."""
        self.heard_at = float("-inf")
        """When the server last answered a look."""
        self.is_started = False
        self.answer: GenerationAnswer | None = None
        self._job = job
        self._api = api
        self._settings = settings
        self._pictures = pictures
        self._loop = asyncio.get_running_loop()
        self._route: Route = "txt2img"
        self._body: dict[str, Any] = {}
        self._checkpoint: ListedCheckpoint | None = None
        self._named = ""
        self._vram_gb: float | None = None
        self._sent_at = 0.0
        self._accepted_at: float | None = None
        self._sign_at = 0.0
        self._sign: object = None
        self._has_stepped = False
        self._percentage = 0.0
        self._preview_id = -1
        self._disturbed: set[str] = set()
        """The timestamps of runs that somebody else interrupted while ours was active."""

    # the request

    def send(
        self,
        route: Route,
        body: dict[str, Any],
        checkpoint: ListedCheckpoint | None,
        *,
        named: str,
        has_tasks: bool,
        vram_gb: float | None,
    ) -> asyncio.Task[ApiAnswer]:
        """The caller has the turn. `named`: the checkpoint as the payload names it."""
        self._named = named
        self._route, self._body, self._checkpoint = route, body, checkpoint
        self._vram_gb = vram_gb
        # Upscaling has no task id on any server.
        self.has_tasks = has_tasks and not route.startswith("extra")
        self.is_without_id = not has_tasks and not route.startswith("extra")
        self._sent_at = self._sign_at = self.heard_at = self._loop.time()
        self.post = asyncio.create_task(self._api.run(route, body))
        # An error that nobody waits for any more is no news.
        self.post.add_done_callback(lambda post: post.cancelled() or post.exception())
        if route.startswith("extra"):
            # It has no progress either.
            self._accept()
            self._start()
        return self.post

    async def until_end(self, stop: Stop) -> JobResult:
        """Raises `ServiceFailed`. `stop` tries to stop the run before a timeout is raised."""
        assert self.post is not None, "the request was not sent"
        silent_since: float | None = None
        while True:
            done, _ = await asyncio.wait({self.post}, timeout=self._settings.poll_s)
            if done:
                return await self._ended()
            try:
                await self._look()
                silent_since = None
            except Unreachable:
                silent_since = silent_since or self._loop.time()
            except ServiceFailed:
                # The request is open, so its answer says what is wrong.
                silent_since = None
            if self.post.done():
                continue
            overdue = self._overdue() or self._silence(silent_since)
            if overdue is not None:
                if self.is_started:
                    with suppress(Unreachable, ServiceFailed):
                        await stop()
                if self.post.done():
                    # It may have completed at the last moment.
                    with suppress(ServiceFailed):
                        return await self._ended()
                self.post.cancel()
                raise ServiceFailed(overdue)

    def _silence(self, since: float | None) -> Failure | None:
        longest_s = self._settings.unresponsive_s
        if since is None or self._loop.time() < since + longest_s:
            return None
        words = f"The server gave no useful answer for {longest_s:g} s during the run."
        return Failure(FailureKind.CRASHED, words)

    # looks

    async def _look(self) -> tuple[ServerLook, TaskLook | None]:
        """Raises `Unreachable` or `ServiceFailed`."""
        task = None
        if self.has_tasks:
            preview_id = self._preview_id if self._settings.previews and self.is_started else None
            task = await look_at_task(self._api, self.task_id, preview_id, self._settings.max_preview_bytes)
        look = await look_at_server(self._api)
        self.heard_at = self._loop.time()
        if self._route.startswith("extra"):
            return look, task
        is_ours = not look.is_idle and (task.is_active if task is not None else not self.has_tasks)
        if is_ours or (task is not None and task.is_known):
            self._accept()
        if is_ours:
            self._start()
            self._note(look)
            self._tell(look, task)
        return look, task

    def _note(self, look: ServerLook) -> None:
        self._has_stepped = self._has_stepped or look.step > 0 or look.number > 0
        if look.sign != self._sign:
            self._sign, self._sign_at = look.sign, self._loop.time()
        if look.is_disturbed and not self.interrupts:
            self._disturbed.add(look.timestamp)

    def _accept(self) -> None:
        if self._accepted_at is None:
            self._accepted_at = self._loop.time()
            self._send(ProgressKind.ACCEPTED, {"prompt_id": self.task_id, "number": None})

    def _start(self) -> None:
        if not self.is_started:
            self.is_started = True
            self._sign_at = self._loop.time()
            self._send(ProgressKind.STARTED, {"prompt_id": self.task_id})

    def _tell(self, look: ServerLook, task: TaskLook | None) -> None:
        self._percentage = max(self._percentage, round(100.0 * look.share, 1))
        data: dict[str, Any] = {"node": self._route, "percentage": self._percentage}
        if look.step <= look.steps:
            data |= {"value": look.step, "max": look.steps}
            data["message"] = f"{self._route}: step {look.step} of {look.steps}"
        if task is not None and task.eta_s is not None:
            data["remaining_s"] = round(task.eta_s, 2)
        self._send(ProgressKind.PROGRESS, data)
        if task is not None and task.preview is not None:
            self._preview_id = task.preview_id
            self._send(
                ProgressKind.PREVIEW, {"format": task.preview_format, "node": self._route}, task.preview
            )

    def _send(self, kind: ProgressKind, data: dict[str, Any], image: bytes | None = None) -> None:
        self.report(ProgressReport(self._job.ref, kind, data, image))

    # timers

    def _overdue(self) -> Failure | None:
        now, timeouts = self._loop.time(), self._job.timeouts
        if self._accepted_at is None:
            accept_s = self._settings.accept_s if timeouts.accept_s is None else timeouts.accept_s
            if now >= self._sent_at + accept_s:
                return Failure(
                    FailureKind.ACCEPT_TIMEOUT,
                    f"The server did not know of the run {accept_s:g} s after it was sent. It may still run it later.",
                )
        elif not self.is_started:
            if timeouts.start_s is not None and now >= self._accepted_at + timeouts.start_s:
                return Failure(
                    FailureKind.START_TIMEOUT,
                    f"The server let the run wait for {timeouts.start_s:g} s. It may still run it later.",
                )
        elif timeouts.stall_s is not None:
            has_steps = not self._route.startswith("extra")
            stall_s = timeouts.stall_s
            if has_steps and not self._has_stepped:
                stall_s = max(stall_s, self._settings.load_s)
            if now >= self._sign_at + stall_s:
                return Failure(
                    FailureKind.STALL_TIMEOUT,
                    f"The run gave no sign of life for {stall_s:g} s.",
                    node_id=self._route,
                )
        return None

    # the end

    async def _ended(self) -> JobResult:
        assert self.post is not None and self.post.done()
        if self.post.cancelled():
            raise fail(FailureKind.INTERRUPTED, "The connector was closed during the run.")
        try:
            answer = self.post.result()
        except AnswerTooLarge as error:
            raise fail(
                FailureKind.NODE_ERROR,
                f"Cannot read the pictures of the run: {error}. Order fewer or smaller ones in one job.",
            ) from error
        except Unreachable as error:
            return await self._lost(str(error))
        if answer.status in failures.PROXY_STATUSES:
            return await self._lost(f"a proxy answered {answer.status}")
        if answer.status == 429:
            raise failures.busy("The server takes no more requests for now (status 429).")
        if not answer.is_ok:
            raise ServiceFailed(
                failures.refused_run(answer.status, answer.body, self._route, self._body, self._vram_gb)
            )
        read = read_answer(answer.body)
        if read is None:
            raise fail(FailureKind.DEAD_WORKER, "The answer to the run is not that of the web UI.")
        self._accept()
        self._start()
        await self._check_disturbed(read)
        self._check_checkpoint(read)
        self.answer = read
        files = await asyncio.to_thread(self._pictures.keep, self.task_id, self._route, self._wanted(read))
        result = result_of(self._route, read, files)
        if not self._is_included:
            return JobResult()
        listed = [{"node_id": each.node_id, "kind": each.kind, "filename": each.filename} for each in files]
        self._send(
            ProgressKind.OUTPUT,
            {"node": self._route, "output": result.outputs[self._route], "files": listed},
        )
        return result

    @property
    def _is_included(self) -> bool:
        return not self._job.include_outputs or self._route in self._job.include_outputs

    def _wanted(self, read: GenerationAnswer) -> tuple[str, ...]:
        return read.pictures if self._is_included else ()

    async def _check_disturbed(self, read: GenerationAnswer) -> None:
        """An interrupted run ends like a complete one, with half a picture. Raises `ServiceFailed`."""
        if self._route.startswith("extra"):
            return
        if not self.interrupts:
            # The flags stay until the next run begins, so this look covers the time since the last one.
            with suppress(Unreachable, ServiceFailed):
                look = await look_at_server(self._api)
                if look.is_disturbed and look.timestamp == read.timestamp:
                    self._disturbed.add(look.timestamp)
        if self.interrupts:
            raise fail(FailureKind.INTERRUPTED, "The run was cancelled.")
        if self._disturbed and (not read.timestamp or read.timestamp in self._disturbed):
            raise fail(
                FailureKind.INTERRUPTED,
                "Somebody else interrupted or skipped the run, on the server's own page or with another program.",
            )
        ordered = picture_count(self._body)
        if ordered is not None and len(read.pictures) < ordered:
            raise fail(
                FailureKind.INTERRUPTED,
                f"The run made {len(read.pictures)} of {ordered} pictures: somebody else interrupted it.",
            )

    def _check_checkpoint(self, read: GenerationAnswer) -> None:
        wanted = self._checkpoint
        name, found_hash = used_checkpoint(read.info)
        if wanted is None or not (name or found_hash) or wanted.is_used_in(name, found_hash):
            return
        raise fail(
            FailureKind.MISSING_MODEL,
            f"The server used the checkpoint {name or found_hash} and not {wanted.title}: it could not load that.",
            (plain(self._named or wanted.title),),
        )

    async def _lost(self, why: str) -> JobResult:
        """Watches the run to its end without its request. Always raises `ServiceFailed`."""
        self.is_lost = True
        refusals = HttpRefusals(self._settings.refused_s)
        silent_since: float | None = None
        unknown_since: float | None = None
        while True:
            now = self._loop.time()
            try:
                look, task = await self._look()
            except Unreachable as error:
                silent_since = silent_since or now
                if refusals.are_enough(error):
                    raise ServiceFailed(
                        Failure(
                            FailureKind.CRASHED,
                            f"The server refuses connections during the run, so its process is gone: {why}",
                            server_died="process" if self.is_started else None,
                        )
                    ) from error
                if now >= silent_since + self._settings.unresponsive_s:
                    raise fail(FailureKind.CRASHED, f"The server is away during the run: {error}") from error
                await asyncio.sleep(min(self._settings.poll_s, self._settings.refused_s / 4))
                continue
            refusals.answered()
            silent_since = None
            is_on = not look.is_idle and (task is None or task.is_active or task.is_queued)
            if is_on:
                unknown_since = None
                if (overdue := self._overdue()) is not None:
                    raise ServiceFailed(overdue)
            elif self.interrupts:
                raise fail(FailureKind.INTERRUPTED, "The run was cancelled.")
            elif task is not None and task.is_completed:
                raise fail(FailureKind.TRANSIENT, f"The run completed, but its pictures are lost: {why}")
            else:
                # A request that was cut off may still be on its way to the lock.
                unknown_since = unknown_since or now
                if now >= unknown_since + self._settings.settle_s:
                    raise self._vanished(task, why)
            await asyncio.sleep(self._settings.poll_s)

    def _vanished(self, task: TaskLook | None, why: str) -> ServiceFailed:
        if task is not None and task.is_active:
            return fail(FailureKind.TRANSIENT, f"The run failed, and its error is lost: {why}")
        if task is not None and self._accepted_at is not None and not task.is_queued:
            return fail(
                FailureKind.CRASHED, f"The server does not know the run any more: it was restarted ({why})"
            )
        return fail(
            FailureKind.TRANSIENT, f"The connection to the run is lost, and its pictures with it: {why}"
        )
