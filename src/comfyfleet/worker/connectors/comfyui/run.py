"""One prompt on one server from its acceptance to its end, with the timers of an attempt.

WebSocket messages make it fast; lookups make it certain. It ends with a result or a classified failure.
Submitting is in `submission.py`, cancelling in `prompt_state.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from comfyfleet.model.calls import LeasedJob, ProgressReport
from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind, ServiceBusy, ServiceFailed
from comfyfleet.model.job import JobResult
from comfyfleet.worker.connectors.comfyui.api import AnswerTooLarge, ComfyApi, HttpRefusals, Unreachable
from comfyfleet.worker.connectors.comfyui.listener import Message, WebSocketListener
from comfyfleet.worker.connectors.comfyui.outputs import read_entry, with_pictures
from comfyfleet.worker.connectors.comfyui.progress_estimate import NodeWeights
from comfyfleet.worker.connectors.comfyui.prompt_state import PromptState, PromptStatus, fetch_prompt_state
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings
from comfyfleet.worker.connectors.comfyui.thread_health import PromptAhead
from comfyfleet.worker.connectors.comfyui.tracker import RunTracker, TrackedProgress


class PromptExecution:
    def __init__(
        self,
        job: LeasedJob,
        prompt_id: str,
        report: Callable[[ProgressReport], None],
        api: ComfyApi,
        listener: WebSocketListener,
        settings: ComfyUISettings,
        patience_s: float | None = None,
        weights: NodeWeights | None = None,
    ) -> None:
        """`patience_s`: how long it waits behind another client's silent prompt. `weights`: its nodes'
        shares."""
        self.prompt_id = prompt_id
        self._job = job
        self._report = report
        self._api = api
        self._listener = listener
        self._settings = settings
        self.vram_gb: float | None = None
        self._loop = asyncio.get_running_loop()
        self._tracker = RunTracker(
            job.workflow, api.address.base, job.include_outputs, settings.max_message_bytes, weights
        )
        self._wake = asyncio.Event()
        self._end_told = asyncio.Event()
        self._look_now = False
        self._broken: Exception | None = None
        self._is_over = False
        self.is_cancelled = False
        self._is_removed = False
        self._losses_at_submit = listener.losses
        self._had_trouble = False

        # Progress that arrives before the submit is answered must follow "accepted".
        self._held: list[TrackedProgress] | None = []
        self._pending: TrackedProgress | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._reported_at = float("-inf")

        self._accepted_at = 0.0
        self._started_at: float | None = None
        self._sign_at = 0.0
        self._looked_at = 0.0
        self._quiet_since = 0.0
        self._reopens = 0
        self._idle_since: float | None = None
        self._patience_s = settings.occupied_s if patience_s is None else patience_s
        self.ahead: PromptAhead | None = None
        """The prompt that it waits behind."""
        self._trouble_since: float | None = None
        self._refusals = HttpRefusals(settings.refused_s)
        self._unknown_since: float | None = None

    # events

    def on_message(self, message: Message) -> None:
        if self._is_over:
            return
        now = self._loop.time()
        self._sign_at = self._quiet_since = now
        self._reopens = 0
        if message.kind == "executing" and message.node is not None:
            self._tracker.sent.begins(message.node, self._listener.connections)
        for progress in self._tracker.on_message(message, now, time.time()):
            self._tell(progress)
        if self._started_at is None:
            self._started_at = now
        if self._tracker.is_end_reported:
            self._tracker.sent.ended(self._listener.connections)
            self._end_told.set()
            self._look_now = True
            self._wake.set()

    def disconnected(self) -> None:
        self._look_now = True
        self._wake.set()

    reconnected = disconnected

    def cancelled(self) -> None:
        """A cancel has begun: nothing may be submitted any more."""
        self.is_cancelled = True

    def stopped(self, status: PromptStatus) -> None:
        """A cancel has succeeded: the prompt has ended or is gone."""
        self._is_removed = status.state is PromptState.UNKNOWN
        self._look_now = True
        self._wake.set()

    def close(self) -> None:
        self._is_over = True
        if self._flush is not None:
            self._flush.cancel()

    # run

    def accepted(self, number: float | None) -> None:
        now = self._loop.time()
        self._accepted_at = self._looked_at = now
        self._quiet_since = max(self._quiet_since, now)
        held, self._held = self._held or [], None
        for progress in [
            TrackedProgress(ProgressKind.ACCEPTED, {"prompt_id": self.prompt_id, "number": number}),
            *held,
        ]:
            self._tell(progress)

    def submitting(self) -> None:
        """The server may send messages from now on."""
        self._tracker.sent.submitted(self._listener.connections if self._listener.is_open else None)

    async def with_pictures(self, result: JobResult, folder: str) -> JobResult:
        """Adds pictures that the server sent and did not save. Raises `ServiceFailed`."""
        sent = self._tracker.sent
        if not sent.are_wanted:
            return result
        result = await with_pictures(result, sent, self._api, self._settings, folder)
        for node in sent.by_node:
            files = [msgspec.to_builtins(file) for file in result.files if file.node_id == node]
            self._tell(
                TrackedProgress(
                    ProgressKind.OUTPUT, {"node": node, "output": result.outputs[node], "files": files}
                )
            )
        return result

    async def until_end(self, stop: Callable[[], Any]) -> JobResult:
        """Raises `ServiceFailed`. `stop` stops the prompt before a timeout is raised."""
        while True:
            await self._sleep()
            if self._broken is not None:
                raise self._broken
            if self._look_now or self._loop.time() >= self._next_look():
                outcome = await self._look()
                if outcome is not None:
                    return self._finish(outcome)
            if self._overdue() is not None:
                # It may have started or ended while the WebSocket was deaf, so look it up once more.
                outcome = await self._look()
                if outcome is not None:
                    return self._finish(outcome)
                overdue = self._overdue()
                if overdue is not None:
                    is_held_up = self._is_held_up()
                    await stop()
                    outcome = await self._last_word()
                    if outcome is None and is_held_up:
                        raise ServiceBusy(overdue)
                    return self._finish(outcome or overdue)
            self._reopen_if_quiet()

    def _finish(self, outcome: JobResult | Failure) -> JobResult:
        self._send_pending()
        if self._broken is not None:
            raise self._broken
        if isinstance(outcome, Failure):
            raise ServiceFailed(outcome)
        return outcome

    async def _sleep(self) -> None:
        if not self._look_now:
            delay_s = max(0.0, self._next_moment() - self._loop.time())
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()
        self._wake.clear()

    async def _look(self) -> JobResult | Failure | None:
        """Looks the prompt up. None: the run goes on."""
        self._look_now = False
        self._looked_at = self._loop.time()
        try:
            is_end_told = self._tracker.is_end_reported
            standing = await fetch_prompt_state(self._api, self.prompt_id, is_end_reported=is_end_told)
        except AnswerTooLarge as error:
            return self._too_much(error)
        except Unreachable as error:
            return self._no_answer(error)
        self._trouble_since = None
        self._refusals.answered()
        self._looked_at = now = self._loop.time()
        match standing.state:
            case PromptState.ENDED:
                assert standing.entry is not None
                await self._await_end_news()
                return self._read(standing.entry)
            case PromptState.UNKNOWN:
                return self._gone()
            case PromptState.RUNNING:
                self._idle_since = self._unknown_since = self.ahead = None
                if self._started_at is None:
                    self._started_at = self._sign_at = now
                    # The WebSocket should have reported this. If it stays silent, it is deaf.
                    self._quiet_since = now + self._settings.end_news_s - self._quiet_s()
                    for progress in self._tracker.begin():
                        self._tell(progress)
            case PromptState.WAITING:
                self._unknown_since = None
                self._idle_since = (self._idle_since or now) if standing.is_server_idle else None
                self.ahead = self._ahead(standing, now)
        return None

    def _ahead(self, standing: PromptStatus, now: float) -> PromptAhead | None:
        prompt_id = standing.running
        # Our own runs have their own timers.
        if prompt_id is None or self._listener.listens_for(prompt_id):
            return None
        since = now if self.ahead is None or self.ahead.prompt_id != prompt_id else self.ahead.since
        sign_at = self._listener.last_foreign_message_at(prompt_id)
        return PromptAhead(
            prompt_id, since if sign_at is None else max(since, sign_at), standing.is_running_poison
        )

    def _read(self, entry: dict[str, Any]) -> JobResult | Failure:
        return read_entry(
            entry,
            self._api.address.base,
            included=self._job.include_outputs,
            timings=self._tracker.timings,
            vram_gb=self.vram_gb,
        )

    async def _await_end_news(self) -> None:
        """A WebSocket that does not report the end is deaf and is opened again for the next run."""
        if not self._listener.is_open:
            return
        try:
            sent, settings = self._tracker.sent, self._settings
            # Sent pictures come before the end and may be many, and only the WebSocket has them.
            is_patient = sent.are_wanted and sent.may_be_complete(self._listener.connections)
            async with asyncio.timeout(settings.unresponsive_s if is_patient else settings.end_news_s):
                await self._end_told.wait()
        except TimeoutError:
            self._listener.reopen()

    def _gone(self) -> JobResult | Failure | None:
        """The server answers and does not know the prompt."""
        heard = self._heard()
        if heard is not None:
            return heard
        if self._is_removed:
            return Failure(FailureKind.INTERRUPTED, "The prompt was cancelled before it ran.")
        now = self._loop.time()
        if self._unknown_since is None or now < self._unknown_since + self._settings.settle_s:
            # One answer is not enough: the server may still be starting behind a proxy.
            self._unknown_since = self._unknown_since or now
            return None
        if self._had_trouble or self._listener.losses > self._losses_at_submit:
            return Failure(
                FailureKind.CRASHED,
                f"The server was away and does not know prompt {self.prompt_id} any more: it was restarted.",
                server_died=None if self._started_at is None else "process",
            )
        return Failure(
            FailureKind.INTERRUPTED,
            f"Prompt {self.prompt_id} is no longer on the server: another client removed it from the queue.",
        )

    def _no_answer(self, error: Unreachable) -> JobResult | Failure | None:
        now = self._loop.time()
        self._had_trouble = True
        self._trouble_since = self._trouble_since or now
        patience_s = self._settings.unreachable_s if error.is_refused else self._settings.unresponsive_s
        words = f"could not be reached for {patience_s:g} s during the run"
        if self._refusals.are_enough(error):
            words = f"refused connections for {self._settings.refused_s:g} s during the run, so its process is gone"
        elif now < self._trouble_since + patience_s:
            return None
        heard = self._heard()
        if heard is not None:
            return heard
        return Failure(
            FailureKind.CRASHED,
            f"The server {words}: {error}",
            # Only a dead process refuses connections; a silent one may be cut off from us.
            server_died="process" if error.is_refused and self._started_at is not None else None,
        )

    def _too_much(self, error: AnswerTooLarge) -> Failure:
        if error.is_of_prompt:
            return Failure(
                FailureKind.NODE_ERROR,
                f"Cannot read the outputs of the run: {error}. Let the workflow save files instead.",
            )
        return Failure(FailureKind.DEAD_WORKER, f"The server cannot be used: {error}.")

    def _heard(self) -> JobResult | Failure | None:
        """The end as the WebSocket reported it, for when the history cannot be asked."""
        return self._tracker.outcome(self.vram_gb) if self._tracker.is_end_reported else None

    async def _last_word(self) -> JobResult | None:
        """A run may have completed at the last moment before it was stopped."""
        try:
            standing = await fetch_prompt_state(self._api, self.prompt_id)
        except Unreachable:
            return None
        outcome = None if standing.entry is None else self._read(standing.entry)
        return outcome if isinstance(outcome, JobResult) else None

    # timers

    def _overdue(self) -> Failure | None:
        now = self._loop.time()
        timeouts = self._job.timeouts
        if self._started_at is None:
            if (ahead := self.ahead) is not None and self._is_held_up():
                return Failure(
                    FailureKind.START_TIMEOUT,
                    f"The server has been running prompt {ahead.prompt_id} of another client for "
                    f"{now - ahead.since:.0f} s without a sign of life while ours waits.",
                )
            if timeouts.start_s is not None and now >= self._accepted_at + timeouts.start_s:
                return Failure(
                    FailureKind.START_TIMEOUT,
                    f"The server accepted the prompt and did not start it within {timeouts.start_s:g} s.",
                )
            if self._idle_since is not None and now >= self._idle_since + self._settings.idle_queue_s:
                return Failure(
                    FailureKind.DEAD_WORKER,
                    f"The server answers and prompts wait, but nothing has run for {self._settings.idle_queue_s:g} s: "
                    "its execution thread is dead. Restart the server.",
                )
            return None
        if timeouts.stall_s is not None:
            if now >= self._stalled_at(timeouts.stall_s):
                return Failure(
                    FailureKind.STALL_TIMEOUT,
                    f"The run gave no sign of life for {timeouts.stall_s:g} s.",
                    node_id=self._tracker.node,
                )
        elif now >= self._sign_at + self._settings.silent_run_s:
            return self._dead(self._settings.silent_run_s)
        if self._is_stuck_at_start() and now >= self._sign_at + self._settings.silent_start_s:
            return self._dead(self._settings.silent_start_s)
        return None

    def _is_held_up(self) -> bool:
        ahead = self.ahead
        if ahead is None or self._started_at is not None:
            return False
        return self._loop.time() >= ahead.since + self._held_up_s(ahead)

    def _held_up_s(self, ahead: PromptAhead) -> float:
        """How long another client's silent prompt may hold ours up: at most to the end of the start
        timeout, but not less than half of it from when that prompt was first seen."""
        longest_s = self._patience_s
        if ahead.is_poison:
            longest_s = min(longest_s, self._settings.idle_queue_s)
        start_s = self._job.timeouts.start_s
        if start_s is None:
            return longest_s
        return min(longest_s, max(start_s / 2, self._accepted_at + start_s - ahead.since))

    def _dead(self, silence_s: float) -> Failure:
        return Failure(
            FailureKind.DEAD_WORKER,
            f"The server lists the prompt as running, but sent no sign of it for {silence_s:g} s: "
            "its execution thread is dead. Restart the server.",
            node_id=self._tracker.node,
            server_died="thread",
        )

    def _is_stuck_at_start(self) -> bool:
        """The start was reported on a WebSocket that was never lost, and the first node did not follow."""
        return (
            self._tracker.has_messages
            and not self._tracker.is_under_way
            and self._listener.losses == self._losses_at_submit
        )

    def _stalled_at(self, stall_s: float) -> float:
        """Silence counts double if the WebSocket was lost since the last sign: messages may be missing."""
        lost_at = self._listener.lost_at
        is_trusted = self._listener.is_open and (lost_at is None or lost_at < self._sign_at)
        return self._sign_at + (stall_s if is_trusted else 2 * stall_s)

    def _next_moment(self) -> float:
        timeouts, settings = self._job.timeouts, self._settings
        moments = [self._next_look()]
        if self._started_at is None:
            if timeouts.start_s is not None:
                moments.append(self._accepted_at + timeouts.start_s)
            if self._idle_since is not None:
                moments.append(self._idle_since + settings.idle_queue_s)
            if self.ahead is not None:
                moments.append(self.ahead.since + self._held_up_s(self.ahead))
        else:
            moments.append(self._quiet_since + self._quiet_s())
            if timeouts.stall_s is not None:
                moments.append(self._stalled_at(timeouts.stall_s))
        return min(moments)

    def _next_look(self) -> float:
        is_in_doubt = self._unknown_since is not None or self._trouble_since is not None
        poll_s, settle_s = self._settings.poll_s, self._settings.settle_s
        return self._looked_at + (min(poll_s, settle_s) if is_in_doubt else poll_s)

    def _quiet_s(self) -> float:
        """Grows each time, but a deaf WebSocket must be replaced before its silence counts as a stall."""
        stall_s = self._job.timeouts.stall_s
        quiet_s: float = self._settings.quiet_s * 2 ** min(self._reopens, 6)
        return quiet_s if stall_s is None else min(quiet_s, stall_s / 3)

    def _reopen_if_quiet(self) -> None:
        now = self._loop.time()
        if self._started_at is not None and now >= self._quiet_since + self._quiet_s():
            self._quiet_since = now
            self._reopens += 1
            self._listener.reopen()

    # reports

    def _tell(self, progress: TrackedProgress) -> None:
        if self._held is not None:
            self._held.append(progress)
            return
        if progress.kind is not ProgressKind.PROGRESS:
            self._send_pending()
            self._send(progress)
            return
        due_s = self._reported_at + self._settings.progress_interval_s - self._loop.time()
        if due_s <= 0:
            self._pending = None
            self._reported_at = self._loop.time()
            self._send(progress)
            return
        self._pending = progress
        if self._flush is None:
            self._flush = self._loop.call_later(due_s, self._send_pending)

    def _send_pending(self) -> None:
        progress, self._pending = self._pending, None
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if progress is not None and not self._is_over:
            self._reported_at = self._loop.time()
            self._send(progress)

    def _send(self, progress: TrackedProgress) -> None:
        data = {"prompt_id": self.prompt_id} if progress.kind is ProgressKind.STARTED else progress.data
        try:
            self._report(ProgressReport(self._job.ref, progress.kind, data, progress.image))
        except Exception as error:
            # The listener serves other attempts too: an error of this receiver ends this attempt only.
            self._broken = self._broken or error
            self._wake.set()
