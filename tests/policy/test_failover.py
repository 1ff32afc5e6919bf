"""Which pairs are kept apart, and until when."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.block import Block, BlockReason, tenant_target
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import DEFAULT_TENANT, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.requirement import Requirements
from comfyfleet.policy.failover import (
    SmartFailover,
    block_for_all_tenants,
    blocked_target,
    is_quarantined,
    lifted_by_inventory,
)
from comfyfleet.policy.rules import Rules

A, HASH = WorkerId("a"), WorkflowHash("hash")
ANN, BOB = TenantId("ann"), TenantId("bob")
NODE_ERROR = Failure(FailureKind.NODE_ERROR, "it broke")
OUT_OF_MEMORY = Failure(FailureKind.OUT_OF_MEMORY, "too little")
MISSING = Failure(FailureKind.MISSING_MODEL, "not there", missing=("x.safetensors",))


def smart(**rules: float) -> SmartFailover:
    return SmartFailover(msgspec.convert(rules, Rules))


@given(st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_a_threshold_of_three_blocks_on_the_third_failure_whatever_was_read_in_between(
    reads: list[int],
) -> None:
    strategy = smart(max_failures_before_block=3, cooldown_s=60)
    known: Block | None = None
    blocked = []
    for at, times in enumerate(reads):
        known = strategy.record_failure(A, HASH, NODE_ERROR, known, 10.0 + at)
        assert known is not None
        for _ in range(times):
            strategy.is_blocked(known, 10.0 + at)
            strategy.should_skip(A, HASH, 10.0 + at)
        blocked.append(strategy.is_blocked(known, 10.0 + at))
    assert blocked == [False, False, True]
    assert known is not None
    assert known.failures == 3


def test_a_worker_is_available_again_at_exactly_blocked_until() -> None:
    strategy = smart(cooldown_s=60)
    block = strategy.record_failure(A, HASH, NODE_ERROR, None, 100.0)
    assert block is not None
    assert block.blocked_until == 160.0
    assert strategy.is_blocked(block, 159.999)
    assert not strategy.is_blocked(block, 160.0)


@pytest.mark.parametrize(
    "kind", [FailureKind.INVALID_WORKFLOW, FailureKind.MISSING_INPUT, FailureKind.TOTAL_TIMEOUT]
)
def test_what_is_no_workers_fault_blocks_nobody(kind: FailureKind) -> None:
    assert smart().record_failure(A, HASH, Failure(kind, "no"), None, 1.0) is None


def test_out_of_memory_blocks_at_once_below_the_threshold() -> None:
    block = smart(max_failures_before_block=3, cooldown_s=60).record_failure(
        A, HASH, OUT_OF_MEMORY, None, 1.0
    )
    assert block == Block(A, HASH, BlockReason.OUT_OF_MEMORY, 1, 61.0)


def test_what_a_worker_lacks_blocks_it_until_its_inventory_changes() -> None:
    block = smart().record_failure(A, HASH, MISSING, None, 1.0)
    assert block is not None
    assert block.reason is BlockReason.INVENTORY
    assert block.missing == ("x.safetensors",)
    assert block.is_in_force(1.0 + 3599)
    counting = Block(A, "other", BlockReason.FAILURES, 1)
    assert lifted_by_inventory([counting, block]) == [block]


def test_a_later_failure_of_another_attempt_never_shortens_a_block_in_force() -> None:
    strategy = smart(max_failures_before_block=3, cooldown_s=60)
    block = strategy.record_failure(A, HASH, OUT_OF_MEMORY, None, 1.0)
    counted = strategy.record_failure(A, HASH, NODE_ERROR, block, 2.0)
    assert counted is not None
    assert counted.blocked_until == 61.0
    lacking = strategy.record_failure(A, HASH, MISSING, None, 1.0)
    after = strategy.record_failure(A, HASH, OUT_OF_MEMORY, lacking, 2.0)
    assert after is not None
    assert after.reason is BlockReason.INVENTORY
    assert after.missing == MISSING.missing
    assert after.failures == 2


def test_a_block_that_is_over_counts_no_more_even_if_nobody_has_removed_it_yet() -> None:
    strategy = smart(max_failures_before_block=2, cooldown_s=60)
    over = Block(A, HASH, BlockReason.FAILURES, 2, 100.0)
    again = strategy.record_failure(A, HASH, NODE_ERROR, over, 100.0)
    assert again == Block(A, HASH, BlockReason.FAILURES, 1, None)


def test_a_worker_with_more_than_32_blocks_in_force_is_quarantined() -> None:
    rules = Rules()
    blocks = [Block(A, f"hash-{number}", BlockReason.FAILURES, 1, 100.0) for number in range(32)]
    assert not is_quarantined(blocks, rules, 50.0)
    assert not is_quarantined([*blocks, Block(A, "job", BlockReason.JOB, 1, 100.0)], rules, 50.0)
    assert not is_quarantined([*blocks, Block(A, "counting", BlockReason.FAILURES, 1)], rules, 50.0)
    more = [*blocks, Block(A, "one more", BlockReason.OUT_OF_MEMORY, 1, 100.0)]
    assert is_quarantined(more, rules, 50.0)
    assert not is_quarantined(more, rules, 100.0)


def of(tenant: TenantId | None, until: float | None = 100.0, **more: object) -> Block:
    block = Block(A, HASH if tenant is None else tenant_target(HASH, tenant), BlockReason.FAILURES, 1, until)
    return msgspec.structs.replace(block, **more)


def test_a_block_says_whose_it_is() -> None:
    assert (of(ANN).workflow_hash, of(ANN).tenant) == (HASH, ANN)
    assert (of(None).workflow_hash, of(None).tenant) == (HASH, None)


@pytest.mark.parametrize(
    ("known", "is_for_all"),
    [
        ([], False),
        ([of(ANN)], False),
        ([of(ANN), of(BOB)], True),
        ([of(BOB, reason=BlockReason.OUT_OF_MEMORY)], True),
        ([of(BOB, until=None)], False),
        ([of(BOB, until=50.0)], False),
        ([of(BOB, reason=BlockReason.INVENTORY)], False),
        ([of(BOB, target=tenant_target(WorkflowHash("other"), BOB))], False),
        ([of(None, until=90.0), of(BOB)], True),
        ([of(None), of(BOB)], False),
        ([of(None, until=3000.0, reason=BlockReason.INVENTORY), of(BOB)], False),
    ],
)
def test_a_block_counts_for_everybody_once_two_tenants_have_it(known: list[Block], is_for_all: bool) -> None:
    found = block_for_all_tenants(of(ANN), known, 60.0)
    assert found == (of(None) if is_for_all else None)
    assert block_for_all_tenants(of(ANN, until=None), known, 60.0) is None, (
        "who only counts has met nothing yet"
    )


@pytest.mark.parametrize(
    ("kind", "missing", "is_for_all"),
    [
        (FailureKind.MISSING_MODEL, ("sdxl\\x.safetensors",), True),
        (FailureKind.MISSING_MODEL, ("y.safetensors",), False),
        (FailureKind.MISSING_MODEL, ("sdxl/x.safetensors", "y.safetensors"), False),
        (FailureKind.MISSING_MODEL, (), False),
        (FailureKind.MISSING_NODE, ("KSampler",), True),
        (FailureKind.MISSING_NODE, ("Other",), False),
        (FailureKind.NODE_ERROR, ("KSampler",), False),
        (FailureKind.OUT_OF_MEMORY, (), False),
    ],
)
def test_what_the_graph_names_and_the_server_lacks_counts_for_everybody(
    kind: FailureKind, missing: tuple[str, ...], is_for_all: bool
) -> None:
    needs = Requirements(models=("sdxl/x.safetensors",), node_classes=("KSampler",))
    found = blocked_target(HASH, ANN, Failure(kind, "no", missing=missing), needs)
    assert found == (HASH if is_for_all else tenant_target(HASH, ANN))


def test_one_tenants_blocks_alone_quarantine_no_worker_unless_nobody_set_up_tenants() -> None:
    rules = Rules()

    def failed(tenant: TenantId, count: int) -> list[Block]:
        return [of(tenant, target=tenant_target(WorkflowHash(f"h{each}"), tenant)) for each in range(count)]

    assert not is_quarantined(failed(ANN, 1000), rules, 50.0)
    assert is_quarantined(failed(DEFAULT_TENANT, 33), rules, 50.0)
    assert not is_quarantined(failed(DEFAULT_TENANT, 32), rules, 50.0)
    assert not is_quarantined([*failed(ANN, 1000), *failed(BOB, 15)], rules, 50.0)
    assert is_quarantined([*failed(ANN, 1000), *failed(BOB, 16)], rules, 50.0)
    for_all = [of(None, target=f"h{each}") for each in range(32)]
    both = [*failed(ANN, 32), *failed(BOB, 32), *for_all]
    assert not is_quarantined(both, rules, 50.0), "one workflow is counted once"
