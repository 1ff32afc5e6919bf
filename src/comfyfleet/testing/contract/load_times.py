"""The store contract for scheduling by load times: places, lengths of lanes, warm lanes, expected seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.dispatch import Candidate, Change, Dispatch, LaneKey, Phase, Readiness
from comfyfleet.model.ids import ClassKey, JobId, WorkflowHash
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.ports import Peek
from comfyfleet.testing.contract.store_bench import (
    FAST,
    FOR_BOTH,
    FOR_FAST,
    HASH,
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
    unknown_class,
)

_LANES = 32
_WARM = frozenset({FOR_FAST.key})


async def _seen(bench: StoreBench, **asked: Any) -> list[Candidate]:
    query = {"profile": FAST, "worker_id": A, "slots": 1, "lanes": _LANES, "quantum_s": 30.0, **asked}
    return await bench.store.peek(Peek(**query))


async def _ids(bench: StoreBench, **asked: Any) -> list[JobId]:
    return [each.job_id for each in await _seen(bench, **asked)]


async def _cold_lanes(bench: StoreBench, count: int, **fields: Any) -> list[JobId]:
    """Jobs of a class that is not warm, each in its own lane."""
    return [
        (await bench.enqueue(workflow_hash=WorkflowHash(f"cold-{number}"), **fields)).job_id
        for number in range(count)
    ]


class LoadTimesContract:
    # place

    async def test_a_place_counts_the_waiting_jobs_of_the_same_or_a_higher_priority(
        self, bench: StoreBench
    ) -> None:
        low, middle = await bench.enqueue(priority=-1000), await bench.enqueue()
        high, other = await bench.enqueue(FOR_FAST, priority=1000), await bench.enqueue(tenant=tenant("ann"))
        last = await bench.enqueue(priority=-1000)
        jobs = (low, middle, high, other, last)
        assert [each.place for each in jobs] == [0, 0, 0, 2, 4]
        assert await bench.store.load_many([each.job_id for each in jobs]) == list(jobs)
        assert {each.job_id: each.place for each in await _seen(bench, slots=10)} == {
            each.job_id: each.place for each in jobs
        }

    async def test_a_place_includes_the_value_with_which_the_job_came(self, bench: StoreBench) -> None:
        first, second = await bench.enqueue(place=1), await bench.enqueue(place=1)
        assert (first.place, second.place) == (1, 2)
        assert [each.place for each in await _seen(bench, slots=2)] == [1, 2]

    async def test_a_job_in_no_lane_has_a_place_and_is_before_nobody(self, bench: StoreBench) -> None:
        await bench.enqueue()
        held = [
            await bench.enqueue(standing=standing, place=1)
            for standing in (Readiness.PAUSED, Readiness.DELAYED)
        ]
        _, _ = await bench.leased()
        assert [each.place for each in (*held, await bench.enqueue())] == [2, 2, 1]

    async def test_the_place_of_the_first_enqueue_stays(self, bench: StoreBench) -> None:
        await bench.enqueue()
        job = await bench.enqueue()
        again = await bench.store.enqueue(msgspec.structs.replace(job, place=7), bench.job(job), QUEUED)
        assert again is not None and again.dispatch == job
        taken = await bench.store.lease(job.job_id, bench.offer())
        assert taken is not None and taken.dispatch.place == 1
        await bench.enqueue()
        written = await bench.store.write(release(taken.dispatch.lease_ref()))
        for change in (
            Change(standing=Readiness.PAUSED),
            Change(standing=Readiness.IN_LANE),
            Change(priority=900),
            Change(phase=Phase.CANCELLED),
            Change(phase=Phase.QUEUED, round=2),
        ):
            assert written is not None and written.dispatch.place == 1
            written = await bench.change(written.dispatch, change)
        assert written is not None and await bench.store.load(job.job_id) == written.dispatch
        assert written.dispatch.place == 1

    async def test_a_place_follows_every_way_into_a_lane_and_out_of_it(self, bench: StoreBench) -> None:
        async def ahead(priority: int = 0) -> int:
            """How many jobs a job of this priority finds ahead. It is in no lane, so it does not count itself."""
            return (await bench.enqueue(priority=priority, standing=Readiness.PAUSED)).place

        assert await ahead() == 0
        one, two, three = [await bench.enqueue() for _ in range(3)]
        assert await ahead() == 3
        taken = await bench.store.lease(one.job_id, bench.offer())
        assert taken is not None
        assert await ahead() == 2
        back = await bench.store.write(release(taken.dispatch.lease_ref()))
        assert back is not None
        assert await ahead() == 3
        raised = await bench.change(two, Change(priority=5))
        assert raised is not None
        assert (await ahead(), await ahead(5), await ahead(6)) == (3, 1, 0)
        moved = await bench.change(raised.dispatch, Change(class_key=FOR_FAST.key))
        assert moved is not None
        assert (await ahead(), await ahead(5)) == (3, 1)
        paused = await bench.change(moved.dispatch, Change(standing=Readiness.PAUSED))
        assert paused is not None
        assert (await ahead(), await ahead(5)) == (2, 0)
        assert await bench.change(paused.dispatch, Change(standing=Readiness.IN_LANE)) is not None
        assert (await ahead(), await ahead(5)) == (3, 1)
        cancelled = await bench.cancel(three)
        assert cancelled is not None
        assert await ahead() == 2
        assert await bench.change(cancelled.dispatch, Change(phase=Phase.QUEUED, round=2)) is not None
        assert await ahead() == 3
        for _ in range(3):
            leased = await bench.lease_next()
            assert leased is not None
            end = completion if leased.job_id == one.job_id else failure
            assert await bench.store.write(end(leased.lease_ref())) is not None
        await bench.clock.advance(100)
        assert await bench.store.purge(Phase.COMPLETED, bench.clock.now(), 10) == 1
        assert (await ahead(-1000), await ahead()) == (0, 0)

    async def test_a_refused_job_or_write_changes_no_place(self, bench: StoreBench) -> None:
        job = await bench.enqueue()
        stranger = msgspec.structs.replace(job, job_id=JobId("stranger"), class_key=unknown_class())
        assert await bench.store.enqueue(stranger, bench.job(stranger), QUEUED) is None
        stale = msgspec.structs.replace(job, revision=job.revision + 1)
        assert await bench.change(stale, Change(priority=9)) is None
        assert await bench.change(job, Change(class_key=unknown_class())) is None
        assert (await bench.enqueue(priority=9)).place == 0
        assert (await bench.enqueue()).place == 2

    # the length of a lane

    async def test_a_candidate_says_how_many_jobs_wait_in_its_lane(self, bench: StoreBench) -> None:
        long = [await bench.enqueue() for _ in range(5)]
        other = await bench.enqueue(workflow_hash=WorkflowHash("other"))
        await bench.enqueue(standing=Readiness.PAUSED)

        async def lengths(slots: int = 1) -> list[tuple[JobId, int]]:
            return [(each.job_id, each.waiting) for each in await _seen(bench, slots=slots)]

        assert await lengths() == [(long[0].job_id, 5), (other.job_id, 1)]
        assert [waiting for _, waiting in await lengths(10)] == [5, 5, 5, 5, 5, 1]
        taken = await bench.lease_next()
        assert taken is not None
        assert await lengths() == [(long[1].job_id, 4), (other.job_id, 1)]
        assert await bench.store.write(release(taken.lease_ref())) is not None
        assert await lengths() == [(long[0].job_id, 5), (other.job_id, 1)]
        assert await bench.change(long[4], Change(priority=3)) is not None
        assert await lengths(3) == [
            (long[4].job_id, 1),
            (long[0].job_id, 4),
            (long[1].job_id, 4),
            (other.job_id, 1),
        ]
        assert await bench.cancel(long[3]) is not None
        assert (await lengths(2))[1] == (long[0].job_id, 3)

    async def test_a_lane_that_was_empty_counts_anew(self, bench: StoreBench) -> None:
        for _ in range(3):
            for _ in range(2):
                await bench.enqueue()
            assert [each.waiting for each in await _seen(bench, slots=2)] == [2, 2]
            for _ in range(2):
                taken = await bench.lease_next()
                assert taken is not None
                assert await bench.store.write(completion(taken.lease_ref())) is not None
            await bench.clock.advance(100)
            await bench.store.purge(Phase.COMPLETED, bench.clock.now(), 10)

    async def test_a_job_blocked_for_the_worker_counts_in_its_lane(self, bench: StoreBench) -> None:
        first, second = await bench.enqueue(), await bench.enqueue()
        await bench.store.put_block(Block(A, first.job_id, BlockReason.JOB, 1, bench.clock.now() + 60))
        (seen,) = await _seen(bench)
        assert (seen.job_id, seen.waiting) == (second.job_id, 2)

    # warm lanes

    async def test_a_warm_lane_comes_into_the_window_before_older_lanes(self, bench: StoreBench) -> None:
        cold = await _cold_lanes(bench, 39)
        warm = await bench.enqueue(FOR_FAST)
        assert await _ids(bench) == cold[:_LANES]
        assert await _ids(bench, warm=_WARM) == [*cold[: _LANES - 1], warm.job_id]
        assert await _ids(bench, slots=3, lanes=4, warm=_WARM) == [*cold[:3], warm.job_id]
        (found,) = [each for each in await _seen(bench, warm=_WARM) if each.job_id == warm.job_id]
        assert found == Candidate(
            warm.job_id, warm.lane, warm.sequence, warm.queued_at, 0.0, 0.0, waiting=1, place=39
        )

    async def test_the_jobs_for_the_slots_are_the_first_ones_also_beside_warm_lanes(
        self, bench: StoreBench
    ) -> None:
        same = [(await bench.enqueue()).job_id for _ in range(4)]
        warm = [
            (await bench.enqueue(FOR_FAST, workflow_hash=WorkflowHash(f"warm-{number}"))).job_id
            for number in range(40)
        ]
        assert await _ids(bench, slots=3, warm=_WARM) == same[:3] + warm[: _LANES - 1]
        assert await _ids(bench, slots=3, lanes=1, warm=_WARM) == same[:3]
        assert await _ids(bench, slots=60, warm=_WARM) == same + warm

    async def test_warm_lanes_leave_the_order_of_a_window_that_has_room(self, bench: StoreBench) -> None:
        cold = await _cold_lanes(bench, 3)
        warm = (await bench.enqueue(FOR_FAST)).job_id
        cold += [(await bench.enqueue(workflow_hash=WorkflowHash("last"))).job_id]
        expected = [*cold[:3], warm, cold[3]]
        assert await _ids(bench) == await _ids(bench, warm=_WARM) == expected
        assert await _ids(bench, warm=frozenset({FOR_BOTH.key})) == expected
        assert await _ids(bench, warm=frozenset({unknown_class()})) == expected

    async def test_a_warm_lane_of_a_lower_priority_stays_behind(self, bench: StoreBench) -> None:
        cold = await _cold_lanes(bench, 5)
        await bench.enqueue(FOR_FAST, priority=-1)
        assert await _ids(bench, lanes=3, warm=_WARM) == cold[:3]
        high = await bench.enqueue(FOR_FAST, priority=1)
        assert await _ids(bench, lanes=3, warm=_WARM) == [high.job_id]
        assert await _ids(bench, slots=2, lanes=3, warm=_WARM) == [high.job_id, *cold[:3]]

    async def test_a_profile_that_may_not_take_a_warm_class_does_not_see_it(self, bench: StoreBench) -> None:
        cold = await _cold_lanes(bench, 5)
        await bench.enqueue(FOR_FAST)
        assert await _ids(bench, profile=SLOW, worker_id=B, lanes=3, warm=_WARM) == cold[:3]

    async def test_blocks_and_skips_apply_to_warm_lanes(self, bench: StoreBench) -> None:
        cold = await _cold_lanes(bench, 5)
        first, second = [await bench.enqueue(FOR_FAST) for _ in range(2)]
        skipped, asked = frozenset({str(HASH)}), {"lanes": 3, "warm": _WARM}
        assert await _ids(bench, **asked) == [*cold[:2], first.job_id]
        assert await _ids(bench, **asked, skip=skipped) == cold[:3]
        until = bench.clock.now() + 60
        await bench.store.put_block(Block(A, first.job_id, BlockReason.JOB, 1, until))
        assert await _ids(bench, **asked) == [*cold[:2], second.job_id]
        await bench.store.put_block(Block(A, HASH, BlockReason.FAILURES, 1, until))
        assert await _ids(bench, **asked) == cold[:3]
        assert await _ids(bench, **asked, worker_id=B) == [*cold[:2], first.job_id]
        await bench.store.pause_queue(True)
        assert await _ids(bench, **asked) == []

    async def test_holds_caps_and_the_quantum_apply_to_warm_lanes(self, bench: StoreBench) -> None:
        cold = await _cold_lanes(bench, 5)
        bobs = await bench.enqueue(FOR_FAST, tenant=tenant("bob"))
        asked = {"lanes": 3, "warm": _WARM}
        assert await _ids(bench, **asked) == [*cold[:2], bobs.job_id]
        share = bench.store.fair_share
        for terms in (
            TenantTerms(tenant("bob"), max_leased=0),
            TenantTerms(tenant("bob"), held_until=bench.clock.now() + 60),
        ):
            await share.put_terms(terms)
            assert await _ids(bench, **asked) == cold[:3]
        await share.put_terms(TenantTerms(tenant("bob"), 2.0))
        assert await _ids(bench, **asked) == [*cold[:2], bobs.job_id]
        await share.charge(tenant("bob"), 20.0)
        found = (await _seen(bench, **asked))[-1]
        assert (found.job_id, found.virtual_time, found.weight) == (bobs.job_id, 20.0, 2.0)
        await share.charge(tenant("bob"), 11.0)
        assert await _ids(bench, **asked) == cold[:3]

    async def test_lanes_of_several_warm_classes_come_in_order(self, bench: StoreBench) -> None:
        classes = [RequirementClass(Requirements(models=(f"m{number}",))) for number in range(4)]
        for cls in classes:
            assert await bench.store.put_class(cls, [FAST], version=(await bench.store.table()).version)
        cold = await _cold_lanes(bench, 6)
        jobs = [(await bench.enqueue(cls)).job_id for cls in reversed(classes)]
        warm = frozenset(cls.key for cls in classes[:3])
        assert await _ids(bench, lanes=4, warm=warm) == [cold[0], *jobs[1:]]
        assert await _ids(bench, lanes=3, warm=warm) == [cold[0], *jobs[1:3]]
        assert await bench.store.lease(jobs[1], bench.offer()) is not None
        assert await _ids(bench, lanes=3, warm=warm) == [cold[0], *jobs[2:]]

    # the expected seconds of a lease

    async def test_a_lease_keeps_the_seconds_that_its_run_and_its_loads_should_take(
        self, bench: StoreBench
    ) -> None:
        job = await bench.enqueue()
        expected = msgspec.structs.replace(bench.offer(), run_s=0.875, load_s=29.3)
        written = await bench.store.lease(job.job_id, expected)
        assert written is not None and written.dispatch.lease is not None
        assert (written.dispatch.lease.run_s, written.dispatch.lease.load_s) == (0.875, 29.3)
        assert await bench.store.load(job.job_id) == written.dispatch
        assert await bench.store.leases_of(A) == [written.dispatch]
        assert await bench.store.leased_by_poll(expected.poll_id) == written.dispatch
        ref = written.dispatch.lease_ref()
        assert [each.is_alive for each in await bench.store.heartbeat([ref], 60.0)] == [True]
        stopping = await bench.store.load(job.job_id)
        assert stopping is not None
        assert await bench.change(stopping, Change(pause_requested_at=5.0)) is not None
        (held,) = await bench.store.leases_of(A)
        assert held.lease is not None and (held.lease.run_s, held.lease.load_s) == (0.875, 29.3)
        assert await bench.store.write(release(ref)) is not None
        plain = await bench.store.lease(job.job_id, bench.offer(B))
        assert plain is not None and plain.dispatch.lease is not None
        assert (plain.dispatch.lease.run_s, plain.dispatch.lease.load_s) == (0.0, 0.0)
        assert await bench.store.leases_of(B) == [plain.dispatch]

    # random days

    @settings(
        max_examples=max(1, settings().max_examples * 30 // 100),
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ],
    )
    @given(data=st.data())
    def test_places_lengths_and_windows_are_what_counting_every_job_gives(
        self, make_store: MakeStore, data: st.DataObject
    ) -> None:
        day = data.draw(st.lists(_steps, min_size=20, max_size=60), label="day")
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(_play(make_store, day))
        finally:
            loop.close()


_WHICH = st.integers(0, 30)
_PRIORITIES = st.sampled_from([-1000, -1, 0, 0, 0, 7])
_CLASSES = {cls.key: cls for cls in (FOR_FAST, FOR_BOTH)}
_steps = st.one_of(
    st.tuples(
        st.just("enqueue"),
        st.sampled_from(sorted(_CLASSES)),
        st.sampled_from(["a", "b", "c", "d"]),
        _PRIORITIES,
        st.sampled_from(["default", "ann"]),
        st.sampled_from([*[Readiness.IN_LANE] * 4, Readiness.PAUSED]),
    ),
    st.tuples(st.just("lease"), _WHICH),
    st.tuples(st.just("release"), _WHICH),
    st.tuples(st.just("complete"), _WHICH),
    st.tuples(st.just("cancel"), _WHICH),
    st.tuples(st.just("retry"), _WHICH),
    st.tuples(st.just("priority"), _WHICH, _PRIORITIES),
    st.tuples(st.just("class"), _WHICH, st.sampled_from(sorted(_CLASSES))),
    st.tuples(st.just("pause"), _WHICH, st.booleans()),
    st.tuples(st.just("charge"), st.sampled_from(["default", "ann"]), st.sampled_from([1.0, 40.0])),
    st.tuples(st.just("terms"), st.sampled_from([None, 0, 2])),
    st.tuples(st.just("purge")),
    st.tuples(
        st.just("peek"),
        st.integers(1, 4),
        st.integers(0, 4),
        st.sets(st.sampled_from(sorted(_CLASSES)), min_size=1),
        st.sets(st.sampled_from(["a", "b"]), max_size=1),
    ),
)


async def _play(make_store: MakeStore, day: Sequence[tuple[Any, ...]]) -> None:
    bench = StoreBench(make_store)
    await bench.open()
    try:
        for step in day:
            await _do(bench, step)
        await _check_window(bench, 100, 0, frozenset(), frozenset())
    finally:
        await bench.store.close()


async def _all(bench: StoreBench) -> list[Dispatch]:
    return [each for each in await bench.store.load_many(bench.jobs) if each is not None]


async def _do(bench: StoreBench, step: tuple[Any, ...]) -> None:
    store = bench.store
    jobs = await _all(bench)
    job = jobs[step[1] % len(jobs)] if jobs and len(step) > 1 and isinstance(step[1], int) else None
    match step:
        case ("enqueue", class_key, workflow_hash, priority, name, standing):
            ahead = [each for each in jobs if each.stands_in_lane and each.priority >= priority]
            added = await bench.enqueue(
                _CLASSES[class_key],
                workflow_hash=WorkflowHash(workflow_hash),
                priority=priority,
                tenant=tenant(name),
                standing=standing,
                place=len(bench.jobs) % 2,
            )
            assert added.place == len(ahead) + (len(bench.jobs) - 1) % 2
        case ("lease", _) if job is not None:
            await store.lease(job.job_id, bench.offer())
        case ("release", _) if job is not None and job.lease is not None:
            assert await store.write(release(job.lease_ref())) is not None
        case ("complete", _) if job is not None and job.lease is not None:
            assert await store.write(completion(job.lease_ref(), 3.0)) is not None
        case ("cancel", _) if job is not None and not job.phase.is_final:
            assert await bench.cancel(job) is not None
        case ("retry", _) if job is not None and job.phase.is_final:
            change = Change(phase=Phase.QUEUED, round=job.round + 1, standing=Readiness.IN_LANE)
            assert await bench.change(job, change, job={"phase": Phase.QUEUED}) is not None
        case ("priority", _, priority) if job is not None:
            assert await bench.change(job, Change(priority=priority)) is not None
        case ("class", _, class_key) if job is not None:
            assert await bench.change(job, Change(class_key=class_key)) is not None
        case ("pause", _, is_paused) if job is not None and job.phase is Phase.QUEUED:
            standing = Readiness.PAUSED if is_paused else Readiness.IN_LANE
            assert await bench.change(job, Change(standing=standing)) is not None
        case ("charge", name, seconds):
            await store.fair_share.charge(tenant(name), seconds)
        case ("terms", max_leased):
            await store.fair_share.put_terms(TenantTerms(tenant("ann"), 1.0, max_leased))
        case ("purge",):
            await bench.clock.advance(100)
            for phase in (Phase.COMPLETED, Phase.CANCELLED):
                await store.purge(phase, bench.clock.now(), 100)
        case ("peek", slots, lanes, warm, skip):
            await _check_window(bench, slots, lanes, frozenset(warm), frozenset(skip))


async def _check_window(
    bench: StoreBench, slots: int, lanes: int, warm: frozenset[ClassKey], skip: frozenset[str]
) -> None:
    """Compares a look with the window that all jobs, sorted, give."""
    waiting = [each for each in await _all(bench) if each.stands_in_lane]
    now = bench.clock.now()
    shares = {name: await bench.store.fair_share.get(tenant(name)) for name in ("default", "ann")}
    visible = sorted(
        (-each.priority, shares[each.tenant].virtual_time, each.sequence, each.job_id)
        for each in waiting
        if not shares[each.tenant].is_excluded(now) and each.workflow_hash not in skip
    )
    lane_of: dict[JobId, LaneKey] = {each.job_id: each.lane for each in waiting}
    found, heads = visible[:slots], dict[LaneKey, Any]()
    if len(found) == slots:
        level = found[-1][0]
        least = min(each[1] for each in found if each[0] == level)
        seen = {lane_of[each[3]] for each in found if each[0] == level}
        for each in visible:
            if each[0] == level and each[1] <= least + 30.0 and (lane := lane_of[each[3]]) not in seen:
                heads.setdefault(lane, each)
        ranked = sorted(heads.values(), key=lambda each: (lane_of[each[3]].class_key not in warm, each))
        found = found + sorted(ranked[: max(0, lanes - len(seen))])
    answer = await _seen(bench, slots=slots, lanes=lanes, warm=warm, skip=skip)
    assert [each.job_id for each in answer] == [each[3] for each in found]
    places = {each.job_id: each.place for each in waiting}
    lengths = [each.lane for each in waiting]
    for candidate in answer:
        counted = lengths.count(candidate.lane), places[candidate.job_id]
        assert (candidate.waiting, candidate.place) == counted
