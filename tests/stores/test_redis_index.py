"""The index inside the server against the plain truth: the best of all waiting jobs, found by looking at every one."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests._examples import examples
from tests.servers.redis_fixtures import own_server, some_server, with_prefix

from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.dispatch import (
    AtRevision,
    Change,
    Dispatch,
    LeaseRef,
    Phase,
    Readiness,
    Write,
)
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.model.ids import JobId, ProfileKey, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, Submission
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.model.worker import Capabilities, Service, WorkerRecord
from comfyfleet.ports import Peek
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.redis.codec import as_list
from comfyfleet.stores.redis.dispatches import as_bytes
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.store_bench import (
    FAST,
    FOR_BOTH,
    FOR_FAST,
    SLOW,
    A,
    B,
    MakeStore,
    StoreBench,
    completion,
)
from comfyfleet.testing.leases import lease_next

CLASSES = [RequirementClass(Requirements(models=(f"model-{number}",))) for number in range(4)]
PROFILES = [ProfileKey(f"profile-{number}") for number in range(3)]
TENANTS = [TenantId(name) for name in ("ann", "bob", "eve")]
HASHES = [WorkflowHash(f"hash-{number}") for number in range(3)]

steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.sampled_from(CLASSES),
            st.sampled_from(TENANTS),
            st.sampled_from([-5, 0, 0, 10]),
            st.sampled_from(HASHES),
        ),
        st.tuples(st.just("take"), st.sampled_from(PROFILES), st.sets(st.sampled_from(HASHES), max_size=2)),
        st.tuples(st.just("take_keeping_off"), st.sampled_from(PROFILES), st.integers(0, 6)),
        st.tuples(st.just("remove"), st.integers(0, 100)),
        st.tuples(st.just("put_back"), st.integers(0, 100)),
        st.tuples(st.just("priority"), st.integers(0, 100), st.sampled_from([-5, 0, 10])),
        st.tuples(st.just("charge"), st.sampled_from(TENANTS), st.sampled_from([0.0, 1.0, 40.0])),
        st.tuples(st.just("window"), st.sampled_from(PROFILES), st.integers(1, 6), st.integers(1, 4)),
        st.tuples(st.just("new_profile"), st.integers(0, 2)),
    ),
    # Short days show nothing: the bounds must have had time to grow stale.
    min_size=40,
    max_size=100,
)
fits_table = st.lists(st.sets(st.integers(0, 3), min_size=2), min_size=3, max_size=3)


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with some_server() as url:
        yield url


def _record(worker: WorkerId, profile: ProfileKey) -> WorkerRecord:
    return WorkerRecord(worker, Capabilities((Service("comfyui"),)), profile, 1, 1.0, 2.0)


async def direct_lease(store: RedisStore, worker: WorkerId, poll: str, token: str) -> JobId | None:
    """As a direct worker does it: the library chooses the job."""
    answer = await store._do("worker_lease_next", worker, poll, token, 10)
    return None if answer is None else JobId(as_bytes(as_list(answer)[0]).decode())


class Play:
    """A store, and beside it all waiting jobs in one dictionary."""

    def __init__(self, url: str, fits: list[set[int]]) -> None:
        self.store = RedisStore(with_prefix(url))
        self.fits = {
            profile: {CLASSES[number].key for number in numbers}
            for profile, numbers in zip(PROFILES, fits, strict=True)
        }
        self.waiting: dict[JobId, Dispatch] = {}
        self.aside: list[Dispatch] = []
        self.virtual: dict[TenantId, float] = {}
        self.numbers = itertools.count(1)

    async def open(self) -> None:
        await self.store.open()
        for profile in PROFILES:
            await self.put_profile(profile, empty=True)
        for cls in CLASSES:
            fits = [profile for profile in PROFILES if cls.key in self.fits[profile]]
            assert await self.store.put_class(cls, fits, version=(await self.store.table()).version)

    async def put_profile(self, profile: ProfileKey, *, empty: bool = False) -> None:
        version = (await self.store.table()).version
        assert await self.store.put_profile(profile, [] if empty else self.fits[profile], version=version)

    def order(self, profile: ProfileKey, skip: set[WorkflowHash], off: set[JobId]) -> list[JobId]:
        mine = [
            job
            for job in self.waiting.values()
            if job.class_key in self.fits[profile] and job.workflow_hash not in skip and job.job_id not in off
        ]
        mine.sort(key=lambda job: (-job.priority, self.virtual.get(job.tenant, 0.0), job.sequence))
        return [job.job_id for job in mine]

    async def add(
        self, cls: RequirementClass, tenant: TenantId, priority: int, workflow_hash: WorkflowHash
    ) -> None:
        job_id = JobId(f"job-{next(self.numbers)}")
        dispatch = Dispatch(job_id, cls.key, workflow_hash, priority, tenant=tenant)
        job = Job(job_id, tenant, workflow_hash, 0.0, Submission({}))
        written = await self.store.enqueue(dispatch, job, (FactDraft(FactKind.QUEUED),))
        assert written is not None
        self.waiting[job_id] = written.dispatch

    async def take(self, profile: ProfileKey, skip: set[WorkflowHash], off: set[JobId]) -> None:
        number = next(self.numbers)
        worker = WorkerId(f"worker-{number}")
        for target in (*skip, *off):
            await self.store.put_block(Block(worker, target, BlockReason.OPERATOR, 1, float("inf")))
        await self.store.add_worker(_record(worker, profile))
        taken = await direct_lease(self.store, worker, f"poll-{number}", "t")
        expected = self.order(profile, skip, off)
        assert taken == (expected[0] if expected else None)
        if taken is not None:
            del self.waiting[taken]

    async def change(self, dispatch: Dispatch, change: Change) -> Dispatch:
        written = await self.store.write(Write(dispatch.job_id, AtRevision(dispatch.revision), change))
        assert written is not None
        return written.dispatch

    async def step(self, step: tuple[object, ...]) -> None:
        match step:
            case (
                "add",
                RequirementClass() as cls,
                str() as tenant,
                int() as priority,
                str() as workflow_hash,
            ):
                await self.add(cls, TenantId(tenant), priority, WorkflowHash(workflow_hash))
            case ("take", str() as profile, set() as skip):
                await self.take(ProfileKey(profile), skip, set())
            case ("take_keeping_off", str() as profile, int() as count):
                off = set(self.order(ProfileKey(profile), set(), set())[:count])
                await self.take(ProfileKey(profile), set(), off)
            case ("remove", int() as at) if self.waiting:
                job = self.waiting.pop(sorted(self.waiting)[at % len(self.waiting)])
                self.aside.append(await self.change(job, Change(standing=Readiness.PAUSED)))
            case ("put_back", int() as at) if self.aside:
                back = self.aside.pop(at % len(self.aside))
                job = await self.change(back, Change(standing=Readiness.IN_LANE))
                self.waiting[job.job_id] = job
            case ("priority", int() as at, int() as priority) if self.waiting:
                job = self.waiting[sorted(self.waiting)[at % len(self.waiting)]]
                self.waiting[job.job_id] = await self.change(job, Change(priority=priority))
            case ("charge", str() as tenant, float() as seconds):
                await self.store.fair_share.charge(TenantId(tenant), seconds)
                self.virtual[TenantId(tenant)] = self.virtual.get(TenantId(tenant), 0.0) + seconds
            case ("window", str() as profile, int() as slots, int() as lanes):
                await self.look(ProfileKey(profile), slots, lanes)
            case ("new_profile", int() as which):
                await self.store.drop_profiles([PROFILES[which]])
                await self.put_profile(PROFILES[which])

    async def look(self, profile: ProfileKey, slots: int, lanes: int) -> None:
        expected = self.order(profile, set(), set())
        seen = await self.store.peek(Peek(profile, WorkerId("looker"), slots, lanes, 30.0))
        assert [each.job_id for each in seen[:slots]] == expected[:slots]
        beyond = seen[slots:]
        assert all(each.job_id in expected for each in beyond)
        assert all(each.lane.priority == seen[slots - 1].lane.priority for each in beyond)


async def play(url: str, fits: list[set[int]], day: list[tuple[object, ...]]) -> None:
    game = Play(url, fits)
    await game.open()
    try:
        for step in day:
            await game.step(step)
        for profile in PROFILES:
            await game.look(profile, len(game.waiting) + 1, 1)
            while game.order(profile, set(), set()):
                await game.take(profile, set(), set())
            await game.take(profile, set(), set())
    finally:
        await game.store.close()


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
)
@given(fits_table, steps)
def test_the_index_always_chooses_what_looking_at_every_job_would(
    server_url: str, fits: list[set[int]], day: list[tuple[object, ...]]
) -> None:
    asyncio.run(play(server_url, fits, day))


async def test_an_older_job_that_returns_comes_before_another_tenants_younger_one(server_url: str) -> None:
    game = Play(server_url, [{0}, {0}, {0}])
    await game.open()
    try:
        for tenant, workflow_hash in zip(("ann", "bob", "ann"), HASHES, strict=True):
            await game.add(CLASSES[0], TenantId(tenant), 0, workflow_hash)
        await game.step(("remove", 0))
        await game.look(PROFILES[0], 3, 1)
        await game.step(("put_back", 0))
        await game.take(PROFILES[0], set(), set())
    finally:
        await game.store.close()


async def test_a_job_that_changed_its_priority_hides_nobody_at_the_one_it_had(server_url: str) -> None:
    """Its place in line is the same at both, and so is its tenant's time: only the priority tells the bounds apart."""
    game = Play(server_url, [{0}, {0}, {0}])
    await game.open()
    try:
        await game.add(CLASSES[0], TENANTS[0], -5, HASHES[0])
        await game.look(PROFILES[0], 1, 1)
        (job,) = game.waiting.values()
        game.waiting[job.job_id] = await game.change(job, Change(priority=-1))
        await game.take(PROFILES[0], set(), set())
        await game.add(CLASSES[0], TENANTS[0], -5, HASHES[0])
        await game.take(PROFILES[0], set(), set())
    finally:
        await game.store.close()


