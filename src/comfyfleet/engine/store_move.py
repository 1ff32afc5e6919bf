"""Moves everything from one store to another: jobs with history, blocks, workflow statistics, documents,
classes.

The source deletes a job only after the target has confirmed it, so an interrupted move can start again. The
target's workers decide on classes; therefore this is the engine's work and not a store's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from enum import StrEnum

import msgspec

from comfyfleet.engine.fleet import Fleet
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import (
    AtRevision,
    Attempt,
    AttemptEnd,
    AttemptOutcome,
    Dispatch,
    Phase,
    Stop,
    Write,
)
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import ClassKey, JobId, TenantId, WorkerId
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.paginator import documents_in, record_pages
from comfyfleet.policy.lifecycle import cancelled
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.timers import requeued
from comfyfleet.ports import Document, RecordQuery, TransferableStore

_PAGE = 20
"""Small, because a page of large payloads is in memory and in one write of the target."""
_TRIES = 3
_POLL_S = 0.2
_MARK_S = 60.0


class SkipReason(StrEnum):
    """Why a job stays at the source."""

    REFERENCE = "reference"
    """The target has another job of the tenant with the same reference."""
    CHANGED = "changed"
    """Both sides have changed the job: an engine uses the source, and the target has leased it."""
    LEASED = "leased"


class SkippedJob(msgspec.Struct, frozen=True):
    job_id: JobId
    why: SkipReason
    reference: str | None = None
    other_job_id: JobId | None = None


class MoveProgress(msgspec.Struct):
    """What was done so far, or would be in a rehearsal."""

    jobs: int = 0
    by_phase: dict[Phase, int] = msgspec.field(default_factory=dict)
    stayed: list[SkippedJob] = msgspec.field(default_factory=list)
    blocks: int = 0
    workflow_stats: int = 0
    documents: int = 0
    classes: int = 0
    released: int = 0
    """Expired leases that were released."""


class StoreMove:
    def __init__(
        self,
        source: TransferableStore,
        target: TransferableStore,
        *,
        token: str,
        on_progress: Callable[[MoveProgress], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._target = target
        self._token = token
        """Random text, different in each move."""
        self._on_progress = on_progress
        self._fleet = Fleet(target, SystemClock())
        self._classes: dict[ClassKey, RequirementClass] = {}
        self._ready: set[ClassKey] = set()
        self._tenants: set[TenantId] = set()
        self._tries: dict[JobId, int] = {}
        self.moved = MoveProgress()

    async def run(self, wait_s: float = 0.0) -> MoveProgress:
        """Pauses the source for good: an operator looks at what may be left there."""
        await self._refuse_the_same_store()
        was_paused = await self._source.is_queue_paused()
        await self._source.pause_queue(True)
        try:
            await self._await_leases(wait_s)
        except BaseException:
            if not was_paused:
                await self._source.pause_queue(False)
            raise
        await self._fleet.load()
        await self._move_workflow_stats()
        await self._move_terms()
        await self._move_blocks()
        await self._move_documents()
        await self._move_jobs()
        return self.moved

    async def dry_run(self) -> MoveProgress:
        """Counts what a move would do, and changes nothing."""
        after: JobId | None = None
        records = self._target.records
        while page := await self._page(after):
            for job in page:
                known = await self._target.load(job.job_id)
                other = None
                if known is None and job.reference is not None:
                    other = await records.by_reference(job.tenant, job.reference)
                if other is not None:
                    stayed = SkippedJob(job.job_id, SkipReason.REFERENCE, job.reference, other.job_id)
                    self.moved.stayed.append(stayed)
                elif job.phase is Phase.LEASED:
                    self.moved.stayed.append(SkippedJob(job.job_id, SkipReason.LEASED))
                else:
                    self._count(job.phase)
                after = job.job_id
            self._on_progress(self.moved)
        self.moved.blocks = len(await self._source.blocks())
        self.moved.workflow_stats = len(await self._source.job_transfer.workflow_stats())
        async for collection, document in self._documents():
            self.moved.documents += await self._target.documents.get(collection, document.name) is None
        return self.moved

    async def _refuse_the_same_store(self) -> None:
        """Two addresses may lead to one store, where a move would delete the jobs."""
        until = await self._source.now() + _MARK_S
        mark = Block(WorkerId(f"store-move-{self._token}"), self._token, BlockReason.JOB, 1, until)
        await self._source.put_block(mark)
        found = await self._target.get_block(mark.pair)
        await self._source.lift([mark.pair])
        if found is not None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                "both addresses lead to the same store. Nothing was moved; name another target",
            )

    async def _await_leases(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + wait_s
        while leased := await self._leased_jobs():
            if loop.time() >= give_up_at:
                now = await self._source.now()
                leases = [each.lease for each in leased if each.lease is not None]
                workers = sorted({lease.worker_id for lease in leases})
                last_s = max((lease.expires_at for lease in leases), default=now) - now
                raise Refusal(
                    RefusalCode.WRONG_PHASE,
                    f"{len(leased)} jobs of the source are running ({_some(workers)}). Nothing was moved, and "
                    "the queue is as before. Wait until they end; without heartbeats their last lease expires in "
                    f"{max(last_s, 0):.0f} s",
                    leases=len(leased),
                )
            await asyncio.sleep(_POLL_S)

    async def _leased_jobs(self) -> list[Dispatch]:
        """The jobs under a live lease. Requeues jobs whose lease has expired."""
        if not (await self._source.counts()).by_phase[Phase.LEASED]:
            return []
        leased = []
        async for page in record_pages(self._source.records, None, Phase.LEASED, _PAGE):
            for job in page:
                dispatch = await self._source.load(job.job_id)
                if dispatch is None or dispatch.lease is None:
                    continue
                if dispatch.lease.expires_at > await self._source.now() or not await self._release(dispatch):
                    leased.append(dispatch)
        return leased

    async def _release(self, dispatch: Dispatch) -> bool:
        """Without a charge: the worker or a stopped store may be the cause."""
        now = await self._source.now()
        change, end = (
            requeued(dispatch, Phase.QUEUED, dispatch.not_before, now, Rules()),
            AttemptOutcome.RELEASED,
        )
        fact = FactDraft(FactKind.RELEASED, {"reason": "the lease expired before the move to another store"})
        if dispatch.stop is Stop.CANCEL:
            change, end, fact = cancelled(dispatch), AttemptOutcome.CANCELLED, FactDraft(FactKind.CANCELLED)
        elif dispatch.stop is Stop.PAUSE:
            end, fact = AttemptOutcome.CANCELLED, FactDraft(FactKind.PAUSED, fact.data)
        assert isinstance(change.phase, Phase)
        written = await self._source.write(
            Write(
                dispatch.job_id,
                AtRevision(dispatch.revision),
                change,
                attempt_end=AttemptEnd(end),
                facts=(fact,),
                job={"phase": change.phase},
            )
        )
        self.moved.released += written is not None
        return written is not None

    async def _move_workflow_stats(self) -> None:
        for stats in await self._source.job_transfer.workflow_stats():
            # The target's own statistics are newer.
            if await self._target.get_workflow_stats(stats.workflow_hash) is None:
                await self._target.put_workflow_stats(stats)
                self.moved.workflow_stats += 1

    async def _move_terms(self) -> None:
        known = {terms.tenant for terms in await self._target.fair_share.terms()}
        for terms in await self._source.fair_share.terms():
            if terms.tenant not in known:
                await self._target.fair_share.put_terms(terms)

    async def _move_blocks(self) -> None:
        for block in await self._source.blocks():
            if await self._target.get_block(block.pair) is None:
                await self._target.put_block(block)
                self.moved.blocks += 1

    async def _move_documents(self) -> None:
        """Documents such as API keys stay valid. The target keeps documents of the same name."""
        async for collection, document in self._documents():
            is_new = await self._target.documents.put(collection, document.name, document.body, version=0)
            self.moved.documents += is_new

    async def _documents(self) -> AsyncIterator[tuple[str, Document]]:
        documents = self._source.documents
        for collection in await documents.collections():
            async for document in documents_in(documents, collection, size=_PAGE):
                yield collection, document

    async def _move_jobs(self) -> None:
        after: JobId | None = None
        # Moved jobs leave the list, so a page starts after the last job that stays.
        while page := await self._page(after):
            found = [whole for job in page if (whole := await self._whole(job)) is not None]
            left = await self._take([each for each in found if each.dispatch.lease is None])
            for each in found:
                if each.dispatch.lease is not None:
                    # An engine saw the pause late, or somebody resumed the queue.
                    left[each.dispatch.job_id] = SkippedJob(each.dispatch.job_id, SkipReason.LEASED)
            for job in page:
                if job.job_id not in left:
                    continue
                stayed = left[job.job_id]
                if stayed is None:
                    # Try this job again, and all behind it.
                    break
                self.moved.stayed.append(stayed)
                after = job.job_id
            self._on_progress(self.moved)

    async def _page(self, after: JobId | None) -> list[Job]:
        return await self._source.records.listing(RecordQuery(limit=_PAGE, after=after))

    async def _whole(self, job: Job) -> JobSnapshot | None:
        """A change after this read raises the revision, which guards the deletion."""
        source, job_id = self._source, job.job_id
        dispatch = await source.load(job_id)
        record = await source.records.get(job_id)
        if dispatch is None or record is None:
            return None
        return JobSnapshot(
            dispatch, record, tuple(await source.facts(job_id)), tuple(await source.attempts(job_id))
        )

    async def _take(self, jobs: list[JobSnapshot]) -> dict[JobId, SkippedJob | None]:
        """Moves a page. Returns the jobs that stay, with the reason; None: try again."""
        imported = await self._import_jobs(jobs)
        answers: dict[JobId, SkippedJob | None] = {}
        taken: list[tuple[JobSnapshot, Dispatch]] = []
        for whole, there in zip(jobs, imported, strict=True):
            job_id = whole.job.job_id
            if there.job_id != job_id:
                answers[job_id] = SkippedJob(job_id, SkipReason.REFERENCE, whole.job.reference, there.job_id)
            elif await self._goes_on(whole, there):
                taken.append((whole, there))
            else:
                answers[job_id] = await self._take_back(whole, there)
        gone = await self._source.job_transfer.discard([whole.dispatch for whole, _ in taken])
        for (whole, there), is_gone in zip(taken, gone, strict=True):
            if is_gone:
                self._count(whole.dispatch.phase)
            else:
                # Somebody changed the job since it was read, so the copy must go.
                answers[whole.job.job_id] = await self._take_back(whole, there)
        return answers

    async def _goes_on(self, whole: JobSnapshot, there: Dispatch) -> bool:
        """Whether the target has this job as it is, or continued it after an earlier move."""
        if there == msgspec.structs.replace(whole.dispatch, sequence=there.sequence):
            # Every write raises the revision, so the rest is equal too.
            return True
        target, count = self._target, len(whole.facts)
        facts, job = await target.facts(there.job_id), await target.records.get(there.job_id)
        attempts = (await target.attempts(there.job_id))[: len(whole.attempts)]
        # Without a new fact the target's version is older: not every change here publishes one.
        has_gone_on = len(facts) > count and there.revision > whole.dispatch.revision
        return (
            has_gone_on
            and tuple(facts[:count]) == whole.facts
            and [_unmarked(each) for each in attempts] == [_unmarked(each) for each in whole.attempts]
            and job is not None
            and _asked(job) == _asked(whole.job)
        )

    async def _take_back(self, whole: JobSnapshot, there: Dispatch) -> SkippedJob | None:
        """Removes an outdated copy from the target. If it cannot, the job stays."""
        job_id = there.job_id
        self._tries[job_id] = self._tries.get(job_id, 0) + 1
        # With a history of its own at the target, it is no longer a copy.
        facts = tuple(await self._target.facts(job_id))
        is_copy = facts == whole.facts[: len(facts)] and (await self._target.job_transfer.discard([there]))[0]
        return None if is_copy and self._tries[job_id] < _TRIES else SkippedJob(job_id, SkipReason.CHANGED)

    async def _import_jobs(self, jobs: list[JobSnapshot]) -> list[Dispatch]:
        for _ in range(_TRIES):
            for whole in jobs:
                await self._prepare(whole.dispatch)
            imported = await self._target.job_transfer.import_jobs(jobs)
            if imported is not None:
                return imported
            # The target dropped an unused class.
            self._ready.clear()
        raise Fault("the target drops requirement classes too fast; try again when it is less busy")

    async def _prepare(self, dispatch: Dispatch) -> None:
        """Gives the target the job's classes and its tenant's service time."""
        if dispatch.tenant not in self._tenants:
            self._tenants.add(dispatch.tenant)
            served_s = (await self._source.fair_share.get(dispatch.tenant)).virtual_time
            served_there_s = (await self._target.fair_share.get(dispatch.tenant)).virtual_time
            if served_s > served_there_s:
                await self._target.fair_share.charge(dispatch.tenant, served_s - served_there_s)
        if dispatch.phase.is_final:
            return
        for key in (dispatch.class_key, dispatch.relaxed_class):
            if key is None or key in self._ready:
                continue
            if key not in self._classes:
                self._classes = dict((await self._source.table()).classes)
            await self._fleet.ensure_class(self._classes[key])
            self._ready.add(key)
            self.moved.classes += 1

    def _count(self, phase: Phase) -> None:
        self.moved.jobs += 1
        self.moved.by_phase[phase] = self.moved.by_phase.get(phase, 0) + 1


def _unmarked(attempt: Attempt) -> Attempt:
    """A late report is marked without any other change."""
    return msgspec.structs.replace(attempt, reported_late=False)


def _asked(job: Job) -> Submission:
    """A completed job drops its attachments."""
    return msgspec.structs.replace(job.payload, attachments=())


def _some(names: list[WorkerId]) -> str:
    shown = ", ".join(names[:3])
    return f"on {shown} and {len(names) - 3} more" if len(names) > 3 else f"on {shown}"
