"""Which pair (worker, workflow hash) is kept apart after a failure, and for how long.

The default strategy is stateless: the store remembers the block, the strategy says what the next one looks like. A
strategy of one's own implements the same four methods and may keep state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from comfyfleet.model.block import Block, BlockReason
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import WorkerId, WorkflowHash
from comfyfleet.policy.refusals import concerns_structure
from comfyfleet.policy.retry import BlockRule, row_of
from comfyfleet.policy.rules import Rules


class FailoverStrategy(Protocol):
    """Decides for each (worker, workflow hash)."""

    def should_skip(self, worker_id: WorkerId, workflow_hash: WorkflowHash, now: float) -> bool:
        """Beside the blocks in the store: keep this workflow from this worker now?"""

    def record_failure(
        self,
        worker_id: WorkerId,
        workflow_hash: WorkflowHash,
        failure: Failure,
        previous: Block | None,
        now: float,
    ) -> Block | None:
        """The block (or the count towards one) to remember; None forgets nothing and adds nothing."""

    def record_success(self, worker_id: WorkerId, workflow_hash: WorkflowHash, now: float) -> None: ...

    def is_blocked(self, block: Block, now: float) -> bool: ...


class SmartFailover:
    """Counts failures of a pair, blocks it at the threshold, lets it go after the cooldown."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def should_skip(self, worker_id: WorkerId, workflow_hash: WorkflowHash, now: float) -> bool:  # noqa: ARG002
        return False

    def record_failure(
        self,
        worker_id: WorkerId,
        workflow_hash: WorkflowHash,
        failure: Failure,
        previous: Block | None,
        now: float,
    ) -> Block | None:
        rules = self._rules
        if previous is not None and previous.blocked_until is not None and not previous.is_in_force(now):
            # Its time is over; that nobody has removed it yet must make no difference.
            previous = None
        failures = 1 + (previous.failures if previous is not None else 0)
        until: float | None
        missing: tuple[str, ...] = ()
        match row_of(failure).block:
            case BlockRule.NONE:
                return None
            case BlockRule.REFUSAL if not concerns_structure(failure):
                # Another job of this workflow has other values, which the server may accept.
                return None
            case BlockRule.REFUSAL:
                reason, until = BlockReason.REFUSED, now + rules.inventory_block_s
            case BlockRule.INVENTORY:
                reason, until = BlockReason.INVENTORY, now + rules.inventory_block_s
                missing = failure.missing
            case BlockRule.AT_ONCE:
                reason, until = BlockReason.OUT_OF_MEMORY, now + rules.cooldown_s
            case BlockRule.COUNTED:
                is_over = failures >= rules.max_failures_before_block
                reason, until = BlockReason.FAILURES, now + rules.cooldown_s if is_over else None
        if previous is not None and (previous.blocked_until or 0.0) > (until or 0.0):
            # Another attempt was still running when the pair was blocked: its end shortens nothing.
            return msgspec.structs.replace(previous, failures=failures)
        return Block(worker_id, workflow_hash, reason, failures, until, missing)

    def record_success(self, worker_id: WorkerId, workflow_hash: WorkflowHash, now: float) -> None:
        """The store clears the pair in the same write as the completion."""

    def is_blocked(self, block: Block, now: float) -> bool:
        return block.is_in_force(now)


def lifted_by_inventory(blocks: Iterable[Block]) -> list[Block]:
    """A new look at the inventory is reason to try again whatever was missing or refused before."""
    return [block for block in blocks if block.reason in (BlockReason.INVENTORY, BlockReason.REFUSED)]


def is_quarantined(blocks: Iterable[Block], rules: Rules, now: float) -> bool:
    """A worker that fails everything is taken out as a whole."""
    in_force = sum(
        block.is_in_force(now) and block.reason in (BlockReason.FAILURES, BlockReason.OUT_OF_MEMORY)
        for block in blocks
    )
    return in_force > rules.quarantine_blocks
