"""Moves everything from one store to another: jobs with their history, blocks, lessons, documents, classes.

A job is let go at the source only after the target has answered that it has it. A move that was interrupted is simply
begun again: a job that is at the target already is known there by its id. What can be said of a class, the target's
own workers decide, so this is an engine's work and not a store's.
"""

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
from comfyfleet.policy.lifecycle import cancelled
from comfyfleet.policy.rules import Rules
from comfyfleet.policy.timers import returned
from comfyfleet.ports import Document, TransferableStore

_PAGE = 20
"""Payloads may be large, and a page of them is in memory, and in one step of the target, at once."""
_TRIES = 3
_LOOK_EVERY_S = 0.2
_MARK_S = 60.0


class SkipReason(StrEnum):
    """Why a job stays at the source."""

    REFERENCE = "reference"
    """The target has another job of the same tenant under its reference."""
    CHANGED = "changed"
    """Both sides have gone on with it: an engine works on the source, and the target has leased it already."""
    LEASED = "leased"


class SkippedJob(msgspec.Struct, frozen=True):
    job_id: JobId
    why: SkipReason
    reference: str | None = None
    other_job_id: JobId | None = None


class MoveProgress(msgspec.Struct):
    """What was done so far. In a trial: what would be."""

    jobs: int = 0
    by_phase: dict[Phase, int] = msgspec.field(default_factory=dict)
    stayed: list[SkippedJob] = msgspec.field(default_factory=list)
    blocks: int = 0
    workflow_stats: int = 0
    documents: int = 0
    classes: int = 0
    released: int = 0
    """Leases that had run out and were nobody's any more."""


