"""A lease carries the payload of its own job, however late the store's answers come and whoever looks meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import msgspec
import pytest
from tests.engine._rig import graph, offers
from tests.engine.test_several_engines import SharedStore
from tests.servers.postgres_database import emptied_database
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.calls import LeasedJob, Poll, RegisterWorker
from comfyfleet.model.dispatch import AtRevision, Change, LeaseOffer, Write, WriteResult
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId, PollId, TenantId, WorkerId
from comfyfleet.model.job import Attachment, Job, Submission
from comfyfleet.model.payload_digest import leased_sha256
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Store
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.stores.redis.store import RedisStore

WORKER = WorkerId("gpu")
ANN, BOB = TenantId("ann"), TenantId("bob")


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture(params=["memory", "redis", "postgres"])
def store(request: pytest.FixtureRequest) -> Store:
    """Every store that engines in several processes share, and one in memory that behaves as if it were."""
    match request.param:
        case "memory":
            return SharedStore(SystemClock())
        case "redis":
            return RedisStore(with_prefix(request.getfixturevalue("redis_url")))
    return PostgresStore(emptied_database(request.config))


@pytest.fixture
async def engine(store: Store) -> AsyncIterator[Engine]:
    async with AsyncExitStack() as stack:
        # Whoever looks again does so because a job came, and not because a second is over.
        engine = await stack.enter_async_context(Engine(store, rules=Rules(round_s=600)))
        await engine.register(RegisterWorker(WORKER, offers("KSampler"), 2))
        yield engine


class LateAnswers:
    """The first lease is granted at once, but its answer arrives only when the test says so."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lease = store.lease
        self.granted = asyncio.Event()
        self.arrives = asyncio.Event()
        self.leases = 0
        monkeypatch.setattr(store, "lease", self.lease)

    async def lease(self, job_id: JobId, offer: LeaseOffer) -> WriteResult | None:
        self.leases += 1
        is_first = self.leases == 1
        written = await self._lease(job_id, offer)
        if is_first:
            self.granted.set()
            await self.arrives.wait()
        return written


async def submit(engine: Engine, tenant: TenantId) -> JobId:
    submission = Submission(graph(made_for=str(tenant)), tenant=tenant)
    return (await engine.submit(submission)).job_id


def poll(engine: Engine, poll_id: str, wait_s: float) -> asyncio.Task[LeasedJob | None]:
    return asyncio.create_task(engine.poll(Poll(WORKER, PollId(poll_id), wait_s)))


def made_for(leased: LeasedJob | None) -> tuple[JobId, str]:
    assert leased is not None, "there is a job for this poll"
    return leased.job_id, leased.workflow["1"]["inputs"]["made_for"]


async def rounds_are_over(engine: Engine) -> None:
    while (running := engine._matcher._running) is not None:
        await asyncio.wait({running})


async def test_a_job_that_arrives_while_a_slot_is_served_does_not_change_what_its_lease_carries(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = LateAnswers(store, monkeypatch)
    owner_of = {await submit(engine, ANN): "ann"}
    first = poll(engine, "first", 60)
    await late.granted.wait()
    # The lease of ann's job is on its way. Bob's job is offered to the same idle slot.
    owner_of[await submit(engine, BOB)] = "bob"
    await rounds_are_over(engine)
    late.arrives.set()
    leased = [made_for(await first), made_for(await poll(engine, "second", 60))]
    assert dict(leased) == owner_of
    assert late.leases == 2, "one slot is served by one task, and leases one job"


async def test_a_job_that_arrived_while_a_slot_was_served_in_vain_is_offered_to_it(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await submit(engine, ANN)
    is_taken = asyncio.Event()
    goes_on = asyncio.Event()
    lease = store.lease

    async def taken_by_another(wanted: JobId, offer: LeaseOffer) -> WriteResult | None:
        if wanted != job_id:
            return await lease(wanted, offer)
        await engine.cancel(job_id)
        is_taken.set()
        await goes_on.wait()
        return None

    monkeypatch.setattr(store, "lease", taken_by_another)
    waiting = poll(engine, "first", 60)
    await is_taken.wait()
    other = await submit(engine, BOB)
    goes_on.set()
    async with asyncio.timeout(60):
        assert made_for(await waiting) == (other, "bob")


async def test_a_record_that_cannot_be_read_with_the_lease_is_read_after_it(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await submit(engine, ANN)
    get, reads = store.records.get, 0

    async def lost_once(wanted: JobId) -> Job | None:
        nonlocal reads
        reads += 1
        if reads == 1:
            raise Fault("the answer was lost")
        return await get(wanted)

    monkeypatch.setattr(store.records, "get", lost_once)
    assert made_for(await poll(engine, "first", 60)) == (job_id, "ann")
    assert reads == 2


SHAPES = {
    "plain": Submission(graph(text="ein Fuchs \N{SNOWFLAKE}", strength=1.0, large=2**63 + 1)),
    "with seeds that are drawn": Submission(graph(seed=-1, noise_seed=-1)),
    "with attachments": Submission(
        graph(image=""), attachments=(Attachment("a.png", b"\xff\x00", "1", "image"),)
    ),
    "with outputs that are named": Submission(graph(), include_outputs=("2",), metadata={"for": "the cover"}),
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_dispatch_carries_the_hash_of_what_its_lease_runs(
    engine: Engine, store: Store, shape: str
) -> None:
    job_id = (await engine.submit(SHAPES[shape])).job_id
    dispatch = await store.load(job_id)
    leased = await poll(engine, "first", 60)
    assert dispatch is not None and dispatch.payload_sha256 is not None and leased is not None
    assert dispatch.payload_sha256.hex() == leased.payload_sha256 == leased_sha256(leased).hex()


async def test_a_payload_that_was_swapped_on_its_way_does_not_fit_the_hash_of_the_lease(
    engine: Engine, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await submit(engine, ANN)
    get = store.records.get

    async def swapped(wanted: JobId) -> Job | None:
        job = await get(wanted)
        return job and msgspec.structs.replace(job, payload=Submission(graph(made_for="bob")))

    monkeypatch.setattr(store.records, "get", swapped)
    leased = await poll(engine, "first", 60)
    assert made_for(leased) == (job_id, "bob")
    assert leased is not None and leased.payload_sha256 != leased_sha256(leased).hex()


async def test_equal_payloads_of_two_jobs_have_different_hashes(engine: Engine, store: Store) -> None:
    digests = set()
    for _ in range(2):
        dispatch = await store.load((await engine.submit(Submission(graph()))).job_id)
        assert dispatch is not None
        digests.add(dispatch.payload_sha256)
    assert len(digests) == 2


async def test_a_job_from_before_dispatches_carried_a_hash_is_leased_with_that_of_its_record(
    engine: Engine, store: Store
) -> None:
    job_id = await submit(engine, ANN)
    dispatch = await store.load(job_id)
    assert dispatch is not None
    unsaid = Write(job_id, AtRevision(dispatch.revision), Change(payload_sha256=None))
    assert await store.write(unsaid) is not None
    leased = await poll(engine, "first", 60)
    assert leased is not None and leased.payload_sha256 == leased_sha256(leased).hex()
