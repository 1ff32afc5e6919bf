"""Random play on one engine: whatever callers, workers and the clock do, what was promised holds after every step."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests._examples import examples
from tests.engine._rig import Rig, graph

from comfyfleet.model.block import Pair
from comfyfleet.model.calls import LeasedJob, Release
from comfyfleet.model.dispatch import AttemptOutcome, Dispatch, LeaseOffer, Phase, Readiness, WriteResult
from comfyfleet.model.errors import Refusal
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.job import Timeouts
from comfyfleet.stores.memory import MemoryStore

FLEET = {"a": ("X",), "b": ("X", "Y"), "c": ("Y", "Z"), "d": ("X", "Y", "Z")}
FAILURES = [
    FailureKind.NODE_ERROR,
    FailureKind.DEAD_WORKER,
    FailureKind.MISSING_MODEL,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.INVALID_WORKFLOW,
]

workers = st.sampled_from(sorted(FLEET))
which = st.integers(0, 50)
steps = st.one_of(
    st.tuples(
        st.just("submit"),
        st.sampled_from("XYZ"),
        st.sampled_from([-5, 0, 0, 0, 7]),
        st.sampled_from(["", "", "", "delayed", "short", "due soon"]),
    ),
    st.tuples(st.just("park"), workers),
    st.tuples(st.just("park"), workers),
    st.tuples(st.just("hang up"), which),
    st.tuples(st.just("complete"), which),
    st.tuples(st.just("fail"), which, st.sampled_from(FAILURES)),
    st.tuples(st.just("release"), which),
    st.tuples(st.just("beat"), workers),
    st.tuples(st.just("cancel"), which),
    st.tuples(st.just("pause"), which),
    st.tuples(st.just("resume"), which),
    st.tuples(st.just("retry"), which),
    st.tuples(st.just("raise"), which, st.sampled_from([-1, 3])),
    st.tuples(st.just("leave"), workers),
    st.tuples(st.just("return"), workers),
    st.tuples(st.just("unblock"), which),
    st.tuples(st.just("advance"), st.sampled_from([0.3, 1.0, 5.0, 11.0, 31.0, 61.0])),
)


class Watchful(MemoryStore):
    """Refuses to grant what must never be granted."""

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        written = await super().lease(job_id, offer)
        if written is not None:
            for target in written.dispatch.block_targets:
                block = await self.get_block(Pair(offer.worker_id, target))
                assert block is None or not block.is_in_force(await self.now()), "a blocked pair was leased"
        return written


class Play:
    def __init__(self) -> None:
        self.rig = Rig(Watchful, max_failures_before_block=2, cooldown_s=20)
        self.jobs: dict[JobId, str] = {}
        self.parked: list[tuple[str, asyncio.Task[LeasedJob | None]]] = []
        self.held: list[LeasedJob] = []
        self.seen_leases: Counter[JobId] = Counter()

    async def run(self, play: list[tuple[Any, ...]]) -> None:
        async with self.rig:
            for name, kinds in FLEET.items():
                await self.rig.worker(name, *kinds, slots=2)
            for step in play:
                with contextlib.suppress(Refusal):
                    await self.take(step)
                # What is due at this very moment happens as well.
                await self.rig.clock.advance(0)
                self.gather()
                await self.check()
            for _, task in self.parked:
                task.cancel()
            await asyncio.gather(*(task for _, task in self.parked), return_exceptions=True)

    async def take(self, step: tuple[Any, ...]) -> None:
        rig, engine = self.rig, self.rig.engine
        match step:
            case ("submit", str() as kind, int() as priority, str() as how):
                now = rig.clock.now()
                kinds_of_wait: dict[str, dict[str, Any]] = {
                    "delayed": {"not_before": now + 7},
                    "short": {"timeouts": Timeouts(total_s=25)},
                    "due soon": {"deadline": now + 90, "on_deadline": "flag"},
                }
                options = kinds_of_wait.get(how, {})
                job_id = await rig.submit(graph(kind, seed=len(self.jobs)), priority=priority, **options)
                self.jobs[job_id] = kind
            case ("park", str() as name):
                self.parked.append((name, rig.park(name)))
            case ("hang up", int() as at) if self.parked:
                self.parked[at % len(self.parked)][1].cancel()
            case ("complete", int() as at) if self.held:
                await rig.complete(self.held[at % len(self.held)])
            case ("fail", int() as at, FailureKind() as kind) if self.held:
                await rig.fail(self.held[at % len(self.held)], kind)
            case ("release", int() as at) if self.held:
                await engine.release(Release(self.held[at % len(self.held)].ref))
            case ("beat", str() as name):
                mine = [leased.ref for leased in self.held if leased.worker_id == name]
                await engine.heartbeat(WorkerId(name), mine)
            case ("cancel" | "pause" | "resume" | "retry" as action, int() as at) if self.jobs:
                change: Callable[[JobId], Any] = getattr(engine, action)
                await change(self.job(at))
            case ("raise", int() as at, int() as priority) if self.jobs:
                await engine.set_priority(self.job(at), priority)
            case ("leave", str() as name):
                await engine.unregister(WorkerId(name), "gone")
            case ("return", str() as name):
                await rig.worker(name, *FLEET[name], slots=2)
            case ("unblock", int() as at):
                blocks = await engine.blocks()
                if blocks:
                    block = blocks[at % len(blocks)]
                    await engine.unblock(block.worker_id, block.target)
            case ("advance", float() as seconds):
                await rig.clock.advance(seconds)

    def job(self, at: int) -> JobId:
        return list(self.jobs)[at % len(self.jobs)]

    def gather(self) -> None:
        """Leases that polls were answered with; refused and cancelled polls are forgotten."""
        waiting = []
        for name, task in self.parked:
            if not task.done():
                waiting.append((name, task))
            elif not task.cancelled() and task.exception() is None and (leased := task.result()) is not None:
                self.held.append(leased)
        self.parked = waiting

    async def check(self) -> None:
        store = self.rig.store
        found = [await self.checked_job(job_id) for job_id in self.jobs]
        counts = await store.counts()
        phases = Counter(dispatch.phase for dispatch in found)
        assert counts.by_phase == {phase: phases[phase] for phase in Phase}
        standings = Counter(dispatch.standing for dispatch in found if dispatch.phase is Phase.QUEUED)
        recount = (standings[Readiness.IN_LANE], standings[Readiness.DELAYED], standings[Readiness.PAUSED])
        assert (counts.waiting, counts.delayed, counts.paused) == recount
        await self.check_no_slot_idles([dispatch for dispatch in found if dispatch.stands_in_lane])

    async def checked_job(self, job_id: JobId) -> Dispatch:
        store = self.rig.store
        dispatch, job = await store.load(job_id), await store.records.get(job_id)
        assert dispatch is not None
        assert job is not None
        assert job.phase is dispatch.phase
        assert (dispatch.lease is not None) is (dispatch.phase is Phase.LEASED)
        attempts = await store.attempts(job_id)
        running = [attempt for attempt in attempts if attempt.outcome is AttemptOutcome.RUNNING]
        assert len(running) == (dispatch.phase is Phase.LEASED)
        assert [attempt.lease_number for attempt in attempts] == list(range(1, dispatch.lease_number + 1))
        assert self.seen_leases[job_id] <= dispatch.lease_number
        self.seen_leases[job_id] = dispatch.lease_number
        facts = await store.facts(job_id)
        assert [fact.number for fact in facts] == list(range(1, len(facts) + 1))
        due_at = dispatch.due_at
        assert due_at is None or due_at > self.rig.clock.now(), "what was due has been attended to"
        return dispatch

    async def check_no_slot_idles(self, waiting: list[Dispatch]) -> None:
        now, store = self.rig.clock.now(), self.rig.store
        live = {
            worker.worker_id: worker for worker in await self.rig.engine.workers() if worker.takes_work(now)
        }
        for name in {name for name, _ in self.parked if name in live}:
            for dispatch in waiting:
                if self.jobs[dispatch.job_id] not in FLEET[name]:
                    continue
                blocks = [
                    await store.get_block(Pair(WorkerId(name), target)) for target in dispatch.block_targets
                ]
                is_blocked = any(block is not None and block.is_in_force(now) for block in blocks)
                assert is_blocked, f"{name} idles while {dispatch.job_id} waits"


def run(play: list[tuple[Any, ...]]) -> None:
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(Play().run(play))
    finally:
        loop.close()


@settings(
    max_examples=examples(250), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.lists(steps, min_size=20, max_size=60))
def test_whatever_happens_what_was_promised_holds_after_every_step(play: list[tuple[Any, ...]]) -> None:
    run(play)
