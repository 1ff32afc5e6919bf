"""Who is told of a new job on Redis: every idle slot that may take it, at once, and nobody while there is none.

The engines here look round by themselves only once in ten minutes, so what they find in time was told to them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.engine._rig import graph, offers
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.engine.engine import Engine
from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.calls import LeasedJob, Poll, RegisterWorker
from comfyfleet.model.ids import JobId, PollId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Peek
from comfyfleet.stores.redis.store import RedisStore
from comfyfleet.testing.contract.store_bench import FAST, FOR_BOTH, FOR_FAST, SLOW, A, B, StoreBench

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with some_server() as url:
        yield url


@pytest.fixture
def url(server_url: str) -> str:
    return with_prefix(server_url)


class Fleet:
    """Two engines that know each other through Redis alone: one takes jobs in, the other has the workers."""

    def __init__(self, url: str) -> None:
        self.front, self.back = (Engine(RedisStore(url), rules=Rules(round_s=600)) for _ in range(2))
        self._polls = itertools.count(1)
        self._tasks: list[asyncio.Task[LeasedJob | None]] = []

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def submit(self, kind: str = "KSampler") -> JobId:
        return (await self.front.submit(Submission(graph(kind)))).job_id

    async def register(self, worker: str, *kinds: str) -> None:
        await self.back.register(RegisterWorker(WorkerId(worker), offers(*kinds or ("KSampler",)), 2))

    async def parked(self, worker: str) -> asyncio.Task[LeasedJob | None]:
        """A poll of which a look has found nothing."""
        poll = Poll(WorkerId(worker), PollId(f"p{next(self._polls)}"), 60)
        before = (await self.back.stats()).idle_slots
        task = asyncio.create_task(self.back.poll(poll))
        self._tasks.append(task)
        async with asyncio.timeout(WITHIN_S):
            while (await self.back.stats()).idle_slots == before:
                await asyncio.sleep(0.01)
        # A poll that does not wait is answered when the look it asked for is over, and those before it.
        assert await self.back.poll(Poll(WorkerId(worker), PollId(f"p{next(self._polls)}"), 0)) is None
        return task


@pytest.fixture
async def fleet(url: str) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(url)
        await stack.enter_async_context(fleet.front)
        await stack.enter_async_context(fleet.back)
        stack.push_async_callback(fleet.close)
        listener = fleet.back.store
        assert isinstance(listener, RedisStore) and listener._listener is not None
        await asyncio.wait_for(listener._listener.is_listening.wait(), WITHIN_S)
        yield fleet


async def taken(parked: asyncio.Task[LeasedJob | None]) -> JobId:
    leased = await asyncio.wait_for(asyncio.shield(parked), WITHIN_S)
    assert leased is not None
    return leased.ref.job_id


async def test_a_slot_kept_from_the_head_of_a_lane_hears_of_the_job_behind_it(fleet: Fleet) -> None:
    head = await fleet.submit()
    await fleet.register("a")
    await fleet.back.store.put_block(Block(WorkerId("a"), head, BlockReason.JOB, 1, 1e12))
    parked = await fleet.parked("a")
    behind = await fleet.submit()
    assert await taken(parked) == behind


async def test_a_slot_that_looked_while_the_queue_was_paused_hears_that_it_goes_on(fleet: Fleet) -> None:
    first = await fleet.submit()
    await fleet.register("a")
    await fleet.front.pause_queue()
    parked = await fleet.parked("a")
    await fleet.submit()
    assert not parked.done()
    await fleet.front.pause_queue(False)
    assert await taken(parked) == first


async def test_a_worker_that_comes_later_finds_what_waits_and_its_idle_slot_hears_of_more(
    fleet: Fleet,
) -> None:
    first = await fleet.submit("VHS")
    await fleet.register("a", "KSampler")
    idle = await fleet.parked("a")
    await fleet.register("b", "VHS")
    leased = await fleet.back.poll(Poll(WorkerId("b"), PollId("b1"), 0))
    assert leased is not None and leased.ref.job_id == first
    parked = await fleet.parked("b")
    more = await fleet.submit("VHS")
    assert await taken(parked) == more
    assert not idle.done()


async def test_an_idle_slot_hears_of_a_job_of_a_kind_that_is_new_to_its_engine(fleet: Fleet) -> None:
    await fleet.register("a", "KSampler", "VHS")
    await fleet.register("b", "KSampler")
    other = await fleet.parked("b")
    parked = await fleet.parked("a")
    # Until now nobody could tell the two workers apart: they part for it, at the engine that takes it in.
    job_id = await fleet.submit("VHS")
    assert await taken(parked) == job_id
    assert not other.done()


# the store's side


class Hints:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
async def bench(url: str) -> AsyncIterator[StoreBench]:
    bench = StoreBench(lambda clock: RedisStore(url))
    await bench.open()
    yield bench
    await bench.store.close()


@asynccontextmanager
async def listening_on(url: str) -> AsyncIterator[Hints]:
    hints, listening = Hints(), RedisStore(url)
    listening.listen(hints)
    await listening.open()
    await until_heard(hints, 1)
    yield hints
    await listening.close()


async def until_heard(hints: Hints, count: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while hints.count < count:
            await asyncio.sleep(0.005)


async def test_a_job_that_comes_between_a_look_and_its_lease_is_told(bench: StoreBench, url: str) -> None:
    await bench.enqueue()
    async with listening_on(url) as hints:
        (seen,) = await bench.store.peek(Peek(FAST, A, 2, 32, 30.0))
        await bench.enqueue()
        assert await bench.store.lease(seen.job_id, bench.offer()) is not None
        await until_heard(hints, 2)


async def test_one_look_in_vain_is_told_once_and_only_of_what_its_profile_may_take(
    bench: StoreBench, url: str
) -> None:
    async with listening_on(url) as hints:
        for _ in range(3):
            await bench.enqueue(FOR_FAST)
        assert await bench.lease_next(B, SLOW) is None
        await bench.enqueue(FOR_FAST)
        await bench.enqueue(FOR_BOTH)
        await until_heard(hints, 2)
        for _ in range(3):
            await bench.enqueue(FOR_BOTH)
        assert await bench.lease_next(A, FAST) is not None, "who found something waits for nothing"
        await bench.enqueue(FOR_FAST)
        # One more that must come; what was wrongly told before it would have come first.
        while await bench.lease_next(A, FAST) is not None:
            pass
        await bench.enqueue(FOR_FAST)
        await until_heard(hints, 3)
        assert hints.count == 3
