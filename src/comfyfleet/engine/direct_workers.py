"""Serves workers that talk to the store alone: admits them, handles their failures, learns from their runs.

Every engine on the store does this, on a hint and once a second; there is no leader. Each step may run twice.
An engine removes a report only after it wrote the decision, so a crash leaves the report to the next
engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from comfyfleet.engine.context import EngineContext, stop
from comfyfleet.engine.worker_operations import WorkerOperations
from comfyfleet.model.calls import (
    DirectWorkerCompletion,
    DirectWorkerFailure,
    PendingRegistration,
    RegisterWorker,
)
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import bounded
from comfyfleet.model.ids import WorkerId
from comfyfleet.policy.sanitizer import safe_failure
from comfyfleet.ports import DirectWorkerInbox, Timer
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)
_BATCH = 256


class DirectWorkers:
    def __init__(self, context: EngineContext, workers: WorkerOperations) -> None:
        self._context = context
        self._workers = workers
        self._inbox: DirectWorkerInbox | None = context.store.direct_workers
        self._timer: Timer | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_called_again = False
        self._is_closed = False

    async def start(self) -> None:
        if self._inbox is None:
            return
        # Before the sweeper looks for lost workers: the workers' records do not hold these times.
        self._note_seen((await self._inbox.backlog(1)).seen)
        self._inbox.listen(self.wake)
        self.wake()

    def wake(self) -> None:
        """Starts a pass now, or right after the current one."""
        if self._running is not None:
            self._is_called_again = True
        elif not self._is_closed:
            self._running = in_background(self._run(), name="direct workers")

    def _arm(self) -> None:
        if self._timer is None and not self._is_closed:
            clock = self._context.clock
            self._timer = clock.call_at(clock.now() + self._context.rules.round_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.wake()

    async def _run(self) -> None:
        try:
            while True:
                self._is_called_again = False
                await self.process_inbox()
                if not self._is_called_again:
                    break
        except Exception:
            log_failure(_LOG, "could not serve the direct workers; the next pass tries again")
        finally:
            self._running = None
            self._arm()

    async def process_inbox(self) -> None:
        """Processes every waiting registration, failure report and completion."""
        inbox, context = self._inbox, self._context
        if inbox is None:
            return
        while True:
            left = await inbox.backlog(_BATCH)
            if left.registrations or left.reports or left.finished:
                # This engine may have been idle for hours; decide with the fleet as it is now.
                await context.fleet.sync()
            self._note_seen(left.seen)
            done = 0
            for applicant in left.registrations:
                done += await self._admit(inbox, applicant)
            for report in left.reports:
                done += await self._handle_failure(inbox, report)
            for run in await inbox.take_finished(_BATCH) if left.finished else ():
                done += await self._learn(run)
            if not done or max(len(left.reports), left.finished) < _BATCH:
                return

    def _note_seen(self, seen: Mapping[WorkerId, float]) -> None:
        for worker_id, at in seen.items():
            self._context.fleet.set_last_seen(worker_id, at)

    async def _admit(self, inbox: DirectWorkerInbox, registration: PendingRegistration) -> bool:
        worker_id, problem = registration.worker_id, registration.problem
        try:
            if registration.call is not None:
                await self._workers.register(_without_hub(registration.call))
            elif not problem:
                await self._workers.unregister(worker_id, "it left")
        except Refusal as refusal:
            problem = str(refusal)
        except Exception:
            # One failed registration must not delay the others; the next pass tries again.
            log_failure(_LOG, "could not admit worker %s; the next pass tries again", worker_id)
            return False
        if problem:
            _LOG.warning("worker %s was not admitted: %s", worker_id, problem)
            await inbox.refuse(registration, problem)
        else:
            await inbox.admitted(registration)
        return True

    async def _handle_failure(self, inbox: DirectWorkerInbox, report: DirectWorkerFailure) -> bool:
        try:
            failure = safe_failure(bounded(report.call.failure))
            await self._workers.fail(msgspec.structs.replace(report.call, failure=failure))
        except Exception as error:
            is_over = isinstance(error, Refusal) and error.code is RefusalCode.LEASE_LOST
            # Then another engine handled it, or the lease expired first.
            if not is_over:
                # One failed report must not delay the others; its lease expires by itself.
                log_failure(
                    _LOG,
                    "could not handle the failure of job %s; its lease expires by itself",
                    report.call.ref.job_id,
                )
                return False
        await inbox.handled(report)
        return True

    async def _learn(self, run: DirectWorkerCompletion) -> bool:
        try:
            await self._workers.finished(run)
        except Exception:
            log_failure(_LOG, "could not record the run of job %s in the statistics", run.job_id)
        return True

    async def close(self) -> None:
        self._is_closed = True
        await stop(self._timer, self._running)


def _without_hub(call: RegisterWorker) -> RegisterWorker:
    """A direct worker has no hub to exchange jobs and files with, whatever it declares."""
    return msgspec.structs.replace(
        call, capabilities=msgspec.structs.replace(call.capabilities, moves_files=False, has_hub=False)
    )
