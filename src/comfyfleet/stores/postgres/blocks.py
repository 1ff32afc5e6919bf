"""SQL for blocks, workflow statistics and workers. Blocks and statistics are bounded and listed in insertion
order.

A write never restores a removed worker, nor undoes its newer registration.
"""

from __future__ import annotations

from collections.abc import Sequence

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.ids import WorkerId, WorkflowHash
from comfyfleet.model.worker import WorkerDelta, WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta
from comfyfleet.stores.inprocess.blocks import MAX_PAIRS_PER_WORKER, MAX_WORKFLOW_STATS
from comfyfleet.stores.postgres import codec
from comfyfleet.stores.postgres.connections import SqlStep

_PUT_BLOCK = """
INSERT INTO comfyfleet.blocks (worker_id, target, worker_order, number, blocked_until, body)
SELECT %(worker_id)s, %(target)s,
    coalesce((SELECT worker_order FROM comfyfleet.blocks WHERE worker_id = %(worker_id)s LIMIT 1), number),
    number, %(blocked_until)s, %(body)s
FROM nextval('comfyfleet.block_order') AS number
ON CONFLICT (worker_id, target) DO UPDATE
SET number = excluded.number, blocked_until = excluded.blocked_until, body = excluded.body
"""

# Evict a count before a block in force.
_BOUND_BLOCKS = """
DELETE FROM comfyfleet.blocks WHERE worker_id = %(worker_id)s AND target IN (
    SELECT target FROM comfyfleet.blocks WHERE worker_id = %(worker_id)s
    ORDER BY blocked_until IS NOT NULL, number
    LIMIT greatest((SELECT count(*) FROM comfyfleet.blocks WHERE worker_id = %(worker_id)s) - %(most)s, 0)
)
"""

_LIFT = "DELETE FROM comfyfleet.blocks WHERE worker_id = %s AND target = %s RETURNING body"

_PUT_WORKFLOW_STATS = """
INSERT INTO comfyfleet.lessons (workflow_hash, number, body) VALUES (%s, nextval('comfyfleet.lesson_order'), %s)
ON CONFLICT (workflow_hash) DO UPDATE SET number = excluded.number, body = excluded.body RETURNING number
"""

_BEGIN_WORKFLOW_STATS = """
INSERT INTO comfyfleet.lessons (workflow_hash, number, body) VALUES (%s, nextval('comfyfleet.lesson_order'), %s)
ON CONFLICT (workflow_hash) DO NOTHING RETURNING number
"""
_LOCK_WORKFLOW_STATS = "SELECT body FROM comfyfleet.lessons WHERE workflow_hash = %s FOR UPDATE"

_BOUND_WORKFLOW_STATS = """
DELETE FROM comfyfleet.lessons WHERE number <= (
    SELECT number FROM comfyfleet.lessons ORDER BY number DESC OFFSET %s LIMIT 1
)
"""
_BOUND_WORKFLOW_STATS_EVERY = 1000
_PUT_WORKER = """
INSERT INTO comfyfleet.workers (worker_id, body) VALUES (%s, %s)
ON CONFLICT (worker_id) DO UPDATE SET body = excluded.body
"""
_ADD_WORKER = """
INSERT INTO comfyfleet.workers (worker_id, body) VALUES (%s, %s)
ON CONFLICT (worker_id) DO NOTHING RETURNING worker_id
"""


async def _held_worker(step: SqlStep, worker_id: WorkerId) -> WorkerRecord | None:
    row = await step.row("SELECT body FROM comfyfleet.workers WHERE worker_id = %s FOR UPDATE", (worker_id,))
    return None if row is None else codec.decode_worker(row[0])


def _write_worker(step: SqlStep, worker: WorkerRecord) -> None:
    values = (codec.encode(worker), worker.worker_id)
    step.add("UPDATE comfyfleet.workers SET body = %s WHERE worker_id = %s", values)


async def put_worker(step: SqlStep, worker: WorkerRecord) -> None:
    step.add(_PUT_WORKER, (worker.worker_id, codec.encode(worker)))


