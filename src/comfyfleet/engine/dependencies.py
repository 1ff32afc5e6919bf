"""Holds jobs that wait for other jobs: they go into the queue when all of those complete, and fail when one
does not.

A note in the document store comes before the mark on the awaited job, and that before the waiting job. So any
engine that ends an awaited job finds its dependents. The sweeper looks at each held job again, in case an
engine dies in between. Each look ends in a guarded write and may run twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from comfyfleet.engine.context import EngineContext, best_effort, stop
from comfyfleet.engine.failure_handler import FailureHandler
from comfyfleet.engine.input_files import InputFiles, with_files
from comfyfleet.engine.matcher import Matcher
from comfyfleet.model.dispatch import AtRevision, Change, Dispatch, Phase, Write
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.model.payload_digest import job_sha256
from comfyfleet.paginator import documents_in
from comfyfleet.policy.timers import dependencies_met
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

COLLECTION = "dependents"
_COMPLETED = b"completed"
"""Prefix of a note; the files that the awaited job supplies follow it."""
_FOUND = msgspec.json.Decoder(dict[int, str])


class Dependencies:
    def __init__(
        self, context: EngineContext, matcher: Matcher, failures: FailureHandler, inputs: InputFiles
    ) -> None:
        self._context = context
        self._matcher = matcher
        self._failures = failures
        self._inputs = inputs
        self._ended: dict[JobId, Dispatch] = {}
        self._running: asyncio.Task[None] | None = None
        context.awaited_ended = self.ended

    async def check(self, after: Sequence[JobId], tenant: TenantId) -> bool:
        """Whether any of these jobs is still open. Refuses a job of another tenant like a missing one."""
        is_open = False
        for job_id in after:
            dispatch = await self._context.store.load(job_id)
            if dispatch is None or dispatch.tenant != tenant:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST,
                    f"there is no job {job_id!r} to wait for (any more)",
                    field="after",
                )
            is_open |= dispatch.phase is not Phase.COMPLETED
        return is_open

    async def announce(self, after: Sequence[JobId], job_id: JobId) -> None:
        """Runs before the job is written, so that the end of each awaited job reaches it."""
        store = self._context.store
        for awaited in after:
            await store.documents.put(COLLECTION, _name(awaited, job_id), b"", version=None)
            while (dispatch := await store.load(awaited)) is not None:
                if dispatch.is_awaited or dispatch.phase.is_final:
                    break
                mark = Write(awaited, AtRevision(dispatch.revision), Change(is_awaited=True))
                if await store.write(mark) is not None:
                    break

    def ended(self, dispatch: Dispatch) -> None:
        self._ended[dispatch.job_id] = dispatch
        if self._running is None:
            self._running = in_background(self._tell(), name="dependencies")

    async def _tell(self) -> None:
        try:
            while self._ended:
                awaited, dispatch = next(iter(self._ended.items()))
                del self._ended[awaited]
                try:
                    if dispatch.awaits_jobs:
                        await self._give_up(awaited)
                    if dispatch.is_awaited:
                        await self.notify_dependents(awaited)
                except Exception:
                    log_failure(
                        _LOG, "could not notify the jobs that wait for job %s; the next sweep does", awaited
                    )
        finally:
            self._running = None

    async def notify_dependents(self, awaited: JobId) -> None:
        documents = self._context.store.documents
        async for document in documents_in(documents, COLLECTION, f"{awaited}/"):
            job_id = JobId(document.name.partition("/")[2])
            if await self.recheck(job_id):
                await self._forget((awaited,), job_id)

    async def _give_up(self, job_id: JobId) -> None:
        """Removes the notes of a job that ended before it ran, unless somebody has retried it since."""
        job = await self._context.store.records.get(job_id)
        if job is not None and job.phase.is_final:
            await self._forget(job.payload.after, job_id)

    async def recheck(self, job_id: JobId) -> bool:
        """Releases or fails the job if it can. True: the job no longer waits."""
        context = self._context
        while True:
            dispatch = await context.store.load(job_id)
            if dispatch is None or dispatch.phase is not Phase.QUEUED or not dispatch.awaits_jobs:
                return True
            job = await context.store.records.get(job_id)
            if job is None:
                # The job ended and was deleted since it was loaded.
                return True
            after = job.payload.after
            problem: Failure | None = None
            is_ready, files = True, dict[int, str]()
            for awaited in after:
                phase, found = await self._awaited_phase(awaited, job)
                is_ready &= phase is Phase.COMPLETED
                if phase in (None, Phase.FAILED, Phase.CANCELLED):
                    problem = problem or _failure(awaited, phase)
                elif isinstance(found, Failure):
                    problem = problem or found
                else:
                    files |= found
            if problem is not None:
                if await self._failures.end_job(dispatch, problem) is not None:
                    return True
                continue
            if not is_ready:
                return False
            now = await context.store.now()
            change = dependencies_met(dispatch, now, context.rules)
            kept = None
            if files:
                payload = with_files(job.payload, files)
                kept = {"payload": payload}
                digest = job_sha256(msgspec.structs.replace(job, payload=payload))
                change = msgspec.structs.replace(change, payload_sha256=digest)
            written = await context.write(Write(job_id, AtRevision(dispatch.revision), change, job=kept))
            if written is None:
                continue
            self._matcher.job_arrived(written.dispatch)
            with best_effort(f"forget what job {job_id} waited for"):
                await self._forget(after, job_id)
            return True

    async def _awaited_phase(self, awaited: JobId, job: Job) -> tuple[Phase | None, dict[int, str] | Failure]:
        """The phase of an awaited job and, once it completed, the files that it supplies. None: the job is
        gone without a note that it completed."""
        store = self._context.store
        dispatch = await store.load(awaited)
        if dispatch is not None and dispatch.phase is not Phase.COMPLETED:
            return dispatch.phase, {}
        name = _name(awaited, job.job_id)
        document = await store.documents.get(COLLECTION, name)
        if document is not None and document.body.startswith(_COMPLETED):
            return Phase.COMPLETED, _FOUND.decode(document.body.removeprefix(_COMPLETED) or b"{}")
        if dispatch is None:
            return None, {}
        found = await self._inputs.found(job.payload, awaited)
        if not isinstance(found, Failure):
            await self._inputs.use(found.values(), job.job_id)
            if document is not None:
                # The completed job may be deleted while this one waits for others.
                body = _COMPLETED + (msgspec.json.encode(found) if found else b"")
                await store.documents.put(COLLECTION, name, body, version=document.version)
        return Phase.COMPLETED, found

    async def _forget(self, after: Sequence[JobId], job_id: JobId) -> None:
        for awaited in after:
            await self._context.store.documents.remove(COLLECTION, _name(awaited, job_id))

    async def close(self) -> None:
        await stop(self._running)


def waiting_for_jobs(dispatch: Dispatch) -> Dispatch:
    """The dispatch of a job that waits for others: its preferences count from the end of that wait."""
    return msgspec.structs.replace(dispatch, awaits_jobs=True, relax_at=None)


def _name(awaited: JobId, job_id: JobId) -> str:
    return f"{awaited}/{job_id}"


def _failure(awaited: JobId, phase: Phase | None) -> Failure:
    what = "no longer exists" if phase is None else phase.value
    what = what if phase in (None, Phase.FAILED) else f"was {what}"
    return Failure(FailureKind.DEPENDENCY_FAILED, f"the job {awaited} that it waited for {what}")