@pytest.mark.parametrize("differing", ["hash", "tenant", "class"])
async def test_lanes_take_turns_by_the_age_of_their_heads(server_url: str, differing: str) -> None:
    game = Play(server_url, [{0, 1}, {0}, {0}])
    await game.open()
    try:
        for number in (0, 1, 0, 0, 1, 1, 0):
            await game.add(
                CLASSES[number if differing == "class" else 0],
                TENANTS[number if differing == "tenant" else 0],
                0,
                HASHES[number if differing == "hash" else 0],
            )
        for _ in range(8):
            await game.take(PROFILES[0], set(), set())
    finally:
        await game.store.close()


async def test_a_tenant_that_was_charged_between_two_leases_stands_back(server_url: str) -> None:
    game = Play(server_url, [{0}, {0}, {0}])
    await game.open()
    try:
        for number in (0, 0, 1, 1, 0, 1):
            await game.add(CLASSES[0], TENANTS[number], 0, HASHES[0])
        for tenant in (0, 0, 1, 1, 0):
            await game.take(PROFILES[0], set(), set())
            await game.step(("charge", TENANTS[tenant], 1.0))
        await game.take(PROFILES[0], set(), set())
    finally:
        await game.store.close()


async def calls_of(store: RedisStore) -> dict[str, int]:
    """What ran inside functions since the statistics were reset."""
    text = await store.diagnose("INFO", "commandstats")
    assert isinstance(text, bytes)
    counts = {found[1]: int(found[2]) for found in re.finditer(r"cmdstat_([^:]+):calls=(\d+)", text.decode())}
    return {
        name: count for name, count in counts.items() if name not in ("fcall", "info", "config|resetstat")
    }


