"""The store contract for dispatches whose records are in a tenant database.

An end without a settlement is found and kept, a repeated enqueue changes nothing, and many are read at once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.dispatch import (
    TOMBSTONE_S,
    Change,
    Dispatch,
    HeldBy,
    Phase,
    Readiness,
    Write,
    WriteResult,
)
from comfyfleet.model.ids import JobId
from comfyfleet.testing.contract.store_bench import QUEUED, A, StoreBench, completion, failure, unknown_class

RETRIED = Change(phase=Phase.QUEUED, round=2, standing=Readiness.IN_LANE, settled_at=None)


async def ended(bench: StoreBench, write: Any = completion, **fields: Any) -> Dispatch:
    _, ref = await bench.leased(**fields)
    written = await bench.store.write(write(ref))
    assert written is not None
    return written.dispatch


async def settle(bench: StoreBench, dispatch: Dispatch) -> Dispatch:
    written = await bench.change(dispatch, Change(settled_at=bench.clock.now()))
    assert written is not None
    return written.dispatch


class SettlementContract:
    # ends without a settlement

    async def test_ended_jobs_with_a_tenant_database_are_listed_by_id_and_no_others(
        self, bench: StoreBench
    ) -> None:
        await ended(bench)
        await bench.leased(has_tenant_database=True)
        await bench.enqueue(has_tenant_database=True)
        blocks = (Block(A, "other", BlockReason.FAILURES, 1),)
        found = [
            await ended(bench, has_tenant_database=True),
            await ended(bench, failure, has_tenant_database=True),
            await ended(bench, lambda ref: failure(ref, blocks=blocks), has_tenant_database=True),
        ]
        leased, ref = await bench.leased(has_tenant_database=True)
        waiting = await bench.enqueue(has_tenant_database=True)
        _, last = await bench.leased(has_tenant_database=True)
        finished = await bench.store.write(completion(last))
        for written in (await bench.cancel(leased), await bench.cancel(waiting), finished):
            assert written is not None
            found.append(written.dispatch)
        assert await bench.store.write(completion(ref)) is None
        assert all(each.has_tenant_database and each.settled_at is None for each in found)
        assert await bench.store.unsettled(100) == found
        assert await bench.store.unsettled(2) == found[:2]
        assert await bench.store.unsettled(2, after=found[1].job_id) == found[2:4]
        assert await bench.store.unsettled(9, after=found[-1].job_id) == []

    async def test_they_are_listed_in_the_order_of_ids_and_not_of_ends(self, bench: StoreBench) -> None:
        leased = [await bench.leased(has_tenant_database=True) for _ in range(3)]
        for place in (1, 2, 0):
            assert await bench.store.write(completion(leased[place][1])) is not None
        found = await bench.store.unsettled(10)
        assert [each.job_id for each in found] == [dispatch.job_id for dispatch, _ in leased]

    async def test_what_is_settled_is_listed_no_more_and_nothing_else_of_it_changes(
        self, bench: StoreBench
    ) -> None:
        over, other = (
            await ended(bench, has_tenant_database=True),
            await ended(bench, failure, has_tenant_database=True),
        )
        store = bench.store
        facts, attempts = await store.facts(over.job_id), await store.attempts(over.job_id)
        counts, record = await store.counts(), await store.records.get(over.job_id)
        now = bench.clock.now()
        settled = await bench.change(over, Change(settled_at=now))
        after = msgspec.structs.replace(over, settled_at=now, revision=over.revision + 1)
        assert settled == WriteResult(after, ())
        assert await store.load(over.job_id) == after
        assert await store.unsettled(10) == [other]
        assert await bench.change(over, Change(settled_at=now)) is None, "somebody has written it since"
        assert await store.facts(over.job_id) == facts
        assert await store.attempts(over.job_id) == attempts
        assert await store.counts() == counts
        assert await store.records.get(over.job_id) == record
        assert await store.dead_letter(10) == [other]

    async def test_a_round_that_is_opened_again_is_listed_at_its_own_end(self, bench: StoreBench) -> None:
        for is_settled in (True, False):
            over = await ended(bench, failure, has_tenant_database=True)
            if is_settled:
                over = await settle(bench, over)
            retried = await bench.change(over, RETRIED, job={"phase": Phase.QUEUED})
            assert retried is not None and retried.dispatch.settled_at is None
            assert await bench.store.unsettled(10) == []
            taken = await bench.store.lease(over.job_id, bench.offer())
            assert taken is not None
            again = await bench.store.write(completion(taken.dispatch.lease_ref()))
            assert again is not None and again.dispatch.round == 2
            assert await bench.store.unsettled(10) == [again.dispatch]
            await settle(bench, again.dispatch)

    # retention

    async def test_an_unsettled_end_is_not_purged_and_holds_up_nobody(self, bench: StoreBench) -> None:
        for write, phase in ((completion, Phase.COMPLETED), (failure, Phase.FAILED)):
            first = await ended(bench, write, has_tenant_database=True)
            plain = await ended(bench, write)
            await bench.clock.advance(1e6)
            now = bench.clock.now()
            assert await bench.store.purge(phase, now, 1) == 1
            assert await bench.store.load(plain.job_id) is None
            assert await bench.store.purge(phase, now, 1) == 0
            assert await bench.store.load(first.job_id) == first
            assert first in await bench.store.unsettled(10)
            assert (await bench.store.counts()).by_phase[phase] == 1
        assert await bench.store.dead_letter(10) == [first], "it failed, settled or not"

    async def test_a_settled_end_is_kept_until_no_relay_can_be_on_its_way(self, bench: StoreBench) -> None:
        over = await ended(bench, failure, has_tenant_database=True, reference="mine")
        await bench.clock.advance(1e6)
        await settle(bench, over)
        plain = await ended(bench, failure)
        await bench.clock.advance(TOMBSTONE_S - 1)
        assert await bench.store.purge(Phase.FAILED, bench.clock.now(), 1) == 1
        assert await bench.store.load(plain.job_id) is None, "nobody waits behind it"
        assert await bench.store.purge(Phase.FAILED, bench.clock.now(), 10) == 0
        await bench.clock.advance(2)
        assert await bench.store.purge(Phase.FAILED, bench.clock.now() - 100, 10) == 0
        assert await bench.store.purge(Phase.FAILED, bench.clock.now(), 10) == 1
        assert await bench.store.load(over.job_id) is None
        assert await bench.store.records.by_reference(over.tenant, "mine") is None
        assert await bench.store.dead_letter(10) == await bench.store.unsettled(10) == []
        assert (await bench.store.counts()).by_phase == dict.fromkeys(Phase, 0)

    async def test_more_young_ends_than_a_purge_may_take_hide_no_old_one(self, bench: StoreBench) -> None:
        for _ in range(5):
            await settle(bench, await ended(bench, has_tenant_database=True))
        plain = [await ended(bench) for _ in range(3)]
        await bench.clock.advance(1)
        assert await bench.store.purge(Phase.COMPLETED, bench.clock.now(), 2) == 2
        assert await bench.store.load_many([each.job_id for each in plain]) == [None, None, plain[2]]
        await bench.clock.advance(TOMBSTONE_S)
        assert await bench.store.purge(Phase.COMPLETED, bench.clock.now(), 5) == 5
        assert await bench.store.purge(Phase.COMPLETED, bench.clock.now(), 5) == 1

    # repeated enqueue

    async def test_an_enqueue_that_is_repeated_answers_what_is_there_and_changes_nothing(
        self, bench: StoreBench
    ) -> None:
        waiting = await bench.enqueue(has_tenant_database=True, reference="mine", standing=Readiness.PAUSED)
        leased, _ = await bench.leased(has_tenant_database=True)
        over = await ended(bench, has_tenant_database=True)
        settled = await settle(bench, await ended(bench, failure, has_tenant_database=True))
        before = await bench.state()
        for known in (waiting, leased, over, settled):
            fields: dict[str, Any] = {"phase": Phase.QUEUED, "lease": None, "revision": 0, "sequence": 0}
            for more in ({}, {"class_key": unknown_class()}, {"wake_at": 5.0, "priority": 9}):
                first = msgspec.structs.replace(known, **{**fields, **more})
                job = bench.job(first, "another reference")
                assert await bench.store.enqueue(first, job, QUEUED) == WriteResult(known, ())
            assert await bench.store.records.by_reference(known.tenant, "another reference") is None
        assert await bench.state() == before

    async def test_a_job_whose_earlier_rounds_are_gone_comes_with_the_number_of_its_round(
        self, bench: StoreBench
    ) -> None:
        queued = await bench.enqueue(has_tenant_database=True, round=3)
        assert queued.round == 3
        taken = await bench.lease_next()
        assert taken is not None and (taken.round, taken.lease_number) == (3, 1)
        ref = taken.lease_ref()
        earlier = msgspec.structs.replace(ref, round=1)
        assert await bench.store.write(Write(ref.job_id, HeldBy(earlier), Change(charged=1))) is None
        assert await bench.store.write(completion(ref)) is not None
        assert {fact.round for fact in await bench.store.facts(ref.job_id)} == {3}
        (attempt,) = await bench.store.attempts(ref.job_id)
        assert (attempt.round, attempt.attempt_id) == (3, f"{ref.job_id}/3/1/{ref.epoch}")
        record = await bench.store.records.get(ref.job_id)
        assert record is not None and record.round == 3

    async def test_an_end_can_come_before_its_job_and_keeps_it_out(self, bench: StoreBench) -> None:
        counts = await bench.store.counts()
        tombstone = await bench.enqueue(has_tenant_database=True, phase=Phase.CANCELLED)
        assert await bench.store.unsettled(10) == [tombstone]
        assert await bench.peek() == [] and await bench.lease_next() is None
        late = msgspec.structs.replace(tombstone, phase=Phase.QUEUED, sequence=0)
        assert await bench.store.enqueue(late, bench.job(late), QUEUED) == WriteResult(tombstone, ())
        assert (await bench.store.counts()).by_phase[Phase.CANCELLED] == 1
        await settle(bench, tombstone)
        await bench.clock.advance(TOMBSTONE_S + 1)
        assert await bench.store.purge(Phase.CANCELLED, bench.clock.now(), 10) == 1
        assert await bench.store.counts() == counts

    # batches

    async def test_many_are_looked_up_in_the_order_they_are_asked_for(self, bench: StoreBench) -> None:
        waiting, over = await bench.enqueue(), await ended(bench, has_tenant_database=True)
        leased, _ = await bench.leased()
        names = [over.job_id, JobId("nobody"), leased.job_id, waiting.job_id, over.job_id]
        assert await bench.store.load_many(names) == [over, None, leased, waiting, over]
        assert await bench.store.load_many([]) == []
