"""The store contract for jobs that wait for others: held, awaited, and released under a guard."""

from __future__ import annotations

from comfyfleet.model.dispatch import Change, Phase, Readiness
from comfyfleet.testing.contract.store_bench import StoreBench, completion


class HeldJobContract:
    async def test_a_held_job_is_queued_and_in_no_lane_until_it_is_let_go(self, bench: StoreBench) -> None:
        look_at = bench.clock.now() + 5
        held = await bench.enqueue(awaits_jobs=True, standing=Readiness.DELAYED, wake_at=look_at)
        other = await bench.enqueue()
        assert held.awaits_jobs and await bench.store.load(held.job_id) == held
        assert await bench.peek() == [other.job_id]
        assert await bench.store.lease(held.job_id, bench.offer()) is None
        counts = await bench.store.counts()
        assert (counts.waiting, counts.delayed, counts.by_phase[Phase.QUEUED]) == (1, 1, 2)
        await bench.clock.advance(5)
        assert await bench.store.due(10) == [held], "a sweep finds it by itself"
        free = Change(awaits_jobs=False, standing=Readiness.IN_LANE, wake_at=None)
        assert await bench.change(held, free) is not None
        assert await bench.change(held, free) is None, "who read the same may not do it again"
        assert await bench.peek() == [held.job_id, other.job_id], "at the place of its age"
        taken = await bench.lease_next()
        assert taken is not None and (taken.job_id, taken.awaits_jobs) == (held.job_id, False)

    async def test_a_mark_on_a_job_stays_through_lease_and_end_and_spoils_no_report(
        self, bench: StoreBench
    ) -> None:
        waiting = await bench.enqueue()
        marked = await bench.change(waiting, Change(is_awaited=True))
        assert marked is not None and marked.dispatch.is_awaited and marked.dispatch.stands_in_lane
        taken = await bench.lease_next()
        assert taken is not None and taken.is_awaited
        ended = await bench.store.write(completion(taken.lease_ref()))
        assert ended is not None and ended.dispatch.is_awaited
        found = await bench.store.load(waiting.job_id)
        assert found == ended.dispatch

    async def test_a_running_job_is_marked_under_its_lease_and_its_worker_reports_as_before(
        self, bench: StoreBench
    ) -> None:
        running, ref = await bench.leased()
        assert await bench.change(running, Change(is_awaited=True)) is not None
        assert await bench.change(running, Change(is_awaited=True)) is None
        (state,) = await bench.store.heartbeat([ref], 60)
        assert state.is_alive
        finished = await bench.store.write(completion(ref))
        assert finished is not None and finished.dispatch.is_awaited
