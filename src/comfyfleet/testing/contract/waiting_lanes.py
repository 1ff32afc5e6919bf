"""The store contract for the overview of waiting jobs by lane."""

from __future__ import annotations

from comfyfleet.model.dispatch import Change, Dispatch, Phase, Readiness
from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.tenant import TenantTerms
from comfyfleet.ports import LaneBacklog, QueuePlace
from comfyfleet.testing.contract.store_bench import FOR_FAST, StoreBench, tenant


def place(dispatch: Dispatch) -> QueuePlace:
    return QueuePlace(dispatch.sequence, dispatch.queued_at, dispatch.place)


class WaitingLanesContract:
    async def test_an_empty_queue_has_no_waiting_lanes(self, bench: StoreBench) -> None:
        assert await bench.store.waiting_lanes(10) == []
        await bench.leased()
        assert await bench.store.waiting_lanes(10) == []

    async def test_a_lane_shows_how_many_jobs_wait_and_its_oldest_and_newest(self, bench: StoreBench) -> None:
        first = await bench.enqueue(place=1)
        await bench.enqueue(place=1)
        await bench.clock.advance(5)
        last, single = await bench.enqueue(place=1), await bench.enqueue(FOR_FAST)
        found = {each.lane: each for each in await bench.store.waiting_lanes(10)}
        assert found == {
            first.lane: LaneBacklog(first.lane, 3, place(first), place(last)),
            single.lane: LaneBacklog(single.lane, 1, place(single), place(single)),
        }
        assert found[first.lane].newest.place == 3

    async def test_a_leased_or_paused_job_waits_in_no_lane(self, bench: StoreBench) -> None:
        first, second, third = [await bench.enqueue() for _ in range(3)]
        assert await bench.store.lease(first.job_id, bench.offer()) is not None
        assert await bench.change(third, Change(standing=Readiness.PAUSED)) is not None
        assert await bench.store.waiting_lanes(10) == [
            LaneBacklog(second.lane, 1, place(second), place(second))
        ]
        assert await bench.change(second, Change(phase=Phase.CANCELLED)) is not None
        assert await bench.store.waiting_lanes(10) == []

    async def test_the_highest_priorities_come_first_and_the_limit_holds(self, bench: StoreBench) -> None:
        for number in range(5):
            await bench.enqueue(workflow_hash=WorkflowHash(f"low-{number}"), priority=-1000)
        middle, high = await bench.enqueue(), await bench.enqueue(priority=900)
        found = await bench.store.waiting_lanes(4)
        assert [each.lane for each in found[:2]] == [high.lane, middle.lane]
        assert [each.lane.priority for each in found[2:]] == [-1000, -1000]
        assert len(await bench.store.waiting_lanes(100)) == 7
        assert [each.lane for each in await bench.store.waiting_lanes(1)] == [high.lane]

    async def test_a_job_that_changes_its_priority_changes_its_lane(self, bench: StoreBench) -> None:
        job = await bench.enqueue()
        written = await bench.change(job, Change(priority=5))
        assert written is not None
        assert [each.lane for each in await bench.store.waiting_lanes(10)] == [written.dispatch.lane]

    async def test_lanes_of_a_tenant_that_is_held_are_shown(self, bench: StoreBench) -> None:
        ann = tenant("ann")
        await bench.store.fair_share.put_terms(TenantTerms(ann, held_until=float("inf")))
        job = await bench.enqueue(tenant=ann)
        assert [each.lane for each in await bench.store.waiting_lanes(10)] == [job.lane]
