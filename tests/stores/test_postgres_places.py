"""Places and lengths of lanes on PostgreSQL: in a database from before, with many writers, and after a wrong count."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psycopg
import pytest
from tests.servers.postgres_database import empty_database
from tests.stores._postgres import Jobs, fill_table

from comfyfleet.model.dispatch import AtRevision, Candidate, Change, Phase, Readiness, Write
from comfyfleet.ports import Peek
from comfyfleet.stores.postgres import PostgresStore, lane_counts, lanes
from comfyfleet.stores.postgres.check import examine_postgres
from comfyfleet.testing.contract.store_bench import FAST, A, completion, release
from comfyfleet.testing.leases import lease_next

_AS_BEFORE = """
DROP TABLE comfyfleet.lane_tallies, comfyfleet.priority_tallies;
DELETE FROM comfyfleet.migrations WHERE number = 6;
UPDATE comfyfleet.dispatches SET envelope = (envelope::jsonb - 'place')::json;
"""


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request.config)


async def _seen(store: PostgresStore) -> list[Candidate]:
    return await store.peek(Peek(FAST, A, 10, 32, 30.0))


async def _problems(url: str) -> list[str]:
    return [each for each in (await examine_postgres(url))["problems"] if "tallies" in each]


def _sql(url: str, statements: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(statements.encode())


async def _filled(url: str, jobs: Jobs) -> PostgresStore:
    store = PostgresStore(url)
    await store.open()
    await fill_table(store)
    for priority in (0, 0, 0, -4, 9):
        await jobs.enqueue(store, priority=priority)
    await jobs.enqueue(store, "other")
    await jobs.enqueue(store, standing=Readiness.PAUSED)
    assert await store.lease((await jobs.enqueue(store, priority=900)).job_id, jobs.offer()) is not None
    return store


async def test_a_database_from_before_is_counted_by_its_migration(url: str) -> None:
    jobs = Jobs()
    await (await _filled(url, jobs)).close()
    _sql(url, _AS_BEFORE)
    store = PostgresStore(url)
    await store.open()
    assert [(each.waiting, each.place) for each in await _seen(store)] == [(n, 0) for n in (1, 3, 3, 3, 1, 1)]
    assert [(await jobs.enqueue(store, priority=at)).place for at in (0, 9, 900)] == [5, 1, 0]
    assert await _problems(url) == []
    await store.close()


async def test_a_wrong_count_is_found_by_a_check_and_put_right_when_the_store_is_opened(url: str) -> None:
    jobs = Jobs()
    store = await _filled(url, jobs)
    # As a process of an older version does: it moves jobs and counts nothing.
    _sql(url, "UPDATE comfyfleet.dispatches SET lane_id = NULL WHERE job_id = 'job-000004'")
    assert len(await _problems(url)) == 2
    await store.close()
    store = PostgresStore(url)
    await store.open()
    assert await _problems(url) == []
    assert (await jobs.enqueue(store, priority=-1000)).place == 5
    await store.close()


async def test_writers_at_once_leave_exact_counts(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_LAG", 0)
    monkeypatch.setattr(lanes, "MAX_EMPTY", 0)
    monkeypatch.setattr(lane_counts, "MAX_ROWS", 3)
    stores = [PostgresStore(url, connections=5) for _ in range(2)]
    jobs = Jobs()
    for store in stores:
        await store.open()
    await fill_table(stores[0])

    async def work(number: int) -> None:
        chance, store = random.Random(number), stores[number % 2]
        for _ in range(30):
            move: Any = chance.choice(["enqueue", "enqueue", "complete", "release", "priority", "purge"])
            if move == "enqueue":
                await jobs.enqueue(store, f"hash-{chance.randrange(4)}", priority=chance.randrange(-3, 4))
            elif move == "purge":
                await store.purge(Phase.COMPLETED, 2e9, 5)
            elif move == "priority":
                for seen in (await _seen(store))[:2]:
                    found = await store.load(seen.job_id)
                    if found is not None and found.phase is Phase.QUEUED:
                        change = Change(priority=chance.randrange(-3, 4))
                        await store.write(Write(found.job_id, AtRevision(found.revision), change))
            elif (taken := await lease_next(store, jobs.offer())) is not None:
                end = completion if move == "complete" else release
                assert await store.write(end(taken.dispatch.lease_ref())) is not None

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(work(number))
    assert await _problems(url) == []
    for store in stores:
        await store.close()


async def test_the_rows_of_many_priorities_are_added_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_counts, "MAX_ROWS", 4)
    store, jobs = PostgresStore(url), Jobs()
    await store.open()
    await fill_table(store)
    for priority in range(10):
        await jobs.enqueue(store, priority=priority)
    for _ in range(8):
        assert await lease_next(store, jobs.offer()) is not None
    await store.purge(Phase.COMPLETED, 0.0, 10)
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT priority, shard, waiting FROM comfyfleet.priority_tallies"
        ).fetchall()
    assert sorted(rows) == [(0, -1, 1), (1, -1, 1)]
    assert (await jobs.enqueue(store)).place == 2
    await store.close()
