"""Sends the progress of running attempts: gathered for a few milliseconds, then sent in one call.

A newer progress report or preview replaces the older one of its lease; all other reports keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from comfyfleet.model.calls import HeartbeatReply, ProgressReport
from comfyfleet.model.fact import ProgressKind
from comfyfleet.ports import WorkerApi
from comfyfleet.worker.settings import AgentSettings, Backoff, is_retryable


class ProgressBuffer:
    """The unsent reports of one lease."""

    __slots__ = ("_bound", "_count", "in_flight", "is_closed", "pending")

    def __init__(self, bound: int) -> None:
        self.pending: dict[ProgressKind | int, ProgressReport] = {}
        self.in_flight: asyncio.Future[None] | None = None
        self.is_closed = False
        self._bound = bound
        self._count = 0

    def add(self, report: ProgressReport) -> None:
        key: ProgressKind | int
        if report.kind is ProgressKind.PROGRESS or report.kind is ProgressKind.PREVIEW:
            key = report.kind
            # Removed first, so that the newer report takes its place in the order.
            self.pending.pop(key, None)
        else:
            self._count += 1
            key = self._count
            if len(self.pending) >= self._bound:
                del self.pending[next(iter(self.pending))]
        self.pending[key] = report

    def put_back(self, unsent: dict[ProgressKind | int, ProgressReport]) -> None:
        newer, self.pending = self.pending, unsent
        for key, report in newer.items():
            self.pending.pop(key, None)
            self.pending[key] = report

    def close(self) -> None:
        self.is_closed = True
        self.pending = {}


class ProgressSender:
    def __init__(
        self, api: WorkerApi, settings: AgentSettings, on_beat: Callable[[HeartbeatReply], None]
    ) -> None:
        self._api = api
        self._settings = settings
        self._on_beat = on_beat
        self._waiting: dict[ProgressBuffer, None] = {}
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def outbox(self) -> ProgressBuffer:
        return ProgressBuffer(self._settings.max_pending_reports)

    def put(self, outbox: ProgressBuffer, report: ProgressReport) -> None:
        outbox.add(report)
        self._waiting[outbox] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settings.batch_s, self._ring)

    async def run(self) -> None:
        backoff = Backoff(self._settings)
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if not (outboxes := [outbox for outbox in self._waiting if outbox.pending]):
                    continue
                try:
                    await self._send_marked(outboxes)
                    backoff.reset()
                except Exception:
                    await asyncio.sleep(backoff.next_s())
                    self._wake.set()
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def flush(self, outbox: ProgressBuffer) -> None:
        """Sends the rest of one lease before its end is reported. Gives up after `flush_s`."""
        if outbox.in_flight is None and not outbox.pending:
            return
        backoff = Backoff(self._settings)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.flush_s):
                while outbox.in_flight is not None:
                    await asyncio.wait({outbox.in_flight})
                while outbox.pending:
                    try:
                        await self._send([outbox])
                    except Exception:
                        await asyncio.sleep(backoff.next_s())

    def _ring(self) -> None:
        self._timer = None
        self._wake.set()

    async def _send_marked(self, outboxes: Sequence[ProgressBuffer]) -> None:
        done = asyncio.get_running_loop().create_future()
        for outbox in outboxes:
            outbox.in_flight = done
        try:
            await self._send(outboxes)
        finally:
            for outbox in outboxes:
                outbox.in_flight = None
            done.set_result(None)

    async def _send(self, outboxes: Sequence[ProgressBuffer]) -> None:
        taken = [(outbox, outbox.pending) for outbox in outboxes]
        for outbox in outboxes:
            outbox.pending = {}
            self._waiting.pop(outbox, None)
        try:
            beat = await self._api.progress([report for _, reports in taken for report in reports.values()])
        except BaseException as error:
            # A refused batch would be refused again; any other may have been lost on the way.
            if not isinstance(error, Exception) or is_retryable(error):
                for outbox, reports in taken:
                    if not outbox.is_closed:
                        outbox.put_back(reports)
                        self._waiting[outbox] = None
                raise
            return
        self._on_beat(beat)