@pytest.mark.parametrize(
    ("has_tenant_database", "is_charged", "most"), [(False, False, 11), (True, False, 11), (False, True, 14)]
)
async def test_finishing_a_job_takes_few_calls_inside_the_server(
    has_tenant_database: bool, is_charged: bool, most: int
) -> None:
    with own_server(is_durable=False) as server:
        bench = StoreBench(lambda clock: RedisStore(with_prefix(server.url)))
        await bench.open()
        store = bench.store
        assert isinstance(store, RedisStore)
        try:
            if is_charged:
                await store.fair_share.put_terms(TenantTerms(TenantId("default"), max_leased=10))
            for number in range(3):
                tenant = TENANTS[number % 2] if is_charged else TenantId("default")
                _, ref = await bench.leased(has_tenant_database=has_tenant_database, tenant=tenant)
                await store.diagnose("CONFIG", "RESETSTAT")
                finished = await store.write(completion(ref))
                calls = await calls_of(store)
                assert finished is not None
                assert finished.dispatch.phase is Phase.COMPLETED
            assert sum(calls.values()) <= most, calls
        finally:
            await store.close()


@pytest.mark.parametrize("waiting", ["jobs", "classes", "blocked", "misfits", "lanes", "tenants"])
async def test_a_lease_takes_no_more_calls_when_more_waits(server_url: str, waiting: str) -> None:
    with own_server(is_durable=False) as server:
        bench = StoreBench(lambda clock: RedisStore(with_prefix(server.url)))
        await bench.open()
        store = bench.store
        assert isinstance(store, RedisStore)
        costs = []
        try:
            for worker, profile in _TAKES.items():
                await store.add_worker(_record(worker, profile))
            for count in (10, 300):
                for number in range(count):
                    await _pile(bench, store, waiting, number)
                await bench.enqueue(workflow_hash=WorkflowHash("wanted"))
                worker = B if waiting == "misfits" else A
                assert await direct_lease(store, worker, f"first-{count}", "t") is not None, (
                    "takes the news in"
                )
                cost = []
                for poll in range(5):
                    await bench.enqueue(workflow_hash=WorkflowHash("wanted"))
                    await store.diagnose("CONFIG", "RESETSTAT")
                    assert await direct_lease(store, worker, f"{count}-{poll}", "t") is not None
                    cost.append(sum((await calls_of(store)).values()))
                costs.append(min(cost))
            assert costs[1] <= costs[0] + 4, costs
        finally:
            await store.close()


