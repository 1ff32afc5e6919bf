"""What a run teaches, and what is made of it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.model.ids import TenantId, WorkflowHash
from comfyfleet.model.requirement import HardwareNeed, Requirements
from comfyfleet.model.worker import Capabilities, Gpu, Hardware, LiveState, Service
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.policy.workflow_stats import (
    expected_s,
    memory_above_gb,
    merge_live_state,
    of_out_of_memory,
    of_run,
    warmed,
    with_memory,
    without_slow,
)

EMPTY = WorkflowStats(WorkflowHash("hash"))
ANN, BOB, EVE = TenantId("ann"), TenantId("bob"), TenantId("eve")


def after_run(stats: WorkflowStats, worker_class: str, seconds: float) -> WorkflowStats:
    return of_run(stats.workflow_hash, worker_class, seconds).apply(stats)


def after_out_of_memory(stats: WorkflowStats, tenant: TenantId, vram_gb: float) -> WorkflowStats:
    return of_out_of_memory(stats.workflow_hash, tenant, vram_gb).apply(stats)


def card(memory_gb: float) -> Capabilities:
    return Capabilities((Service("comfyui"),), Hardware(gpu=Gpu(1, memory_gb, "RTX")))


@given(st.lists(st.floats(0.1, 1000), min_size=1, max_size=30))
def test_an_expected_duration_lies_between_the_shortest_and_the_longest_run(runs: list[float]) -> None:
    stats = EMPTY
    for seconds in runs:
        stats = after_run(stats, "card", seconds)
    expected = expected_s(stats, "card")
    assert expected is not None
    assert min(runs) - 1e-6 <= expected <= max(runs) + 1e-6
    assert stats.durations["card"].runs == len(runs)


def test_the_first_runs_count_alike_and_old_ones_fade() -> None:
    stats = after_run(after_run(EMPTY, "card", 10), "card", 20)
    assert expected_s(stats, "card") == 15
    for _ in range(30):
        stats = after_run(stats, "card", 100)
    assert (expected_s(stats, "card") or 0) > 95


def test_an_unknown_card_is_expected_to_take_as_long_as_the_known_ones() -> None:
    stats = after_run(after_run(EMPTY, "slow", 30), "fast", 10)
    assert expected_s(stats, "other") == 20
    assert expected_s(EMPTY, "other") is None
    assert expected_s(None, "other") is None


def test_the_number_of_worker_classes_in_a_lesson_is_bounded() -> None:
    stats = EMPTY
    for number in range(100):
        stats = after_run(stats, f"card-{number}", 1)
    assert len(stats.durations) == 64


def test_a_workflow_asks_for_more_than_the_largest_card_that_was_too_small() -> None:
    stats = after_out_of_memory(after_out_of_memory(EMPTY, ANN, 24), ANN, 12)
    needs = with_memory(Requirements(), stats, ANN, [card(12), card(24), card(48)])
    assert needs.hardware.gpu_memory_above_gb == 24


def test_nothing_more_is_asked_for_when_no_card_is_bigger() -> None:
    stats = after_out_of_memory(EMPTY, ANN, 24)
    needs = Requirements(hardware=HardwareNeed(gpu_count=1))
    assert with_memory(needs, stats, ANN, [card(12), card(24)]) is needs
    assert with_memory(needs, None, ANN, [card(48)]) is needs


def test_a_limited_job_is_kept_from_the_classes_of_workers_that_take_longer() -> None:
    stats = after_run(after_run(EMPTY, "slow", 30), "fast", 10)
    limited = Requirements(max_processing_s=20)
    assert without_slow(limited, stats).slow_worker_classes == ("slow",)
    assert without_slow(Requirements(), stats) == Requirements()
    assert without_slow(limited, None) is limited
    assert without_slow(Requirements(max_processing_s=30), stats).slow_worker_classes == ()


def test_the_models_of_the_last_run_are_warm_until_the_worker_says_otherwise() -> None:
    first, second = WorkflowHash("first"), WorkflowHash("second")
    live = warmed(LiveState(free_vram_gb=3), ("a.safetensors",), first)
    assert (live.loaded_models, live.last_workflow, live.free_vram_gb) == (
        frozenset({"a.safetensors"}),
        first,
        3,
    )
    assert warmed(live, (), second).loaded_models == {"a.safetensors"}
    told = merge_live_state(live, LiveState(free_vram_gb=5))
    assert (told.loaded_models, told.last_workflow, told.free_vram_gb) == (
        frozenset({"a.safetensors"}),
        first,
        5,
    )
    assert merge_live_state(live, LiveState(loaded_models=frozenset({"b"}))).loaded_models == {"b"}


def test_memory_that_one_tenant_ran_out_of_is_asked_for_by_that_tenant_until_a_second_met_it() -> None:
    stats = after_out_of_memory(EMPTY, EVE, 48)
    assert [memory_above_gb(stats, tenant) for tenant in (EVE, BOB)] == [48, 0]
    stats = after_out_of_memory(stats, ANN, 12)
    assert [memory_above_gb(stats, tenant) for tenant in (EVE, ANN, BOB)] == [48, 12, 12]
    stats = after_out_of_memory(stats, BOB, 24)
    assert [memory_above_gb(stats, tenant) for tenant in (EVE, ANN, BOB)] == [48, 24, 24]


def test_a_limit_from_before_tenants_had_their_own_counts_for_everybody() -> None:
    old = msgspec.structs.replace(EMPTY, memory_above_gb=16.0)
    assert memory_above_gb(old, BOB) == 16
    assert memory_above_gb(after_out_of_memory(old, EVE, 24), BOB) == 16


def test_the_limits_of_few_tenants_are_kept_and_everybodys_among_them() -> None:
    stats = EMPTY
    for number in range(100):
        stats = after_out_of_memory(stats, TenantId(f"t{number}"), 10 + number % 40)
    assert len(stats.memory_by_tenant) == 16
    assert memory_above_gb(stats, BOB) == 49
