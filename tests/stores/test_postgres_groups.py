"""Leases asked for at one time are one transaction; each caller gets what it would have got alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from tests.servers.postgres_database import empty_database
from tests.stores._postgres import Jobs, fill_table

from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.dispatch import Phase, WriteResult
from comfyfleet.model.errors import Refusal
from comfyfleet.model.ids import PollId
from comfyfleet.stores.postgres import PostgresStore, leases
from comfyfleet.stores.postgres.connections import MAX_GROUP, CallBatcher, ConnectionPool, SqlStep
from comfyfleet.testing.contract.store_bench import FAST, A, B


class Desk:
    """Answers a group when it is told to."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.is_open = asyncio.Event()
        self.fault: Exception | None = None

    async def answer(self, questions: Sequence[int]) -> list[int]:
        self.groups.append(list(questions))
        await self.is_open.wait()
        if self.fault is not None:
            raise self.fault
        return [question * 10 for question in questions]


async def test_who_comes_alone_goes_alone_and_who_comes_meanwhile_goes_together() -> None:
    desk = Desk()
    groups: CallBatcher[int, int] = CallBatcher(desk.answer)
    first = asyncio.ensure_future(groups.ask("kind", 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(groups.ask("kind", number)) for number in (2, 3, 4)]
    other_kind = asyncio.ensure_future(groups.ask("other", 5))
    await asyncio.sleep(0)
    others[1].cancel()
    await asyncio.sleep(0)
    desk.is_open.set()
    assert list(await asyncio.gather(first, others[0], others[2], other_kind)) == [10, 20, 40, 50]
    assert desk.groups == [[1], [5], [2, 4]], (
        "who went away is left out, and kinds do not wait for one another"
    )
    await groups.close()


async def test_a_fault_is_told_to_everyone_of_its_group_and_to_nobody_else() -> None:
    desk = Desk()
    groups: CallBatcher[int, int] = CallBatcher(desk.answer)
    desk.is_open.set()
    desk.fault = ValueError("no")
    failed = await asyncio.gather(
        *(groups.ask("kind", number) for number in range(3)), return_exceptions=True
    )
    assert failed == [desk.fault] * 3
    desk.fault = None
    assert await groups.ask("kind", 7) == 70
    await groups.close()


async def test_a_group_has_a_bound() -> None:
    desk = Desk()
    groups: CallBatcher[int, int] = CallBatcher(desk.answer)
    desk.is_open.set()
    count = 2 * MAX_GROUP + 5
    answers = await asyncio.gather(*(groups.ask("kind", number) for number in range(count)))
    assert answers == [number * 10 for number in range(count)]
    assert max(len(group) for group in desk.groups) == MAX_GROUP
    await groups.close()


@pytest.fixture
async def store(request: pytest.FixtureRequest) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(empty_database(request.config))
    await store.open()
    await fill_table(store)
    yield store
    await store.close()


async def test_fifty_leases_at_one_time_are_fifty_jobs_in_few_transactions(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs()
    waiting = [await jobs.enqueue(store, f"hash-{number % 7}") for number in range(60)]
    transactions = 0
    real = ConnectionPool.transact

    async def counted(pool: ConnectionPool, work: Callable[[SqlStep], Awaitable[Any]]) -> Any:
        nonlocal transactions
        transactions += 1
        return await real(pool, work)

    monkeypatch.setattr(ConnectionPool, "transact", counted)
    taken = await asyncio.gather(*(store.lease_next(jobs.offer()) for _ in range(50)))
    assert transactions <= 3
    dispatches = [written.dispatch for written in taken if written is not None]
    assert [each.job_id for each in dispatches] == [each.job_id for each in waiting[:50]]
    for written in taken:
        assert written is not None
        lease = written.dispatch.lease
        assert lease is not None
        assert await store.load(written.dispatch.job_id) == written.dispatch
        assert (await store.facts(written.dispatch.job_id))[-1:] == list(written.facts)
        assert [each.lease_number for each in await store.attempts(written.dispatch.job_id)] == [1]
        assert await store.leased_by_poll(lease.poll_id) == written.dispatch
    counts = await store.counts()
    assert (counts.waiting, counts.by_phase[Phase.LEASED]) == (10, 50)


async def test_a_blocked_worker_in_a_group_gets_none_of_what_it_must_not_get(store: PostgresStore) -> None:
    jobs = Jobs()
    for number in range(10):
        await jobs.enqueue(store, "bad" if number < 8 else "good")
    await store.put_block(Block(B, "bad", BlockReason.FAILURES, 1, 1e12))
    offers = [jobs.offer(B if number % 3 == 1 else A, FAST) for number in range(8)]
    taken = await asyncio.gather(*(store.lease_next(offer) for offer in offers))
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
    before = [await jobs.enqueue(store, f"hash-{number}", priority=5) for number in range(leases.SPARE + 40)]
    behind = await jobs.enqueue(store, "last")
    taken = await asyncio.gather(*(store.lease_next(jobs.offer()) for _ in before))
    assert all(written is not None for written in taken)
    last = await store.lease_next(jobs.offer())
    assert last is not None
    assert last.dispatch.job_id == behind.job_id
    assert await store.lease_next(jobs.offer()) is None


async def test_an_offer_that_cannot_be_written_is_refused_alone(store: PostgresStore) -> None:
    jobs = Jobs()
    for _ in range(8):
        await jobs.enqueue(store)
    offers = [jobs.offer() for _ in range(8)]
    offers[4] = msgspec.structs.replace(offers[4], poll_id=PollId("no\x00text"))
    taken = await asyncio.gather(*(store.lease_next(offer) for offer in offers), return_exceptions=True)
    refused = [each for each in taken if isinstance(each, BaseException)]
    assert [type(each) for each in refused] == [Refusal]
    assert taken[4] is refused[0]
    assert all(isinstance(each, WriteResult) for number, each in enumerate(taken) if number != 4)
