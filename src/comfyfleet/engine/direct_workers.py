"""What an engine does for workers that have none: admits them, judges their failures, learns from their runs.

Every engine on the store looks, woken by a hint and once a second without one; there is no leader. Each step may be
taken twice: a record is written over with the same one, and a verdict is guarded by the lease it ends. A report is put
away only after its verdict is written, so an engine that dies in between leaves it to the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from comfyfleet.engine.context import EngineContext
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
        self._door: DirectWorkerInbox | None = context.store.direct_workers
        self._timer: Timer | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_called_again = False
        self._is_closed = False

    async def start(self) -> None:
        if self._door is None:
            return
        # Before anybody is judged by when he was last seen: their records do not say.
        self._hear_of((await self._door.look(1)).seen)
        self._door.listen(self.wake)
        self.wake()

    def wake(self) -> None:
        """There may be something to do: at once, or as soon as what is being done is done."""
        if self._running is not None:
            self._is_called_again = True
        elif not self._is_closed:
            self._running = in_background(self._run(), name="foreign workers")

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
                await self.attend()
                if not self._is_called_again:
                    break
        except Exception:
            log_failure(_LOG, "workers without an engine could not be attended to; the next look tries again")
        finally:
            self._running = None
            self._arm()

    async def attend(self) -> None:
        """Everything they have left, now."""
        door, context = self._door, self._context
        if door is None:
            return
        while True:
            left = await door.look(_BATCH)
            if left.applicants or left.reports or left.finished:
                # Judged by what the fleet is now: this engine may have had nothing to do for hours.
                await context.fleet.sync()
            self._hear_of(left.seen)
            done = 0
            for applicant in left.applicants:
                done += await self._admit(door, applicant)
            for report in left.reports:
                done += await self._judge(door, report)
            for run in await door.take_finished(_BATCH) if left.finished else ():
                done += await self._learn(run)
            if not done or max(len(left.reports), left.finished) < _BATCH:
                return

    def _hear_of(self, seen: Mapping[WorkerId, float]) -> None:
        for worker_id, at in seen.items():
            self._context.fleet.heard_of(worker_id, at)

    async def _admit(self, door: DirectWorkerInbox, applicant: PendingRegistration) -> bool:
        worker_id, problem = applicant.worker_id, applicant.problem
        try:
            if applicant.call is not None:
                await self._workers.register(_without_hub(applicant.call))
            elif not problem:
                await self._workers.unregister(worker_id, "it left")
        except Refusal as refusal:
            problem = str(refusal)
        except Exception:
            # One that cannot be admitted must not keep the others waiting; the next look tries again.
            log_failure(_LOG, "worker %s could not be admitted", worker_id)
            return False
        if problem:
            _LOG.warning("worker %s was not admitted: %s", worker_id, problem)
            await door.refuse(applicant, problem)
        else:
            await door.admitted(applicant)
        return True

    async def _judge(self, door: DirectWorkerInbox, report: DirectWorkerFailure) -> bool:
        try:
            failure = safe_failure(bounded(report.call.failure))
            await self._workers.fail(msgspec.structs.replace(report.call, failure=failure))
        except Exception as error:
            is_over = isinstance(error, Refusal) and error.code is RefusalCode.LEASE_LOST
            # If so, another engine has judged it, or the lease ran out before anybody came to it.
            if not is_over:
                # One that cannot be judged must not keep the others waiting; its lease ends by itself.
                log_failure(_LOG, "the failure of job %s could not be judged", report.call.ref.job_id)
                return False
        await door.settled(report)
        return True

    async def _learn(self, run: DirectWorkerCompletion) -> bool:
        try:
            await self._workers.finished(run)
        except Exception:
            log_failure(_LOG, "nothing was learned from the run of job %s", run.job_id)
        return True

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)


def _without_hub(call: RegisterWorker) -> RegisterWorker:
    """Whatever it says: with the store alone it has no hub to get jobs and files from, or to bring files to."""
    return msgspec.structs.replace(
        call, capabilities=msgspec.structs.replace(call.capabilities, moves_files=False, has_hub=False)
    )
