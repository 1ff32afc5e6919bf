"""A store with waiting jobs, held at one size while leases are timed. It stands for no engine: values come straight
from here, so that what is timed is the store alone. Where the store lives and how time is taken is its place's."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from comfyfleet.engine.system import SystemClock, SystemRandom
from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.dispatch import (
    AttemptEnd,
    AttemptOutcome,
    Dispatch,
    HeldBy,
    LaneKey,
    LeaseOffer,
    Phase,
    Write,
    WriteResult,
)
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import (
    DEFAULT_TENANT,
    ClassKey,
    LeaseToken,
    PollId,
    ProfileKey,
    TenantId,
    WorkerId,
    WorkflowHash,
)
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.policy.lifecycle import completed
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Peek, Store
from comfyfleet.testing.leases import lease_next

PROFILE = ProfileKey("profile")
WORKER = WorkerId("worker")
_QUEUED = (FactDraft(FactKind.QUEUED),)

Taker = tuple[WorkerId, ProfileKey]


class StoreRig:
    """`spent_s` reads how much time of the kind that counts the store has used so far; `at_once` is how many calls are
    under way together where nothing is timed; `copy` multiplies waiting jobs where enqueueing them takes too long."""

    def __init__(
        self,
        store: Store,
        spent_s: Callable[[], float],
        at_once: int = 1,
        copy: Callable[[Sequence[tuple[str, int]], int], None] | None = None,
    ) -> None:
        self.clock = SystemClock()
        self.store = store
        self.spent_s = spent_s
        self._at_once = at_once
        self._copy = copy
        self._version = 0
        self._rules = Rules()
        self._chance = SystemRandom()
        self._payload = Submission({})
        self._polls = itertools.count(1)

    # what is there

    async def add_profiles(self, *profiles: ProfileKey) -> None:
        for profile in profiles:
            self._version = (await self.store.table()).version
            assert await self.store.put_profile(profile, [], version=self._version)

    async def add_class(self, name: str, fits: Iterable[ProfileKey] = (PROFILE,)) -> ClassKey:
        cls = RequirementClass(Requirements(node_classes=(name,)))
        # Each add makes the version one higher. Reading the whole table for each of 10,000 classes takes minutes.
        self._version += 1
        if not await self.store.put_class(cls, list(fits), version=self._version):
            self._version = (await self.store.table()).version
            assert await self.store.put_class(cls, list(fits), version=self._version)
        return cls.key

    async def block(self, workflow_hash: WorkflowHash) -> None:
        until = self.clock.now() + 3600
        await self.store.put_block(Block(WORKER, workflow_hash, BlockReason.OPERATOR, 1, until))

    def job(self, lane: LaneKey) -> tuple[Dispatch, Job]:
        now = self.clock.now()
        job_id = self._chance.job_id(now)
        dispatch = Dispatch(
            job_id, lane.class_key, lane.workflow_hash, lane.priority, tenant=lane.tenant, queued_at=now
        )
        return dispatch, Job(job_id, lane.tenant, lane.workflow_hash, now, self._payload)

    async def enqueue(self, lane: LaneKey) -> WriteResult:
        written = await self.store.enqueue(*self.job(lane), _QUEUED)
        assert written is not None, "the lane's class was added before"
        return written

    async def fill(self, lanes: Sequence[LaneKey], jobs: int) -> None:
        """So many jobs, one lane after the other in turn."""
        copies = max(jobs // len(lanes) - 1, 0) if self._copy is not None else 0
        arriving = itertools.islice(itertools.cycle(lanes), jobs - copies * len(lanes))
        first: list[tuple[str, int]] = []
        while some := tuple(itertools.islice(arriving, self._at_once)):
            arrived = await asyncio.gather(*map(self.enqueue, some))
            first += [(each.dispatch.job_id, each.dispatch.sequence) for each in arrived]
        if self._copy is not None and copies:
            waiting = (await self.store.counts()).waiting
            self._copy(first[: len(lanes)], copies)
            added = (await self.store.counts()).waiting - waiting
            assert added == copies * len(lanes), f"{added} copies wait, not {copies * len(lanes)}"

    # leasing

    def offer(self, taker: Taker = (WORKER, PROFILE)) -> LeaseOffer:
        poll_id = PollId(f"poll-{next(self._polls)}")
        token = LeaseToken(self._chance.token())
        return LeaseOffer(*taker, poll_id, token, self._rules.lease_ttl_s, self._rules.acknowledge_s)

    async def finish(self, written: WriteResult) -> None:
        dispatch = written.dispatch
        end = AttemptEnd(AttemptOutcome.COMPLETED)
        write = Write(dispatch.job_id, HeldBy(dispatch.lease_ref()), completed(), end)
        assert await self.store.write(write) is not None

    async def lease_next(self, offer: LeaseOffer) -> WriteResult | None:
        """The first job alone, without a window to rank."""
        return await lease_next(self.store, offer)

    async def peek_and_lease(self, offer: LeaseOffer) -> WriteResult | None:
        """As an engine does it for one idle slot: it looks at a window, ranks, and leases what it has chosen."""
        rules = self._rules
        found = await self.store.peek(Peek(PROFILE, WORKER, 1, rules.window_lanes, rules.quantum_s))
        return await self.store.lease(found[0].job_id, offer) if found else None

    async def seconds_a_lease(
        self,
        *,
        as_engine: bool = False,
        batches: int,
        charges: dict[TenantId, float] | None = None,
        takers: Iterator[Taker] | None = None,
    ) -> tuple[float, float]:
        """Seconds of one lease: of the kind that counts, and on the wall. After each batch the leased jobs end, are
        forgotten, and equal ones arrive, so that the same number waits in the same lanes; that part is not timed.
        `takers`: the workers that lease in turn, with their profiles; one worker unless given."""
        lease = self.peek_and_lease if as_engine else self.lease_next
        charge = self.store.fair_share.charge
        spent = on_the_wall = 0.0
        for _ in range(batches):
            turn = [(WORKER, PROFILE)] * _BATCH if takers is None else itertools.islice(takers, _BATCH)
            offers = [self.offer(taker) for taker in turn]
            leased: list[WriteResult] = []
            started, began = self.spent_s(), time.perf_counter()
            for offer in offers:
                written = await lease(offer)
                assert written is not None, "something waits"
                leased.append(written)
                if charges is not None:
                    tenant = written.dispatch.tenant
                    await charge(tenant, charges.get(tenant, 1.0))
            on_the_wall += time.perf_counter() - began
            spent += self.spent_s() - started
            await asyncio.gather(*map(self._replace, leased))
            await self.store.purge(Phase.COMPLETED, self.clock.now() + 1, len(leased))
        return spent / (batches * _BATCH), on_the_wall / (batches * _BATCH)

    async def _replace(self, written: WriteResult) -> None:
        await self.finish(written)
        await self.enqueue(written.dispatch.lane)


# Small beside the smallest backlog, large beside the cost of reading the clock.
_BATCH = 20


def lane(
    class_key: ClassKey, workflow: str = "workflow", tenant: TenantId = DEFAULT_TENANT, priority: int = 0
) -> LaneKey:
    return LaneKey(class_key, tenant, priority, WorkflowHash(workflow))
