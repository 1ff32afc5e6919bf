"""Bounded tables of blocks and workflow statistics for in-process stores."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain

from comfyfleet.model.block import EVERY_WORKER, Block, Pair
from comfyfleet.model.ids import WorkerId, WorkflowHash
from comfyfleet.model.workflow_stats import WorkflowStats

MAX_PAIRS_PER_WORKER = 1024
MAX_WORKFLOW_STATS = 100_000

_NOTHING: frozenset[str] = frozenset()


class BlockTable:
    """Blocks in force, and failure counts towards a block, by worker."""

    def __init__(self) -> None:
        self._blocks: dict[WorkerId, dict[str, Block]] = {}
        self._ends: list[tuple[float, WorkerId, str]] = []
        self._targets: dict[WorkerId, tuple[float, frozenset[str]]] = {}

    def get(self, pair: Pair) -> Block | None:
        return self._blocks.get(pair.worker_id, {}).get(pair.target)

    def listing(self, worker_id: WorkerId | None) -> list[Block]:
        if worker_id is not None:
            return list(self._blocks.get(worker_id, {}).values())
        return [block for blocks in self._blocks.values() for block in blocks.values()]

    def put(self, block: Block) -> Pair | None:
        """Returns the pair that was evicted for it, if any."""
        forgotten = None
        mine = self._blocks.setdefault(block.worker_id, {})
        mine.pop(block.target, None)
        mine[block.target] = block
        if len(mine) > MAX_PAIRS_PER_WORKER:
            # Evict a count before a block in force.
            counting = (target for target, known in mine.items() if known.blocked_until is None)
            forgotten = mine.pop(next(counting, next(iter(mine)))).pair
        if block.blocked_until is not None:
            heappush(self._ends, (block.blocked_until, block.worker_id, block.target))
        self._invalidate(block.worker_id)
        return forgotten

    def lift(self, pair: Pair) -> Block | None:
        mine = self._blocks.get(pair.worker_id)
        block = None if mine is None else mine.pop(pair.target, None)
        if mine is not None and not mine:
            del self._blocks[pair.worker_id]
        if block is not None:
            self._invalidate(pair.worker_id)
        return block

    def forget_worker(self, worker_id: WorkerId) -> None:
        self._blocks.pop(worker_id, None)
        self._invalidate(worker_id)

    def _invalidate(self, worker_id: WorkerId) -> None:
        if worker_id == EVERY_WORKER:
            self._targets.clear()
        else:
            self._targets.pop(worker_id, None)

    def blocked_targets(self, worker_id: WorkerId, now: float) -> frozenset[str]:
        """Targets that this worker must not get now. Cached until the first block ends."""
        mine, of_all = self._blocks.get(worker_id), self._blocks.get(EVERY_WORKER)
        if not mine and not of_all:
            return _NOTHING
        known = self._targets.get(worker_id)
        if known is not None and now < known[0]:
            return known[1]
        known_blocks = chain((mine or {}).values(), (of_all or {}).values())
        in_force = [block for block in known_blocks if block.is_in_force(now)]
        first_end = min((block.blocked_until or 0.0 for block in in_force), default=float("inf"))
        targets = frozenset(block.target for block in in_force)
        self._targets[worker_id] = (first_end, targets)
        return targets

    def take_expired(self, now: float) -> list[Block]:
        expired = []
        while (at := self.next_end()) is not None and at <= now:
            _, worker_id, target = heappop(self._ends)
            if (block := self.lift(Pair(worker_id, target))) is not None:
                expired.append(block)
        return expired

    def next_end(self) -> float | None:
        while self._ends:
            at, worker_id, target = self._ends[0]
            block = self.get(Pair(worker_id, target))
            if block is not None and block.blocked_until == at:
                return at
            heappop(self._ends)
        return None


class WorkflowStatsTable:
    """Evicts the entry that was unused for longest."""

    def __init__(self) -> None:
        self._workflow_stats: dict[WorkflowHash, WorkflowStats] = {}

    def get(self, workflow_hash: WorkflowHash) -> WorkflowStats | None:
        return self._workflow_stats.get(workflow_hash)

    def listing(self) -> list[WorkflowStats]:
        return list(self._workflow_stats.values())

    def put(self, stats: WorkflowStats) -> WorkflowHash | None:
        """Returns the workflow that was evicted for it, if any."""
        self._workflow_stats.pop(stats.workflow_hash, None)
        self._workflow_stats[stats.workflow_hash] = stats
        if len(self._workflow_stats) <= MAX_WORKFLOW_STATS:
            return None
        forgotten = next(iter(self._workflow_stats))
        del self._workflow_stats[forgotten]
        return forgotten
