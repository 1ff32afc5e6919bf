"""Which pair (worker, workflow hash) is kept apart after a failure, for how long, and for whom.

The default strategy is stateless: the store remembers the block, the strategy says what the next one looks like. A
strategy of one's own implements the same four methods and may keep state. For whom a block counts is the same for every
strategy: for the tenant whose job failed, and for everybody once two tenants have one, or where it is the server that
lacks something. A hash ignores values, so what one tenant asks for says nothing about another's jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

import msgspec

from comfyfleet.model.block import Block, BlockReason, tenant_target
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.requirement import Requirements
from comfyfleet.policy.acceptance import concerns_structure, is_refusal
from comfyfleet.policy.feasibility import normal_model
from comfyfleet.policy.retry import BlockRule, RetryChoice, row_of
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


def when_alone(
    block: Block | None, known: Block | None, failure: Failure, choice: RetryChoice
) -> Block | None:
    """A server that died takes nothing before it answers again; a cooldown beyond that keeps its job for another one.
    Where there is no other the failure is counted, and the block is what it was before."""
    has_died = failure.kind is FailureKind.CRASHED or failure.server_died is not None
    if block is None or not has_died or not choice.is_alone:
        return block
    return msgspec.structs.replace(block, blocked_until=None if known is None else known.blocked_until)


_OF_A_RUN = (BlockReason.FAILURES, BlockReason.OUT_OF_MEMORY)


def blocked_target(
    workflow_hash: WorkflowHash, tenant: TenantId, failure: Failure, needs: Requirements | None
) -> str:
    """What a failure is counted for: the tenant's workflow; everybody's where the server lacks what the graph names."""
    return workflow_hash if _is_of_server(failure, needs) else tenant_target(workflow_hash, tenant)


def _is_of_server(failure: Failure, needs: Requirements | None) -> bool:
    # The hash holds node classes, wires and the names of models. Any other name stands in a value, which concerns only
    # the tenant that wrote it.
    if is_refusal(failure):
        return concerns_structure(failure)
    if needs is None or not failure.missing:
        return False
    if failure.kind is FailureKind.MISSING_NODE:
        return set(needs.node_classes).issuperset(failure.missing)
    named = {normal_model(name) for name in needs.models}
    return failure.kind is FailureKind.MISSING_MODEL and named.issuperset(map(normal_model, failure.missing))


def met_by_two(block: Block, known: Iterable[Block], now: float) -> Block | None:
    """The block for everybody, once a second tenant has met what the first one met. `known`: the blocks of the worker.
    None: there is no second tenant, or everybody is kept off for at least as long already."""
    if block.tenant is None or not block.is_in_force(now):
        return None
    workflow_hash, is_second = block.workflow_hash, False
    for other in known:
        if other.target == workflow_hash and (other.blocked_until or 0.0) >= (block.blocked_until or 0.0):
            return None
        if other.workflow_hash == workflow_hash and other.tenant not in (None, block.tenant):
            is_second |= other.is_in_force(now) and other.reason in _OF_A_RUN
    return msgspec.structs.replace(block, target=workflow_hash) if is_second else None


def lifted_by_inventory(blocks: Iterable[Block]) -> list[Block]:
    """A new look at the inventory is reason to try again whatever was missing or refused before."""
    return [block for block in blocks if block.reason in (BlockReason.INVENTORY, BlockReason.REFUSED)]


def is_quarantined(blocks: Iterable[Block], rules: Rules, now: float) -> bool:
    """A worker that fails everything is taken out as a whole. One tenant alone cannot have it taken from all others,
    whatever it submits: of the workflows that failed for nobody else, no more than half of the limit is counted."""
    failed = [block for block in blocks if block.is_in_force(now) and block.reason in _OF_A_RUN]
    for_all = {block.workflow_hash for block in failed if block.tenant is None}
    alone = Counter(
        block.tenant for block in failed if block.tenant is not None and block.workflow_hash not in for_all
    )
    # Where nobody set up tenants every job is of the default one, and there is nobody to protect.
    most = rules.quarantine_blocks // 2 + 1
    counted = sum(count if tenant == DEFAULT_TENANT else min(count, most) for tenant, count in alone.items())
    return len(for_all) + counted > rules.quarantine_blocks