class StoreMove:
    def __init__(
        self,
        source: TransferableStore,
        target: TransferableStore,
        *,
        token: str,
        rules: Rules | None = None,
        tell: Callable[[MoveProgress], None] = lambda _: None,
    ) -> None:
        self._source = source
        self._target = target
        self._token = token
        """Random text, different in each move."""
        self._rules = rules or Rules()
        self._tell = tell
        self._fleet = Fleet(target, SystemClock())
        self._classes: dict[ClassKey, RequirementClass] = {}
        self._ready: set[ClassKey] = set()
        self._tenants: set[TenantId] = set()
        self._tries: dict[JobId, int] = {}
        self.moved = MoveProgress()

    # the whole of it

    async def run(self, wait_s: float = 0.0) -> MoveProgress:
        """The source is paused from here on and stays so: what may be left there waits until somebody has looked."""
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

    async def rehearse(self) -> MoveProgress:
        """What a move would do now; nothing is changed."""
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
            self._tell(self.moved)
        self.moved.blocks = len(await self._source.blocks())
        self.moved.workflow_stats = len(await self._source.moving.workflow_stats())
        async for collection, document in self._documents():
            self.moved.documents += await self._target.documents.get(collection, document.name) is None
        return self.moved

    # before anything moves

    async def _refuse_the_same_store(self) -> None:
        """Two addresses may lead to one store, and a job that is let go there is gone: a mark on one side tells."""
        until = await self._source.now() + _MARK_S
        mark = Block(WorkerId(f"store-move-{self._token}"), self._token, BlockReason.JOB, 1, until)
        await self._source.put_block(mark)
        found = await self._target.get_block(mark.pair)
        await self._source.lift([mark.pair])
        if found is not None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                "both addresses lead to the same store; nothing was moved. Name another target",
            )

    async def _await_leases(self, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + wait_s
        while held := await self._held():
            if loop.time() >= give_up_at:
                now = await self._source.now()
                leases = [each.lease for each in held if each.lease is not None]
                workers = sorted({lease.worker_id for lease in leases})
                last_s = max((lease.expires_at for lease in leases), default=now) - now
                raise Refusal(
                    RefusalCode.WRONG_PHASE,
                    f"{len(held)} of its jobs run ({_some(workers)}); nothing was moved and the queue is as it was. "
                    "Let them end, or wait for them: without a sign of life the last of their leases runs out in "
                    f"{max(last_s, 0):.0f} s",
                    leases=len(held),
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _held(self) -> list[Dispatch]:
        """The dispatches under a lease that still runs. Where a lease has run out, the job waits again."""
        if not (await self._source.counts()).by_phase[Phase.LEASED]:
            return []
        held, after = [], None
        records = self._source.records
        while page := await records.listing(tenant=None, phase=Phase.LEASED, limit=_PAGE, after=after):
            after = page[-1].job_id
            for job in page:
                dispatch = await self._source.load(job.job_id)
                if dispatch is None or dispatch.lease is None:
                    continue
                if dispatch.lease.expires_at > await self._source.now() or not await self._release(dispatch):
                    held.append(dispatch)
        return held

    async def _release(self, dispatch: Dispatch) -> bool:
        """Uncharged: who let it run out, the worker or a store that stood still, cannot be told any more."""
        now = await self._source.now()
        change, end = (
            returned(dispatch, Phase.QUEUED, dispatch.not_before, now, self._rules),
            AttemptOutcome.RELEASED,
        )
        fact = FactDraft(FactKind.RELEASED, {"reason": "the lease ran out before the move to another store"})
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

    # what belongs to no job

    async def _move_workflow_stats(self) -> None:
        for stats in await self._source.moving.workflow_stats():
            # What the target has learned itself is newer than what it is told.
            if await self._target.get_workflow_stats(stats.workflow_hash) is None:
                await self._target.put_workflow_stats(stats)
                self.moved.workflow_stats += 1

    async def _move_terms(self) -> None:
        known = {terms.tenant for terms in await self._target.shares.terms()}
        for terms in await self._source.shares.terms():
            if terms.tenant not in known:
                await self._target.shares.put_terms(terms)

    async def _move_blocks(self) -> None:
        for block in await self._source.blocks():
            if await self._target.get_block(block.pair) is None:
                await self._target.put_block(block)
                self.moved.blocks += 1

    async def _move_documents(self) -> None:
        """Keys and the like: whoever has one opens the same doors at the target. What has the name there stays."""
        async for collection, document in self._documents():
            is_new = await self._target.documents.put(collection, document.name, document.body, version=0)
            self.moved.documents += is_new

    async def _documents(self) -> AsyncIterator[tuple[str, Document]]:
        documents = self._source.documents
        for collection in await documents.collections():
            after = ""
            while page := await documents.listing(collection, after, _PAGE):
                for document in page:
                    yield collection, document
                after = page[-1].name

    # jobs

    async def _move_jobs(self) -> None:
        after: JobId | None = None
        # What has moved is no longer listed, so a page goes on behind the last job that stays.
        while page := await self._page(after):
            found = [whole for job in page if (whole := await self._whole(job)) is not None]
            left = await self._take([each for each in found if each.dispatch.lease is None])
            for each in found:
                if each.dispatch.lease is not None:
                    # An engine whose view is older than the pause, or a paused queue that somebody started again.
                    left[each.dispatch.job_id] = SkippedJob(each.dispatch.job_id, SkipReason.LEASED)
            for job in page:
                if job.job_id not in left:
                    continue
                stayed = left[job.job_id]
                if stayed is None:
                    # It is tried again, and with it all that stands behind it.
                    break
                self.moved.stayed.append(stayed)
                after = job.job_id
            self._tell(self.moved)

    async def _page(self, after: JobId | None) -> list[Job]:
        return await self._source.records.listing(tenant=None, phase=None, limit=_PAGE, after=after)

    async def _whole(self, job: Job) -> JobSnapshot | None:
        """Read twice: whoever changes it in between changes its revision, which guards its end here."""
        source, job_id = self._source, job.job_id
        dispatch = await source.load(job_id)
        record = await source.records.get(job_id)
        if dispatch is None or record is None:
            return None
        return JobSnapshot(
            dispatch, record, tuple(await source.facts(job_id)), tuple(await source.attempts(job_id))
        )

    async def _take(self, jobs: list[JobSnapshot]) -> dict[JobId, SkippedJob | None]:
        """Moves a page. Answers those that are still at the source, and why they stay; None: to be tried again."""
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
        gone = await self._source.moving.discard([whole.dispatch for whole, _ in taken])
        for (whole, there), is_gone in zip(taken, gone, strict=True):
            if is_gone:
                self._count(whole.dispatch.phase)
            else:
                # Somebody has changed it here since it was read: the copy must not go on beside it.
                answers[whole.job.job_id] = await self._take_back(whole, there)
        return answers

    async def _goes_on(self, whole: JobSnapshot, there: Dispatch) -> bool:
        """Whether the target has the job as it is here, or as it went on from here after an earlier move."""
        if there == msgspec.structs.replace(whole.dispatch, sequence=there.sequence):
            # Whatever is written of a job raises its revision: the rest of it is the same, too.
            return True
        target, count = self._target, len(whole.facts)
        facts, job = await target.facts(there.job_id), await target.records.get(there.job_id)
        attempts = (await target.attempts(there.job_id))[: len(whole.attempts)]
        # Without a fact of its own, what differs there is older: not every change here is told in one.
        has_gone_on = len(facts) > count and there.revision > whole.dispatch.revision
        return (
            has_gone_on
            and tuple(facts[:count]) == whole.facts
            and [_unmarked(each) for each in attempts] == [_unmarked(each) for each in whole.attempts]
            and job is not None
            and _asked(job) == _asked(whole.job)
        )

    async def _take_back(self, whole: JobSnapshot, there: Dispatch) -> SkippedJob | None:
        """Removes a copy that is older than the job here. If it cannot be, the job stays."""
        job_id = there.job_id
        self._tries[job_id] = self._tries.get(job_id, 0) + 1
        # What has a history of its own at the target is no copy any more.
        facts = tuple(await self._target.facts(job_id))
        is_copy = facts == whole.facts[: len(facts)] and (await self._target.moving.discard([there]))[0]
        return None if is_copy and self._tries[job_id] < _TRIES else SkippedJob(job_id, SkipReason.CHANGED)

    async def _import_jobs(self, jobs: list[JobSnapshot]) -> list[Dispatch]:
        for _ in range(_TRIES):
            for whole in jobs:
                await self._prepare(whole.dispatch)
            imported = await self._target.moving.import_jobs(jobs)
            if imported is not None:
                return imported
            # A class that nobody used any more was dropped from the table to make room.
            self._ready.clear()
        raise Fault(
            "the target drops classes as fast as they are put into its table; try again when it is less busy"
        )

    async def _prepare(self, dispatch: Dispatch) -> None:
        """The target knows the classes of the job, and how much its tenant has been served."""
        if dispatch.tenant not in self._tenants:
            self._tenants.add(dispatch.tenant)
            served_s = (await self._source.shares.of(dispatch.tenant)).virtual_time
            served_there_s = (await self._target.shares.of(dispatch.tenant)).virtual_time
            if served_s > served_there_s:
                await self._target.shares.charge(dispatch.tenant, served_s - served_there_s)
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
    """A report that came too late is noted without any other change."""
    return msgspec.structs.replace(attempt, reported_late=False)


def _asked(job: Job) -> Submission:
    """What was attached to a completed job is not kept."""
    return msgspec.structs.replace(job.payload, attachments=())


def _some(names: list[WorkerId]) -> str:
    shown = ", ".join(names[:3])
    return f"on {shown} and {len(names) - 3} more" if len(names) > 3 else f"on {shown}"
