"""The store contract for two writers of the same job, and for jobs that return to the queue."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from comfyfleet.model.dispatch import AttemptOutcome, Change, Phase, Readiness
from comfyfleet.model.fact import FactDraft, FactKind
from comfyfleet.testing.contract.store_bench import A, B, StoreBench, completion, failure, release


class RaceContract:
    # races

    async def test_of_two_jobs_under_one_reference_in_one_turn_one_is_taken_in(
        self, bench: StoreBench
    ) -> None:
        first, second = await asyncio.gather(bench.enqueue(reference="mine"), bench.enqueue(reference="mine"))
        assert first == second
        assert (await bench.store.counts()).waiting == 1
        found = await bench.store.records.by_reference(first.tenant, "mine")
        assert found is not None and found.job_id == first.job_id

    async def test_a_cancel_that_comes_first_leaves_nothing_for_the_report(self, bench: StoreBench) -> None:
        dispatch, ref = await bench.leased()
        assert await bench.cancel(dispatch) is not None
        before = await bench.state()
        assert await bench.store.write(completion(ref)) is None
        assert await bench.store.write(failure(ref)) is None
        (state,) = await bench.store.heartbeat([ref], 60)
        assert not state.is_alive
        assert await bench.state() == before
        found = await bench.store.load(ref.job_id)
        assert found is not None and found.phase is Phase.CANCELLED
        (attempt,) = await bench.store.attempts(ref.job_id)
        assert attempt.outcome is AttemptOutcome.CANCELLED

    async def test_a_cancel_that_comes_after_the_report_changes_nothing(self, bench: StoreBench) -> None:
        dispatch, ref = await bench.leased()
        assert await bench.store.write(completion(ref)) is not None
        before = await bench.state()
        assert await bench.cancel(dispatch) is None, "it was read before the report"
        assert await bench.state() == before

    async def test_a_cancel_of_a_waiting_job_and_its_lease_have_one_winner(self, bench: StoreBench) -> None:
        waiting = await bench.enqueue()
        taken = await bench.store.lease(waiting.job_id, bench.offer())
        assert taken is not None
        assert await bench.cancel(waiting) is None, "it was read before the lease"
        assert await bench.cancel(taken.dispatch) is not None
        assert await bench.store.lease(waiting.job_id, bench.offer(B)) is None

    async def test_of_two_reports_on_one_lease_the_second_changes_nothing(self, bench: StoreBench) -> None:
        _, ref = await bench.leased()
        assert await bench.store.write(failure(ref)) is not None
        before = await bench.state()
        assert await bench.store.write(completion(ref)) is None
        assert await bench.store.write(failure(ref)) is None
        after = await bench.state()
        assert after | {"polls": None} == before | {"polls": None}

    async def test_a_lease_that_has_run_out_is_good_until_somebody_writes_its_end(
        self, bench: StoreBench
    ) -> None:
        """Time alone changes nothing: the first writer wins, the worker or the engine that noticed."""
        _, ref = await bench.leased()
        await bench.clock.advance(1000)
        (expired,) = await bench.store.due(10)
        (state,) = await bench.store.heartbeat([ref], 60)
        assert state.is_alive
        end = release(ref)
        assert await bench.change(expired, end.change, attempt_end=end.attempt_end) is None
        assert await bench.store.write(completion(ref)) is not None

    # returning jobs

    @pytest.mark.parametrize("delay", [None, 5.0])
    async def test_a_job_that_is_tried_again_returns_to_its_own_place(
        self, bench: StoreBench, delay: float | None
    ) -> None:
        _, ref = await bench.leased()
        later = await bench.enqueue()
        wake_at = None if delay is None else bench.clock.now() + delay
        back = Change(
            phase=Phase.QUEUED,
            lease=None,
            standing=Readiness.IN_LANE if delay is None else Readiness.DELAYED,
            not_before=wake_at,
            wake_at=wake_at,
            charged=1,
            failed_on=(A,),
        )
        retry = msgspec.structs.replace(release(ref), change=back)
        assert await bench.store.write(retry) is not None
        if delay is not None:
            assert await bench.peek() == [later.job_id]
            await bench.clock.advance(delay)
            (due,) = await bench.store.due(10)
            awake = Change(standing=Readiness.IN_LANE, wake_at=None, not_before=None)
            assert await bench.change(due, awake) is not None
        assert await bench.peek() == [ref.job_id, later.job_id]
        taken = await bench.lease_next(B)
        assert taken is not None
        assert (taken.job_id, taken.charged, taken.failed_on) == (ref.job_id, 1, (A,))

    async def test_a_new_round_is_the_same_job_at_its_old_place_with_leases_that_go_on(
        self, bench: StoreBench
    ) -> None:
        _, ref = await bench.leased(reference="mine")
        later = await bench.enqueue()
        failed = await bench.store.write(failure(ref))
        assert failed is not None
        again: dict[str, Any] = {
            "facts": (FactDraft(FactKind.QUEUED),),
            "job": {"phase": Phase.QUEUED, "round": 2, "result": None},
        }
        opened = await bench.change(
            failed.dispatch, Change(phase=Phase.QUEUED, round=2, attempts=0, charged=0), **again
        )
        assert opened is not None
        assert await bench.peek() == [ref.job_id, later.job_id]
        assert await bench.store.write(completion(ref)) is None, "a lease of the round before"
        taken = await bench.lease_next()
        assert taken is not None
        assert (taken.job_id, taken.round, taken.lease_number) == (ref.job_id, 2, 2)
        facts = await bench.store.facts(ref.job_id)
        assert [(fact.number, fact.round) for fact in facts] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
        attempts = await bench.store.attempts(ref.job_id)
        assert [(each.round, each.lease_number) for each in attempts] == [(1, 1), (2, 2)]
        record = await bench.store.records.by_reference(taken.tenant, "mine")
        assert record is not None
        assert (record.job_id, record.round) == (ref.job_id, 2)

    async def test_a_delayed_job_falls_due_at_its_time_and_takes_the_place_of_its_age(
        self, bench: StoreBench
    ) -> None:
        at = bench.clock.now() + 5
        delayed = await bench.enqueue(standing=Readiness.DELAYED, not_before=at, wake_at=at)
        later = await bench.enqueue()
        assert (await bench.store.counts()).delayed == 1
        assert await bench.store.next_due() == at
        assert await bench.lease_next() is not None
        assert await bench.lease_next() is None
        await bench.clock.advance(5)
        assert await bench.lease_next() is None, "a store does not decide that its time has come"
        assert [each.job_id for each in await bench.store.due(10)] == [delayed.job_id]
        third = await bench.enqueue()
        assert await bench.change(delayed, Change(standing=Readiness.IN_LANE, wake_at=None)) is not None
        assert await bench.peek() == [delayed.job_id, third.job_id]
        assert await bench.store.position(later.job_id) is None