async def _pile(bench: StoreBench, store: RedisStore, what: str, number: int) -> None:
    match what:
        case "jobs":
            await bench.enqueue()
        case "classes":
            cls = RequirementClass(Requirements(models=(f"piled-{number}",)))
            await store.put_class(cls, [FAST], version=(await store.table()).version)
            await bench.enqueue(cls)
        case "blocked":
            await store.put_block(Block(A, "blocked", BlockReason.OPERATOR, 1, float("inf")))
            await bench.enqueue(workflow_hash=WorkflowHash("blocked"))
        case "misfits":
            await bench.enqueue(FOR_FAST)
        case "lanes":
            await bench.enqueue(workflow_hash=WorkflowHash(f"lane-{number}"))
        case "tenants":
            await store.fair_share.put_terms(TenantTerms(TenantId(f"tenant-{number}"), held_until=inf))
            await bench.enqueue(tenant=TenantId(f"tenant-{number}"), priority=5)


groups = st.lists(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("enqueue"),
                st.sampled_from([FOR_FAST, FOR_BOTH]),
                st.sampled_from(HASHES),
                st.sampled_from(TENANTS),
            ),
            st.tuples(st.just("terms"), st.sampled_from(TENANTS), st.sampled_from([None, 0, 2])),
            st.tuples(st.just("lease_next"), st.sampled_from([A, B])),
            st.tuples(st.just("finish"), st.integers(0, 9)),
            st.tuples(st.just("block"), st.sampled_from(HASHES), st.booleans()),
        ),
        min_size=1,
        max_size=40,
    ),
    min_size=6,
    max_size=12,
)


_TAKES = {A: FAST, B: SLOW}


class Joint:
    """Groups of calls on one store; who is finished is decided before a group begins."""

    def __init__(self, make_store: MakeStore) -> None:
        self.bench = StoreBench(make_store)
        self.refs: list[LeaseRef] = []

    async def play(self, group: list[tuple[Any, ...]]) -> list[Any]:
        refs = list(self.refs)
        answers = await asyncio.gather(*[self._do(step, refs) for step in group])
        for step, answer in zip(group, answers, strict=True):
            if step[0] == "lease_next" and answer is not None:
                leased = await self.bench.store.load(answer)
                assert leased is not None
                if leased.lease is not None:
                    self.refs.append(leased.lease_ref())
        return answers

    async def _do(self, step: tuple[Any, ...], refs: list[LeaseRef]) -> Any:
        bench = self.bench
        match step:
            case ("enqueue", cls, workflow_hash, tenant):
                return await bench.enqueue(cls, workflow_hash=workflow_hash, tenant=tenant)
            case ("terms", tenant, max_leased):
                return await bench.store.fair_share.put_terms(TenantTerms(tenant, 2.0, max_leased))
            case ("lease_next", worker):
                number = bench.new_number()
                # The library puts the worker before its poll, and charges ten seconds.
                offer = bench.offer(worker, _TAKES[worker], f"{worker}/{number}")
                if isinstance(bench.store, RedisStore):
                    return await direct_lease(bench.store, worker, str(number), offer.token)
                leased = await lease_next(bench.store, msgspec.structs.replace(offer, charge_s=10.0))
                return None if leased is None else leased.dispatch.job_id
            case ("finish", which):
                return await bench.store.write(completion(refs[-1 - which])) if which < len(refs) else None
            case ("block", workflow_hash, is_blocked):
                until = bench.clock.now() + 100.0 if is_blocked else None
                return await bench.store.put_block(Block(A, workflow_hash, BlockReason.FAILURES, 1, until))
        raise AssertionError(f"no such step: {step}")


async def play_together(url: str, day: list[list[tuple[Any, ...]]]) -> None:
    reference, other = (
        Joint(MemoryStore),
        Joint(lambda clock: RedisStore(with_prefix(url), winding=clock)),
    )
    for each in (reference, other):
        await each.bench.open()
        for worker, profile in _TAKES.items():
            await each.bench.store.add_worker(_record(worker, profile))
    try:
        for group in day:
            assert await other.play(group) == await reference.play(group)
        assert await other.bench.state() == await reference.bench.state()
    finally:
        await other.bench.store.close()
        await reference.bench.store.close()


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
)
@given(groups)
def test_calls_that_go_together_answer_as_if_they_went_one_after_the_other(
    server_url: str, day: list[list[tuple[Any, ...]]]
) -> None:
    asyncio.run(play_together(server_url, day))
