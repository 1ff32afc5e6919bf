"""The store contract for counts and workflow statistics: increments, never overwrites."""

from __future__ import annotations

import asyncio

import msgspec

from comfyfleet.model.worker import Capabilities, LiveState, Service, WorkerDelta, WorkerRecord
from comfyfleet.model.workflow_stats import MeanDuration, WorkflowStats, WorkflowStatsDelta
from comfyfleet.testing.contract.store_bench import FAST, HASH, A, StoreBench, tenant


class StatisticsContract:
    async def test_totals_are_added_to_and_undo_nothing_that_is_written_meanwhile(
        self, bench: StoreBench
    ) -> None:
        """By a writer that read the record earlier."""
        worker = WorkerRecord(
            A, Capabilities((Service("comfyui"),)), FAST, 1, 1.0, 5.0, completed=3, busy_s=0.1
        )
        await bench.store.put_worker(worker)
        live = LiveState(last_workflow=HASH)
        noted = await bench.store.apply_worker_delta(A, WorkerDelta(1, 2, 0.2, 4.0, live))
        assert noted == msgspec.structs.replace(worker, completed=4, failed=2, busy_s=0.1 + 0.2, live=live)
        assert await bench.store.replace_worker(msgspec.structs.replace(worker, is_paused=True)) is True
        paused = msgspec.structs.replace(
            worker, is_paused=True, completed=4, failed=2, busy_s=0.1 + 0.2, revision=1
        )
        assert await bench.store.get_worker(A) == paused
        noted = await bench.store.apply_worker_delta(A, WorkerDelta(completed=1, seen_at=9.0))
        assert noted == msgspec.structs.replace(paused, completed=5, last_seen_at=9.0)
        await asyncio.gather(
            *(bench.store.apply_worker_delta(A, WorkerDelta(completed=1)) for _ in range(20))
        )
        assert await bench.store.workers() == [msgspec.structs.replace(noted, completed=25)]

    async def test_what_several_learn_at_once_is_all_kept(self, bench: StoreBench) -> None:
        store = bench.store
        first = WorkflowStatsDelta(HASH, "card", 3.0, 0.2, 2)
        assert await store.add_workflow_stats(first) == WorkflowStats(HASH, {"card": MeanDuration(3.0, 1)})
        runs = [WorkflowStatsDelta(HASH, "card", 3.0, 0.2, 2) for _ in range(20)]
        small = [
            WorkflowStatsDelta(HASH, tenant=tenant("ann"), memory_gb=gb, most_tenants=2)
            for gb in (8.0, 24.0, 12.0)
        ]
        await asyncio.gather(*(store.add_workflow_stats(delta) for delta in (*runs, *small)))
        known = WorkflowStats(HASH, {"card": MeanDuration(3.0, 21)}, memory_by_tenant={tenant("ann"): 24.0})
        assert await store.get_workflow_stats(HASH) == known
        after = await store.add_workflow_stats(WorkflowStatsDelta(HASH, "card", 8.0, 0.2, 2))
        assert after.durations == {"card": MeanDuration(3.0 + 0.2 * 5.0, 22, 0.2 * 5.0)}, (
            "the newest counts, but not alone"
        )
        await store.add_workflow_stats(WorkflowStatsDelta(HASH, "other", 1.0, 0.2, 2))
        after = await store.add_workflow_stats(WorkflowStatsDelta(HASH, "third", 1.0, 0.2, 2))
        assert set(after.durations) == {"card", "other"}, "no more than are wanted"
