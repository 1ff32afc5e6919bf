"""Looking at many lanes by their bounds gives what looking at everything would, and costs no more when more waits."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import psycopg
import pytest
from tests.servers.postgres_database import emptied_database
from tests.stores._postgres import Jobs, fill_table

from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.ids import TenantId
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.ports import Peek, Store
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.stores.postgres import PostgresStore, eligibility, lanes
from comfyfleet.testing.contract.store_bench import FAST, FOR_BOTH, FOR_FAST, A, B, release
from comfyfleet.testing.leases import lease_next
from comfyfleet.testing.time import ManualClock


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return emptied_database(request.config)


@pytest.fixture
async def store(url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(url, clock_for_tests=ManualClock())
    await store.open()
    await fill_table(store)
    yield store
    await store.close()


_CLASSES = [FOR_FAST.key, FOR_BOTH.key]


def _lanes(url: str) -> list[tuple[str, int]]:
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT workflow_hash, head FROM comfyfleet.lanes ORDER BY workflow_hash")
        return [(name, head) for name, head in found.fetchall()]


@pytest.mark.parametrize("seed", range(3))
async def test_more_lanes_than_one_look_takes_in_are_seen_in_the_order_of_the_memory_store(
    store: PostgresStore, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_EMPTY", 2)
    monkeypatch.setattr(lanes, "MAX_LAG", 5)
    chance = random.Random(seed)
    memory = MemoryStore(ManualClock())
    await fill_table(memory)
    both: tuple[Store, Store] = (memory, store)
    makers = (Jobs(), Jobs())
    refs: list[LeaseRef] = []

    async def enqueue() -> None:
        name, priority = f"hash-{chance.randrange(60)}", chance.choice([0, 0, 0, 1])
        owner, class_key = TenantId(chance.choice(["ann", "bob"])), chance.choice(_CLASSES)
        fields = {"priority": priority, "tenant": owner, "class_key": class_key}
        placed = [
            await jobs.enqueue(target, name, **fields) for target, jobs in zip(both, makers, strict=True)
        ]
        assert placed[1].place == placed[0].place

    for _ in range(80):
        await enqueue()
    for _ in range(120):
        match chance.choice(["enqueue", "lease", "lease", "peek", "return", "charge", "block"]):
            case "enqueue":
                await enqueue()
            case "lease":
                worker = chance.choice([A, B])
                taken = [
                    await lease_next(target, jobs.offer(worker))
                    for target, jobs in zip(both, makers, strict=True)
                ]
                assert taken[1] == taken[0]
                if taken[0] is not None:
                    refs.append(taken[0].dispatch.lease_ref())
            case "peek":
                slots, width = chance.randint(1, 4), chance.randint(1, 6)
                skip = frozenset({f"hash-{chance.randrange(60)}"})
                warm = frozenset(chance.sample(_CLASSES, chance.randint(0, 2)))
                query = Peek(FAST, chance.choice([A, B]), slots, width, 30.0, skip, warm)
                assert await store.peek(query) == await memory.peek(query)
            case "return" if refs:
                ref = refs.pop(chance.randrange(len(refs)))
                assert await store.write(release(ref)) == await memory.write(release(ref))
            case "charge":
                for target in both:
                    await target.fair_share.charge(TenantId("ann"), 7.5)
            case "block":
                block = Block(A, f"hash-{chance.randrange(60)}", BlockReason.FAILURES, 1, 1e12)
                for target in both:
                    await target.put_block(block)


async def test_a_bound_that_lags_is_raised_and_a_job_that_returns_below_it_comes_first_again(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_LAG", 2)
    jobs = Jobs()
    waiting = [await jobs.enqueue(store) for _ in range(8)]
    taken = [await lease_next(store, jobs.offer()) for _ in range(5)]
    assert _lanes(url) == [("hash", 4)], "raised once it lagged by more than two"
    assert taken[0] is not None
    assert await store.write(release(taken[0].dispatch.lease_ref())) is not None
    assert _lanes(url) == [("hash", 1)]
    again = await lease_next(store, jobs.offer())
    assert again is not None
    assert again.dispatch.job_id == waiting[0].job_id


async def test_lanes_that_stand_empty_go_and_come_back_with_their_next_job(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_EMPTY", 0)
    jobs = Jobs()
    for name in ("a", "b"):
        await jobs.enqueue(store, name)
    assert await lease_next(store, jobs.offer()) is not None
    await store.peek(Peek(FAST, A, 1, 32, 30.0))
    assert [name for name, _ in _lanes(url)] == ["b"]
    back = await jobs.enqueue(store, "a")
    assert await lease_next(store, jobs.offer()) is not None
    seen = await store.peek(Peek(FAST, A, 1, 32, 30.0))
    assert [each.job_id for each in seen] == [back.job_id]


async def test_a_lane_somebody_is_putting_a_job_into_is_left_alone(url: str, store: PostgresStore) -> None:
    jobs = Jobs()
    await jobs.enqueue(store)
    assert await lease_next(store, jobs.offer()) is not None
    pool = store.records._pool
    with psycopg.connect(url) as other:
        other.execute("SELECT FROM comfyfleet.lanes FOR KEY SHARE")
        await pool.transact(lambda step: lanes.remove_empty_lanes(step, 10))
        assert len(_lanes(url)) == 1
    await pool.transact(lambda step: lanes.remove_empty_lanes(step, 10))
    assert _lanes(url) == []


async def test_a_look_reads_no_more_when_ten_thousand_jobs_wait_than_when_a_hundred_do(
    url: str, store: PostgresStore
) -> None:
    jobs = Jobs()
    await jobs.enqueue(store)
    values: dict[str, object] = {
        "worker_id": A,
        "test_now": None,
        "profile": FAST,
        "skip": [],
        "lanes": 58,
        "depth": 10,
    }
    touched = []
    with psycopg.connect(url, autocommit=True, cursor_factory=psycopg.ClientCursor) as connection:
        for first, last in ((2, 100), (101, 10_000)):
            connection.execute(
                "INSERT INTO comfyfleet.dispatches SELECT 'copy-' || number, number, lane_id, phase, due_at, queued_at,"
                " class_key, relaxed_class, worker_id, poll_id, lease_order, fact_count, job_phase, envelope"
                " FROM comfyfleet.dispatches, generate_series(%s, %s) AS number WHERE sequence = 1",
                (first, last),
            )
            connection.execute("ANALYZE comfyfleet.dispatches")
            question = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {lanes._LOOK}"
            row = connection.execute(question.encode(), values).fetchone()
            assert row is not None
            touched.append(row[0][0]["Plan"]["Shared Hit Blocks"] + row[0][0]["Plan"]["Shared Read Blocks"])
    assert touched[1] <= touched[0] * 1.5 + 5, f"pages touched: {touched}"


async def test_idle_classes_beyond_the_bound_are_dropped_and_those_of_open_jobs_are_kept(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eligibility, "MAX_IDLE_CLASSES", 2)
    jobs = Jobs()
    classes = [RequirementClass(Requirements(models=(f"model-{number}",))) for number in range(5)]
    held, relaxed, *idle = classes
    for cls in (held, relaxed):
        assert await store.put_class(cls, [FAST], version=(await store.table()).version)
    job = await jobs.enqueue(store, class_key=held.key, relaxed_class=relaxed.key)
    for cls in idle:
        assert await store.put_class(cls, [FAST], version=(await store.table()).version)
    assert set((await store.table()).classes) == {each.key for each in (held, relaxed, *idle[-2:])}
    dispatch, record = jobs.make(class_key=idle[0].key)
    assert await store.enqueue(dispatch, record, ()) is None, "its class is gone: put it there and repeat"
    assert await store.lease(job.job_id, jobs.offer()) is not None
