"""Plays the same random day on the memory store and on another store: all answers and the final state must be
equal.

Time, ids and tokens are arguments, so the two stores have no reason to differ.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comfyfleet.model.block import EVERY_WORKER, Block, BlockReason, Pair, tenant_target
from comfyfleet.model.dispatch import Change, Dispatch, LeaseOffer, LeaseRef, Phase, Readiness
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import LeaseToken, ProfileKey, WorkerId, WorkflowHash
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.model.worker import Capabilities, Service, WorkerDelta, WorkerRecord
from comfyfleet.model.workflow_stats import MeanDuration, WorkflowStats, WorkflowStatsDelta
from comfyfleet.ports import Peek
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.testing.contract.store_bench import (
    FAST,
    FOR_BOTH,
    FOR_FAST,
    QUEUED,
    SLOW,
    A,
    B,
    MakeStore,
    StoreBench,
    completion,
    failure,
    release,
    tenant,
)
from comfyfleet.testing.leases import lease_next

_WORKERS = st.sampled_from([(A, FAST), (B, SLOW), (B, FAST)])
_HASHES = st.sampled_from([WorkflowHash("one"), WorkflowHash("two")])
_BLOCKED_FOR = st.sampled_from([A, B, EVERY_WORKER])
_TARGETS = st.sampled_from(
    [
        *("one", "two"),
        *(tenant_target(WorkflowHash("one"), tenant(name)) for name in ("default", "ann", "bob")),
    ]
)
_WHICH = st.integers(0, 30)
_TENANTS = st.sampled_from(["default", "ann", "bob"])
_WARM = st.frozensets(st.sampled_from([FOR_FAST.key, FOR_BOTH.key]), max_size=2)
_USED = st.sampled_from([None, 0.0, 4.0, 45.0])

steps = st.one_of(
    st.tuples(
        st.just("enqueue"),
        st.sampled_from([FOR_FAST, FOR_BOTH]),
        _HASHES,
        st.sampled_from([-5, 0, 0, 0, 10]),
        _TENANTS,
        st.sampled_from([None, None, 5.0]),
        st.sampled_from([0, 700, 70_000, 5_000_000_000]),
        st.booleans(),
    ),
    st.tuples(st.just("enqueue_again"), _WHICH),
    st.tuples(st.just("lease_next"), _WORKERS),
    st.tuples(st.just("lease"), _WHICH, _WORKERS),
    st.tuples(st.just("peek"), _WORKERS, st.integers(1, 5), st.integers(0, 32), _WARM),
    st.tuples(st.just("heartbeat"), _WHICH),
    st.tuples(st.just("complete"), _WHICH, _USED),
    st.tuples(st.just("fail"), _WHICH, _WORKERS, st.sampled_from([None, 8.0])),
    st.tuples(st.just("requeue"), _WHICH, st.sampled_from([None, 3.0])),
    st.tuples(st.just("release"), _WHICH),
    st.tuples(st.just("stale"), _WHICH),
    st.tuples(st.just("cancel"), _WHICH),
    st.tuples(st.just("priority"), _WHICH, st.sampled_from([-1, 0, 7])),
    st.tuples(st.just("pause"), _WHICH, st.booleans()),
    st.tuples(st.just("retry"), _WHICH),
    st.tuples(st.just("settle"), st.integers(1, 3)),
    st.tuples(st.just("unsettled"), _WHICH, st.integers(1, 3)),
    st.tuples(st.just("block"), _BLOCKED_FOR, _TARGETS, st.sampled_from([None, 4.0, 20.0])),
    st.tuples(st.just("lift"), _BLOCKED_FOR, _TARGETS),
    st.tuples(st.just("keep_off"), _WORKERS, _WHICH, st.sampled_from([4.0])),
    st.tuples(st.just("expired_blocks")),
    st.tuples(st.just("due"), st.integers(1, 5), st.integers(1, 3)),
    st.tuples(st.just("charge"), _TENANTS, st.sampled_from([1.0, 40.0])),
    st.tuples(
        st.just("terms"),
        _TENANTS,
        st.sampled_from([0.5, 1.0, 3.0]),
        st.sampled_from([None, None, 0, 1, 2]),
        st.sampled_from([None, None, 3.0, 12.0]),
    ),
    st.tuples(st.just("no_terms"), _TENANTS),
    st.tuples(st.just("pause_queue"), st.booleans()),
    st.tuples(st.just("purge"), st.sampled_from([Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED])),
    st.tuples(st.just("workflow_stats"), _HASHES, st.sampled_from([0.0, 8.0])),
    st.tuples(
        st.just("learn"), _HASHES, st.sampled_from(["card", "other"]), st.sampled_from([0.1, 3.0, 70.7])
    ),
    st.tuples(st.just("learn_memory"), _HASHES, _TENANTS, st.sampled_from([8.0, 24.0])),
    st.tuples(st.just("worker"), st.booleans(), st.sampled_from([0.1, 2.5])),
    st.tuples(st.just("advance"), st.sampled_from([0.5, 3.0, 11.0, 61.0])),
)


class RandomDay:
    """One store's day. Its own answers decide its next steps, so they must equal those of the other store."""

    def __init__(self, make_store: MakeStore) -> None:
        self.bench = StoreBench(make_store)
        self.refs: list[LeaseRef] = []

    async def do(self, step: tuple[Any, ...]) -> Any:
        bench, store = self.bench, self.bench.store
        match step:
            case ("enqueue", cls, workflow_hash, priority, name, delay, size, has_tenant_database):
                now = bench.clock.now()
                later = {} if delay is None else {"standing": Readiness.DELAYED, "not_before": now + delay}
                wake = {} if delay is None else {"wake_at": now + delay}
                return await bench.enqueue(
                    cls,
                    workflow_hash=workflow_hash,
                    priority=priority,
                    tenant=tenant(name),
                    payload_bytes=size,
                    has_tenant_database=has_tenant_database,
                    **later,
                    **wake,
                )
            case ("enqueue_again", which):
                dispatch = await self._job(which)
                if dispatch is None:
                    return None
                first = msgspec.structs.replace(dispatch, phase=Phase.QUEUED, lease=None, revision=0)
                return await store.enqueue(first, bench.job(first), QUEUED)
            case ("lease_next", (worker, profile)):
                return self._note(await lease_next(store, self._offer(worker, profile)))
            case ("lease", which, (worker, profile)):
                dispatch = await self._job(which)
                offer = self._offer(worker, profile)
                return None if dispatch is None else self._note(await store.lease(dispatch.job_id, offer))
            case ("peek", (worker, profile), slots, lanes, warm):
                return await store.peek(Peek(profile, worker, slots, lanes, 30.0, warm=warm))
            case ("heartbeat", which):
                return [] if not self.refs else await store.heartbeat([self._ref(which)], 60.0)
            case ("complete", which, used_s):
                return None if not self.refs else await store.write(completion(self._ref(which), used_s))
            case ("fail", which, (worker, _), cooldown):
                if not self.refs:
                    return None
                until = None if cooldown is None else bench.clock.now() + cooldown
                block = Block(worker, "one", BlockReason.FAILURES, 1, until)
                return await store.write(failure(self._ref(which), blocks=(block,)))
            case ("requeue", which, delay):
                return None if not self.refs else await store.write(self._requeue(self._ref(which), delay))
            case ("release", which):
                return None if not self.refs else await store.write(release(self._ref(which)))
            case ("stale", which):
                if not self.refs:
                    return None
                forged = msgspec.structs.replace(self._ref(which), token=LeaseToken("forged"))
                await store.mark_late(self._ref(which))
                return await store.write(completion(forged)), await store.heartbeat([forged], 60.0)
            case ("cancel", which):
                dispatch = await self._job(which)
                if dispatch is None or dispatch.phase.is_final:
                    return None
                return await bench.cancel(dispatch)
            case ("priority", which, priority):
                dispatch = await self._waiting(which)
                if dispatch is None:
                    return None
                return await bench.change(dispatch, Change(priority=priority))
            case ("pause", which, is_paused):
                dispatch = await self._waiting(which)
                if dispatch is None:
                    return None
                standing = Readiness.PAUSED if is_paused else Readiness.IN_LANE
                return await bench.change(dispatch, Change(standing=standing, wake_at=None))
            case ("retry", which):
                dispatch = await self._job(which)
                if dispatch is None or dispatch.phase not in (Phase.FAILED, Phase.CANCELLED):
                    return None
                change = Change(
                    phase=Phase.QUEUED,
                    round=dispatch.round + 1,
                    standing=Readiness.IN_LANE,
                    settled_at=None,
                )
                return await bench.change(dispatch, change, job={"phase": Phase.QUEUED})
            case ("settle", count):
                settled = Change(settled_at=bench.clock.now())
                return [await bench.change(each, settled) for each in await store.unsettled(count)]
            case ("unsettled", which, limit):
                after = bench.jobs[which % len(bench.jobs)] if bench.jobs else None
                return await store.unsettled(limit, after), await store.load_many(bench.jobs[:limit])
            case ("block", worker, target, cooldown):
                until = None if cooldown is None else bench.clock.now() + cooldown
                await store.put_block(Block(worker, target, BlockReason.FAILURES, 1, until))
                return await store.get_block(Pair(worker, target))
            case ("keep_off", (worker, _), which, cooldown):
                dispatch = await self._job(which)
                if dispatch is not None:
                    until = bench.clock.now() + cooldown
                    await store.put_block(Block(worker, dispatch.job_id, BlockReason.JOB, 1, until))
                return None
            case ("lift", worker, target):
                return await store.lift([Pair(worker, target)])
            case ("expired_blocks",):
                expired = await store.expired_blocks()
                return sorted(expired, key=lambda block: (block.worker_id, block.target))
            case ("due", limit, pages):
                due: list[Dispatch] = []
                for _ in range(pages):
                    due += await store.due(limit, due[-1] if due else None)
                return due
            case ("charge", name, seconds):
                return await store.fair_share.charge(tenant(name), seconds)
            case ("terms", name, weight, max_leased, held_s):
                until = None if held_s is None else bench.clock.now() + held_s
                await store.fair_share.put_terms(TenantTerms(tenant(name), weight, max_leased, until))
                return await store.fair_share.terms(), await store.fair_share.next_hold_end()
            case ("no_terms", name):
                return await store.fair_share.remove_terms(tenant(name))
            case ("pause_queue", is_paused):
                return await store.pause_queue(is_paused)
            case ("purge", phase):
                return await store.purge(phase, bench.clock.now() - 5.0, 100)
            case ("workflow_stats", workflow_hash, memory):
                stats = WorkflowStats(workflow_hash, {"card": MeanDuration(memory + 1.0, 1)}, memory)
                await store.put_workflow_stats(stats)
                return await store.get_workflow_stats(workflow_hash)
            case ("learn", workflow_hash, worker_class, seconds):
                return await store.add_workflow_stats(
                    WorkflowStatsDelta(workflow_hash, worker_class, seconds, 0.2, 2)
                )
            case ("learn_memory", workflow_hash, name, gb):
                delta = WorkflowStatsDelta(workflow_hash, tenant=tenant(name), memory_gb=gb, most_tenants=2)
                return await store.add_workflow_stats(delta)
            case ("worker", is_paused, seconds):
                # Only of workers without a lease: a record names its profile.
                idle = WorkerRecord(WorkerId("idle"), Capabilities((Service("comfyui"),)), FAST, 1, 1.0, 1.0)
                known = await store.get_worker(idle.worker_id)
                if known is None:
                    await store.put_worker(idle)
                replaced = await store.replace_worker(
                    msgspec.structs.replace(known or idle, is_paused=is_paused)
                )
                run = WorkerDelta(completed=1, busy_s=seconds, seen_at=bench.clock.now())
                return replaced, await store.apply_worker_delta(idle.worker_id, run), await store.workers()
            case ("advance", seconds):
                return await bench.clock.advance(seconds)
        raise AssertionError(f"no such step: {step}")

    def _offer(self, worker: WorkerId, profile: ProfileKey) -> LeaseOffer:
        number = self.bench.new_number() % 3
        charge_s, run_s, load_s = ((1.0, 0.0, 0.0), (10.0, 2.5, 7.5), (30.0, 30.0, 0.1))[number]
        offer = self.bench.offer(worker, profile)
        return msgspec.structs.replace(offer, charge_s=charge_s, run_s=run_s, load_s=load_s)

    def _note(self, written: Any) -> Any:
        if written is not None:
            self.refs.append(written.dispatch.lease_ref())
        return written

    def _ref(self, which: int) -> LeaseRef:
        """The newest most often: old leases must be refused too, but a day of refusals shows little."""
        return self.refs[-1 - which % min(len(self.refs), 4)]

    async def _job(self, which: int) -> Dispatch | None:
        jobs = self.bench.jobs
        return await self.bench.store.load(jobs[which % len(jobs)]) if jobs else None

    async def _waiting(self, which: int) -> Dispatch | None:
        dispatch = await self._job(which)
        return dispatch if dispatch is not None and dispatch.phase is Phase.QUEUED else None

    def _requeue(self, ref: LeaseRef, delay: float | None) -> Any:
        until = None if delay is None else self.bench.clock.now() + delay
        back = Change(
            phase=Phase.QUEUED,
            lease=None,
            standing=Readiness.IN_LANE if delay is None else Readiness.DELAYED,
            not_before=until,
            wake_at=until,
            charged=1,
            server_deaths=1,
        )
        facts = (FactDraft(FactKind.RETRYING, {"kind": "node_error"}),)
        return msgspec.structs.replace(release(ref), change=back, facts=facts)


async def play(make_store: MakeStore, day: list[tuple[Any, ...]]) -> None:
    reference, other = RandomDay(MemoryStore), RandomDay(make_store)
    await reference.bench.open()
    await other.bench.open()
    try:
        for number, step in enumerate(day):
            expected, answer = await reference.do(step), await other.do(step)
            assert answer == expected, f"step {number}, {step}: {answer} instead of {expected}"
        assert await other.bench.state() == await reference.bench.state()
    finally:
        await other.bench.store.close()
        await reference.bench.store.close()


class DifferentialContract:
    shortest_day = 60
    """Shorter days seldom reach a state in which two stores differ."""
    longest_day = 100

    @settings(
        # A day is long: sixty of each hundred examples that the profile asks for.
        max_examples=max(1, settings().max_examples * 60 // 100),
        deadline=None,
        suppress_health_check=[
            # Every example makes its own stores, and every store's test class plays these days.
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ],
    )
    @given(data=st.data())
    def test_the_same_day_goes_as_on_the_memory_store(
        self, make_store: MakeStore, data: st.DataObject
    ) -> None:
        days = st.lists(steps, min_size=self.shortest_day, max_size=self.longest_day)
        day = data.draw(days, label="day")
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(play(make_store, day))
        finally:
            loop.close()