async def add_worker(step: SqlStep, worker: WorkerRecord) -> bool:
    values = (worker.worker_id, codec.encode(worker))
    return await step.row(_ADD_WORKER, values) is not None


async def replace_worker(step: SqlStep, worker: WorkerRecord) -> bool:
    stored = await _held_worker(step, worker.worker_id)
    if stored is None or stored.revision != worker.revision:
        return False
    _write_worker(step, worker.merged_onto(stored))
    return True


async def apply_worker_delta(step: SqlStep, worker_id: WorkerId, delta: WorkerDelta) -> WorkerRecord | None:
    stored = await _held_worker(step, worker_id)
    if stored is None:
        return None
    noted = delta.apply(stored)
    _write_worker(step, noted)
    return noted


async def get_block(step: SqlStep, pair: Pair) -> Block | None:
    row = await step.row("SELECT body FROM comfyfleet.blocks WHERE worker_id = %s AND target = %s", pair)
    return None if row is None else codec.decode_block(row[0])


async def list_blocks(step: SqlStep, worker_id: WorkerId | None) -> list[Block]:
    found = await step.rows(
        "SELECT body FROM comfyfleet.blocks WHERE %(worker_id)s::text IS NULL OR worker_id = %(worker_id)s "
        "ORDER BY worker_order, number",
        {"worker_id": worker_id},
    )
    return [codec.decode_block(row[0]) for row in found]


def put_block(step: SqlStep, block: Block) -> None:
    step.add(
        _PUT_BLOCK,
        {
            "worker_id": block.worker_id,
            "target": block.target,
            "blocked_until": block.blocked_until,
            "body": codec.encode(block),
        },
    )
    step.add(_BOUND_BLOCKS, {"worker_id": block.worker_id, "most": MAX_PAIRS_PER_WORKER})


async def lift(step: SqlStep, pairs: Sequence[Pair]) -> list[Block]:
    if not pairs:
        return []
    answers = await step.ask(*((_LIFT, pair) for pair in pairs))
    return [codec.decode_block(row[0]) for found in answers for row in found]


def lift_unseen(step: SqlStep, pairs: Sequence[Pair]) -> None:
    for pair in pairs:
        step.add(_LIFT, pair)


async def take_expired(step: SqlStep, now: float) -> list[Block]:
    found = await step.rows("DELETE FROM comfyfleet.blocks WHERE blocked_until <= %s RETURNING body", (now,))
    expired = [codec.decode_block(row[0]) for row in found]
    return sorted(expired, key=lambda block: (block.blocked_until or 0.0, block.worker_id, block.target))


async def next_end(step: SqlStep) -> float | None:
    row = await step.row("SELECT min(blocked_until) FROM comfyfleet.blocks")
    return None if row is None else row[0]


async def get_workflow_stats(step: SqlStep, workflow_hash: WorkflowHash) -> WorkflowStats | None:
    row = await step.row("SELECT body FROM comfyfleet.lessons WHERE workflow_hash = %s", (workflow_hash,))
    return None if row is None else codec.decode_workflow_stats(row[0])


async def put_workflow_stats(step: SqlStep, stats: WorkflowStats) -> None:
    row = await step.row(_PUT_WORKFLOW_STATS, (stats.workflow_hash, codec.encode(stats)))
    # Evict the longest unused only now and then: counting at every update would cost more than the rows.
    if row is not None and row[0] % _BOUND_WORKFLOW_STATS_EVERY == 0:
        step.add(_BOUND_WORKFLOW_STATS, (MAX_WORKFLOW_STATS,))


async def add_workflow_stats(step: SqlStep, delta: WorkflowStatsDelta) -> WorkflowStats:
    # Lock an existing row, or two first updates would each write their own.
    empty = codec.encode(WorkflowStats(delta.workflow_hash))
    found = await step.ask(
        (_BEGIN_WORKFLOW_STATS, (delta.workflow_hash, empty)), (_LOCK_WORKFLOW_STATS, (delta.workflow_hash,))
    )
    stats = delta.apply(codec.decode_workflow_stats(found[1][0][0]))
    await put_workflow_stats(step, stats)
    return stats
