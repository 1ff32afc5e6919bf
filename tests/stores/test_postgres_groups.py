"""Leases asked for at one time: each caller gets what it would have got alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.servers.postgres_database import empty_database
from tests.stores._postgres import Jobs, fill_table

from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.dispatch import WriteResult
from comfyfleet.model.errors import Refusal
from comfyfleet.model.ids import PollId
from comfyfleet.stores.postgres import PostgresStore
from comfyfleet.testing.contract.store_bench import FAST, A, B
from comfyfleet.testing.leases import lease_next


@pytest.fixture
async def store(request: pytest.FixtureRequest) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(empty_database(request.config))
    await store.open()
    await fill_table(store)
    yield store
    await store.close()


async def test_a_blocked_worker_in_a_group_gets_none_of_what_it_must_not_get(store: PostgresStore) -> None:
    jobs = Jobs()
    for number in range(10):
        await jobs.enqueue(store, "bad" if number < 8 else "good")
    await store.put_block(Block(B, "bad", BlockReason.FAILURES, 1, 1e12))
    offers = [jobs.offer(B if number % 3 == 1 else A, FAST) for number in range(8)]
    taken = await asyncio.gather(*(lease_next(store, offer) for offer in offers))
    got = {
        (offer.worker_id, written.dispatch.workflow_hash)
        for offer, written in zip(offers, taken, strict=True)
        if written is not None
    }
    assert (B, "bad") not in got
    assert (B, "good") in got
    assert sum(written is not None for written in taken) >= 7
    assert len({written.dispatch.job_id for written in taken if written is not None}) == sum(
        written is not None for written in taken
    )


async def test_what_waits_is_found_though_more_empty_lanes_than_are_looked_at_stand_before_it(
    store: PostgresStore,
) -> None:
    jobs = Jobs()
    before = [await jobs.enqueue(store, f"hash-{number}", priority=5) for number in range(47)]
    behind = await jobs.enqueue(store, "last")
    taken = await asyncio.gather(*(lease_next(store, jobs.offer()) for _ in before))
    assert all(written is not None for written in taken)
    last = await lease_next(store, jobs.offer())
    assert last is not None
    assert last.dispatch.job_id == behind.job_id
    assert await lease_next(store, jobs.offer()) is None


async def test_an_offer_that_cannot_be_written_is_refused_alone(store: PostgresStore) -> None:
    jobs = Jobs()
    for _ in range(8):
        await jobs.enqueue(store)
    offers = [jobs.offer() for _ in range(8)]
    offers[4] = msgspec.structs.replace(offers[4], poll_id=PollId("no\x00text"))
    taken = await asyncio.gather(*(lease_next(store, offer) for offer in offers), return_exceptions=True)
    refused = [each for each in taken if isinstance(each, BaseException)]
    assert [type(each) for each in refused] == [Refusal]
    assert taken[4] is refused[0]
    assert all(isinstance(each, WriteResult) for number, each in enumerate(taken) if number != 4)
