"""Hints between engines on one PostgreSQL: they come when they can, and nothing depends on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
from tests.servers.postgres_database import empty_database
from tests.stores._postgres import Jobs, fill_table, until

from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.stores.postgres import PostgresStore

LISTENING = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN %' AND datname = current_database()"


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return empty_database(request.config)


class Ear:
    def __init__(self) -> None:
        self.heard = 0

    def __call__(self) -> None:
        self.heard += 1

    async def hears(self, more_than: int = 0) -> None:
        async def has_heard() -> bool:
            return self.heard > more_than

        await until(has_heard)


@pytest.fixture
async def stores(url: str) -> AsyncIterator[tuple[PostgresStore, PostgresStore]]:
    pair = PostgresStore(url), PostgresStore(url)
    for store in pair:
        await store.open()
    await fill_table(pair[0])
    yield pair
    for store in pair:
        await store.close()


async def test_a_job_queued_by_one_engine_wakes_the_other_and_not_itself(
    stores: tuple[PostgresStore, PostgresStore],
) -> None:
    here, there = Ear(), Ear()
    for store, ear in zip(stores, (here, there), strict=True):
        store.listen(ear)
        await ear.hears()
    assert (here.heard, there.heard) == (1, 1), "each looks once when it begins to listen"
    await Jobs().enqueue(stores[0])
    await there.hears(1)
    assert here.heard == 1


async def test_many_jobs_at_once_share_a_few_hints(stores: tuple[PostgresStore, PostgresStore]) -> None:
    ear, jobs = Ear(), Jobs()
    stores[1].listen(ear)
    await ear.hears()
    await asyncio.gather(*(jobs.enqueue(stores[0]) for _ in range(100)))
    await ear.hears(1)
    assert ear.heard < 50


async def test_a_class_put_by_one_engine_is_told_to_the_other_and_not_to_itself(
    stores: tuple[PostgresStore, PostgresStore],
) -> None:
    here, there, waking = Ear(), Ear(), Ear()
    for store, ear in zip(stores, (here, there), strict=True):
        store.listen(waking, None, ear)
    async with asyncio.timeout(60):
        while waking.heard < 2:
            await asyncio.sleep(0.01)
    cls = RequirementClass(Requirements(models=("new.safetensors",)))
    assert await stores[0].put_class(cls, [], version=(await stores[0].table()).version)
    await there.hears()
    assert (here.heard, waking.heard) == (0, 2)


async def test_a_listener_whose_connection_is_cut_listens_again(
    url: str, stores: tuple[PostgresStore, PostgresStore]
) -> None:
    ear = Ear()
    stores[1].listen(ear)
    await ear.hears()
    with psycopg.connect(url, autocommit=True) as connection:
        for (pid,) in connection.execute(LISTENING).fetchall():
            connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
    await ear.hears(1)
    before = ear.heard
    await Jobs().enqueue(stores[0])
    await ear.hears(before)


async def test_a_store_that_is_closed_hears_nothing_and_leaves_no_connection(url: str) -> None:
    ear, store = Ear(), PostgresStore(url)
    store.listen(ear)
    await store.open()
    await ear.hears()
    await store.close()
    await store.close()
    with psycopg.connect(url, autocommit=True) as connection:

        async def are_gone() -> bool:
            return connection.execute(LISTENING).fetchall() == []

        await until(are_gone)
