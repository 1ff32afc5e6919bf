"""A store with a manual clock, one class that fits one profile, and short methods for tests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from comfyfleet.model.dispatch import (
    AtRevision,
    AttemptEnd,
    AttemptOutcome,
    Candidate,
    Change,
    Dispatch,
    HeldBy,
    LeaseOffer,
    LeaseRef,
    Phase,
    Write,
    WriteResult,
)
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import (
    ClassKey,
    JobId,
    LeaseToken,
    PollId,
    ProfileKey,
    TenantId,
    WorkerId,
    WorkflowHash,
)
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.policy.lifecycle import cancelled, completed
from comfyfleet.ports import Clock, Peek, RecordQuery, Store
from comfyfleet.testing.leases import lease_next
from comfyfleet.testing.time import ManualClock

MakeStore = Callable[[Clock], Store]

FAST, SLOW = ProfileKey("fast"), ProfileKey("slow")
A, B = WorkerId("a"), WorkerId("b")
FOR_FAST = RequirementClass(Requirements(models=("fast.safetensors",)))
FOR_BOTH = RequirementClass(Requirements(models=("both.safetensors",)))
HASH = WorkflowHash("hash")
QUEUED = (FactDraft(FactKind.QUEUED),)


class StoreBench:
    def __init__(self, make_store: MakeStore) -> None:
        self.clock = ManualClock()
        self.store = make_store(self.clock)
        self.jobs: list[JobId] = []
        self.polls: list[PollId] = []
        self._numbers = itertools.count(1)

    async def open(self) -> None:
        """Profile `fast` takes both classes, `slow` only one."""
        await self.store.open()
        for profile in (FAST, SLOW):
            assert await self.store.put_profile(profile, [], version=(await self.store.table()).version)
        for cls, fits in ((FOR_FAST, [FAST]), (FOR_BOTH, [FAST, SLOW])):
            assert await self.store.put_class(cls, fits, version=(await self.store.table()).version)

    async def enqueue(
        self, cls: RequirementClass = FOR_BOTH, *, reference: str | None = None, **fields: Any
    ) -> Dispatch:
        job_id = JobId(f"job-{self.new_number():04d}")
        fields = {"workflow_hash": HASH, "priority": 0, "queued_at": self.clock.now(), **fields}
        dispatch = Dispatch(job_id=job_id, class_key=cls.key, **fields)
        written = await self.store.enqueue(dispatch, self.job(dispatch, reference), QUEUED)
        assert written is not None
        self.jobs.append(job_id)
        return written.dispatch

    def job(self, dispatch: Dispatch, reference: str | None = None) -> Job:
        """The record that belongs to the dispatch."""
        return Job(
            dispatch.job_id,
            dispatch.tenant,
            dispatch.workflow_hash,
            dispatch.queued_at,
            Submission({}, reference=reference),
            reference=reference,
            round=dispatch.round,
            phase=dispatch.phase,
        )

    def new_number(self) -> int:
        return next(self._numbers)

    def offer(self, worker: WorkerId = A, profile: ProfileKey = FAST, poll: str | None = None) -> LeaseOffer:
        number = self.new_number()
        poll_id = PollId(poll or f"poll-{number}")
        self.polls.append(poll_id)
        return LeaseOffer(worker, profile, poll_id, LeaseToken(f"token-{number}"), 60.0, 10.0)

    async def lease_next(self, worker: WorkerId = A, profile: ProfileKey = FAST) -> Dispatch | None:
        written = await lease_next(self.store, self.offer(worker, profile))
        return None if written is None else written.dispatch

    async def leased(self, **fields: Any) -> tuple[Dispatch, LeaseRef]:
        dispatch = await self.enqueue(**fields)
        written = await self.store.lease(dispatch.job_id, self.offer())
        assert written is not None
        return written.dispatch, written.dispatch.lease_ref()

    async def peek(
        self,
        worker: WorkerId = A,
        profile: ProfileKey = FAST,
        slots: int = 10,
        skip: frozenset[str] = frozenset(),
    ) -> list[JobId]:
        return [each.job_id for each in await self.candidates(worker, profile, slots, skip)]

    async def candidates(
        self, worker: WorkerId, profile: ProfileKey, slots: int, skip: frozenset[str] = frozenset()
    ) -> list[Candidate]:
        return await self.store.peek(Peek(profile, worker, slots, 32, 30.0, skip))

    async def change(self, dispatch: Dispatch, change: Change, **more: Any) -> WriteResult | None:
        return await self.store.write(Write(dispatch.job_id, AtRevision(dispatch.revision), change, **more))

    async def cancel(self, dispatch: Dispatch) -> WriteResult | None:
        end = None if dispatch.lease is None else AttemptEnd(AttemptOutcome.CANCELLED)
        return await self.change(
            dispatch,
            cancelled(dispatch),
            attempt_end=end,
            facts=(FactDraft(FactKind.CANCELLED),),
            job={"phase": Phase.CANCELLED},
        )

    async def state(self) -> dict[str, Any]:
        """Everything that the store can be asked for."""
        store = self.store
        table = await store.table()
        return {
            "table": (table.version, dict(table.classes), table.profiles),
            "counts": await store.counts(),
            "workers": await store.workers(),
            "blocks": await store.blocks(),
            "due": (await store.next_due(), await store.next_block_end()),
            "paused": await store.is_queue_paused(),
            "shares": [await store.fair_share.get(TenantId(name)) for name in ("default", "ann", "bob")],
            "terms": (await store.fair_share.terms(), await store.fair_share.next_hold_end()),
            "dead": await store.dead_letter(1000),
            "unsettled": await store.unsettled(1000),
            "polls": [await store.leased_by_poll(poll) for poll in self.polls],
            "leases": [await store.leases_of(worker) for worker in (A, B)],
            "peeks": [await self.peek(worker, profile) for worker in (A, B) for profile in (FAST, SLOW)],
            "lanes": sorted(await store.waiting_lanes(1000), key=lambda each: each.lane),
            "listing": await store.records.listing(RecordQuery(limit=1000)),
            "jobs": [
                (
                    await store.load(job_id),
                    await store.records.get(job_id),
                    await store.facts(job_id),
                    await store.attempts(job_id),
                    await store.position(job_id),
                )
                for job_id in self.jobs
            ],
        }


class UsesBench:
    @pytest.fixture
    async def bench(self, make_store: MakeStore) -> AsyncIterator[StoreBench]:
        bench = StoreBench(make_store)
        await bench.open()
        yield bench
        await bench.store.close()


def completion(ref: LeaseRef, used_s: float | None = None, **more: Any) -> Write:
    return Write(
        ref.job_id,
        HeldBy(ref),
        completed(),
        attempt_end=AttemptEnd(AttemptOutcome.COMPLETED, used_s=used_s),
        facts=(FactDraft(FactKind.COMPLETED),),
        job={"phase": Phase.COMPLETED, "result": JobResult()},
        **more,
    )


def release(ref: LeaseRef) -> Write:
    return Write(
        ref.job_id,
        HeldBy(ref),
        Change(phase=Phase.QUEUED, lease=None),
        attempt_end=AttemptEnd(AttemptOutcome.RELEASED),
        facts=(FactDraft(FactKind.RELEASED),),
        job={"phase": Phase.QUEUED},
    )


def failure(ref: LeaseRef, **more: Any) -> Write:
    return Write(
        ref.job_id,
        HeldBy(ref),
        Change(phase=Phase.FAILED, lease=None, wake_at=None),
        attempt_end=AttemptEnd(AttemptOutcome.FAILED),
        facts=(FactDraft(FactKind.FAILED),),
        job={"phase": Phase.FAILED},
        **more,
    )


def unknown_class() -> ClassKey:
    return RequirementClass(Requirements(models=("never seen",))).key


def tenant(name: str) -> TenantId:
    return TenantId(name)
