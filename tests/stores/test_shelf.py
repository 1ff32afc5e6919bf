"""What an in-process store forgets when there is too much: counts before blocks, old lessons before new ones."""

from __future__ import annotations

from comfyfleet.model.block import Block, BlockReason, Pair
from comfyfleet.model.ids import WorkerId, WorkflowHash
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.stores.inprocess.blocks import (
    MAX_PAIRS_PER_WORKER,
    MAX_WORKFLOW_STATS,
    BlockTable,
    WorkflowStatsTable,
)

A = WorkerId("a")


def test_pairs_of_a_worker_are_bounded_and_a_block_in_force_outlives_older_and_younger_counts() -> None:
    blocks = BlockTable()
    in_force = Block(A, "blocked", BlockReason.FAILURES, 1, 100.0)
    blocks.put(in_force)
    for number in range(MAX_PAIRS_PER_WORKER + 10):
        blocks.put(Block(A, f"hash-{number}", BlockReason.FAILURES, 1))
    assert len(blocks.listing(A)) == MAX_PAIRS_PER_WORKER
    assert blocks.get(in_force.pair) == in_force
    assert blocks.get(Pair(A, "hash-0")) is None
    assert blocks.blocked_targets(A, 50.0) == {"blocked"}
    assert blocks.blocked_targets(A, 100.0) == set()


def test_what_is_blocked_is_seen_anew_after_every_change() -> None:
    blocks = BlockTable()
    for target, end in (("x", 10.0), ("y", 20.0)):
        blocks.put(Block(A, target, BlockReason.FAILURES, 1, end))
    assert blocks.blocked_targets(A, 5.0) == {"x", "y"}
    assert blocks.blocked_targets(A, 10.0) == {"y"}
    blocks.put(Block(A, "z", BlockReason.FAILURES, 1, 30.0))
    assert blocks.blocked_targets(A, 11.0) == {"y", "z"}
    blocks.lift(Pair(A, "y"))
    assert blocks.blocked_targets(A, 12.0) == {"z"}
    blocks.forget_worker(A)
    assert blocks.blocked_targets(A, 13.0) == set()


def test_the_longest_unused_lesson_is_forgotten_first() -> None:
    workflow_stats = WorkflowStatsTable()
    for number in range(MAX_WORKFLOW_STATS + 1):
        workflow_stats.put(WorkflowStats(WorkflowHash(f"hash-{number}")))
        if number == 1:
            workflow_stats.put(WorkflowStats(WorkflowHash("hash-0"), memory_above_gb=8))
    assert workflow_stats.get(WorkflowHash("hash-1")) is None
    kept = workflow_stats.get(WorkflowHash("hash-0"))
    assert kept is not None
    assert kept.memory_above_gb == 8
