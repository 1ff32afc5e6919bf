"""Which pairs (worker, workflow hash) a failure blocks, for how long, and for which tenants.

The default strategy is stateless: the store holds the block, and the strategy computes the next one. A custom strategy
implements the same four methods and may have state. Every block applies to the tenant whose job failed. It applies to
all tenants once two of them have one, or if the server lacks something.
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
from comfyfleet.policy.retry import BlockRule, RetryChoice, rule_of
from comfyfleet.policy.rules import Rules


class FailoverStrategy(Protocol):
    """Decides for each (worker, workflow hash)."""

    def should_skip(self, worker_id: WorkerId, workflow_hash: WorkflowHash, now: float) -> bool:
        """Keep this workflow from this worker now, in addition to the blocks in the store?"""

    def record_failure(
        self,
        worker_id: WorkerId,
        workflow_hash: WorkflowHash,
        failure: Failure,
        previous: Block | None,
        now: float,
    ) -> Block | None:
        """The block, or the failure count, to store. None: nothing changes."""

    def record_success(self, worker_id: WorkerId, workflow_hash: WorkflowHash, now: float) -> None: ...

    def is_blocked(self, block: Block, now: float) -> bool: ...


class SmartFailover:
    """Counts the failures of a pair, blocks it at the threshold, and ends the block after the cooldown."""

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
            # An expired block counts as removed.
            previous = None
        failures = 1 + (previous.failures if previous is not None else 0)
        until: float | None
        missing: tuple[str, ...] = ()
        match rule_of(failure).block:
            case BlockRule.NONE:
                return None
            case BlockRule.REFUSAL if not concerns_structure(failure):
                # The server may accept the values of another job.
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
            # The end of a concurrent attempt never shortens a block.
            return msgspec.structs.replace(previous, failures=failures)
        return Block(worker_id, workflow_hash, reason, failures, until, missing)

    def record_success(self, worker_id: WorkerId, workflow_hash: WorkflowHash, now: float) -> None:
        """The store clears the pair in the same write as the completion."""

    def is_blocked(self, block: Block, now: float) -> bool:
        return block.is_in_force(now)


def block_for_only_worker(
    block: Block | None, known: Block | None, failure: Failure, choice: RetryChoice
) -> Block | None:
    """After a server died, a cooldown leaves the job to another worker. If there is no other worker, the failure is
    counted but the block does not change: the server gets jobs again as soon as it answers."""
    has_died = failure.kind is FailureKind.CRASHED or failure.server_died is not None
    if block is None or not has_died or not choice.is_only_worker:
        return block
    return msgspec.structs.replace(block, blocked_until=None if known is None else known.blocked_until)


_OF_A_RUN = (BlockReason.FAILURES, BlockReason.OUT_OF_MEMORY)


def blocked_target(
    workflow_hash: WorkflowHash, tenant: TenantId, failure: Failure, needs: Requirements | None
) -> str:
    """The target of a block: the workflow of the tenant, or of all tenants if the server lacks what the graph names."""
    return workflow_hash if _is_of_server(failure, needs) else tenant_target(workflow_hash, tenant)


def _is_of_server(failure: Failure, needs: Requirements | None) -> bool:
    # The hash covers node classes, links and model names. Any other name is part of a value of this tenant.
    if is_refusal(failure):
        return concerns_structure(failure)
    if needs is None or not failure.missing:
        return False
    if failure.kind is FailureKind.MISSING_NODE:
        return set(needs.node_classes).issuperset(failure.missing)
    named = {normal_model(name) for name in needs.models}
    return failure.kind is FailureKind.MISSING_MODEL and named.issuperset(map(normal_model, failure.missing))


def block_for_all_tenants(block: Block, known: Iterable[Block], now: float) -> Block | None:
    """The block for all tenants, if a second tenant has an equal one. `known` are the blocks of the worker. None: no
    second tenant has one, or all tenants are already blocked for at least as long."""
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
    """The blocks that a new inventory lifts."""
    return [block for block in blocks if block.reason in (BlockReason.INVENTORY, BlockReason.REFUSED)]


def is_quarantined(blocks: Iterable[Block], rules: Rules, now: float) -> bool:
    """Whether a worker fails so many workflows that it gets no more jobs. One tenant alone cannot cause that: workflows
    that failed only for this tenant count at most for half of the limit."""
    failed = [block for block in blocks if block.is_in_force(now) and block.reason in _OF_A_RUN]
    for_all = {block.workflow_hash for block in failed if block.tenant is None}
    alone = Counter(
        block.tenant for block in failed if block.tenant is not None and block.workflow_hash not in for_all
    )
    # Without tenants every job belongs to the default tenant, so there is no other tenant to protect.
    most = rules.quarantine_blocks // 2 + 1
    counted = sum(count if tenant == DEFAULT_TENANT else min(count, most) for tenant, count in alone.items())
    return len(for_all) + counted > rules.quarantine_blocks
