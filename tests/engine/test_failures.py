"""Failure steers routing: elsewhere, later, bigger, or nowhere; and whoever waits is woken by the clock alone."""

from __future__ import annotations

import asyncio

import pytest
from tests.engine._rig import Rig, graph, offers

from comfyfleet.model.block import BlockReason
from comfyfleet.model.calls import LeasedJob, RegisterWorker
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.fact import Fact
from comfyfleet.model.failure import FailureKind
from comfyfleet.model.ids import JobId, WorkerId


def taken(parked: asyncio.Task[LeasedJob | None]) -> JobId | None:
    if not parked.done():
        return None
    leased = parked.result()
    return None if leased is None else leased.job_id


async def test_a_retried_job_keeps_its_place_before_later_ones_of_its_priority() -> None:
    async with Rig(max_failures_before_block=9) as rig:
        await rig.worker("a")
        first = await rig.submit()
        await rig.submit()
        await rig.fail(await rig.take("a"))
        await rig.submit()
        await rig.clock.advance(1)
        assert (await rig.take("a")).job_id == first


async def test_a_job_is_not_offered_again_to_the_worker_that_failed_it_while_another_can_run_it() -> None:
    async with Rig(max_failures_before_block=3) as rig:
        await rig.worker("a")
        await rig.worker("b")
        failed = await rig.submit(retry_delay_s=0)
        await rig.fail(await rig.take("a"))
        later = await rig.submit()
        again = rig.park("a")
        await rig.settle()
        assert taken(again) == later, "the workflow is not blocked, only the job"
        assert (await rig.take("b")).job_id == failed


async def test_the_only_worker_gets_the_job_it_failed_again_at_once_below_the_threshold() -> None:
    async with Rig(max_failures_before_block=3) as rig:
        await rig.worker("a")
        job_id = await rig.submit(retry_delay_s=0)
        await rig.fail(await rig.take("a"))
        assert (await rig.take("a")).job_id == job_id


async def test_a_job_that_failed_on_every_worker_goes_back_to_the_last_without_waiting_for_a_cooldown() -> (
    None
):
    async with Rig(max_failures_before_block=3) as rig:
        await rig.worker("a")
        await rig.worker("b")
        job_id = await rig.submit(retry_delay_s=0)
        await rig.fail(await rig.take("a"))
        await rig.fail(await rig.take("b"))
        parked = [rig.park("a"), rig.park("b")]
        await rig.settle()
        assert [taken(each) for each in parked] == [None, job_id]


@pytest.mark.parametrize("how", ["leaves", "drains", "pauses", "crashes while it runs the job"])
async def test_a_job_goes_back_to_the_worker_that_failed_it_when_no_other_can_run_it_any_more(
    how: str,
) -> None:
    async with Rig(max_failures_before_block=3) as rig:
        a, b = await rig.worker("a"), await rig.worker("b")
        job_id = await rig.submit(retry_delay_s=0)
        leased = await rig.take("a")
        await rig.fail(leased)
        parked = rig.park("a")
        await rig.clock.advance(10)
        assert taken(parked) is None, "b can run it"
        match how:
            case "leaves":
                await rig.engine.unregister(b, "it was stopped")
            case "drains":
                await rig.engine.drain_worker(b)
            case "pauses":
                await rig.engine.pause_worker(b)
            case _:
                await rig.fail(await rig.take("b"), FailureKind.CRASHED)
                await rig.engine.unregister(b, "connection refused")
        await rig.clock.advance(2 * rig.engine.rules.sweep_s)
        assert taken(parked) == job_id
        assert [block.target for block in await rig.engine.blocks() if block.worker_id == a] == [
            f"{leased.workflow_hash}@default"
        ], "its failure is still counted"


async def test_a_worker_that_the_strategy_keeps_off_is_no_other_that_can_run_the_job() -> None:
    rig = Rig(max_failures_before_block=3)
    rig.replace_strategy(lambda worker_id: worker_id == "b")
    async with rig:
        await rig.worker("a")
        await rig.worker("b")
        job_id = await rig.submit(retry_delay_s=0)
        await rig.fail(await rig.take("a"))
        assert (await rig.take("a")).job_id == job_id


async def test_the_third_failure_of_a_pair_blocks_it_and_not_the_second() -> None:
    async with Rig(max_failures_before_block=3) as rig:
        await rig.worker("a")
        for failures in (1, 2, 3):
            await rig.submit(max_attempts=1)
            await rig.fail(await rig.take("a"))
            (block,) = await rig.engine.blocks()
            assert (await rig.engine.blocks()) == [block], "looking changes nothing"
            assert block.failures == failures
            assert (block.blocked_until is not None) is (failures == 3)
        await rig.submit()
        assert await rig.poll("a") is None


async def test_all_attempts_used_up_ends_in_the_dead_letter_with_every_attempt_on_record() -> None:
    async with Rig(max_failures_before_block=99) as rig:
        await rig.worker("a")
        job_id = await rig.submit()
        for _ in range(3):
            parked = rig.park("a")
            await rig.clock.advance(5)
            leased = parked.result()
            assert leased is not None
            await rig.engine.heartbeat(leased.worker_id, [leased.ref])
            await rig.fail(leased)
        (dead,) = await rig.engine.dead_letter()
        assert dead.job_id == job_id
        view = await rig.engine.get(job_id)
        assert [attempt.failure is not None for attempt in view.attempts] == [True, True, True]
        assert [attempt.charged_to for attempt in view.attempts] == ["attempts"] * 3
        assert rig.facts(job_id).count("failed") == 1
        assert rig.facts(job_id).count("retrying") == 2


async def test_leases_that_expire_on_three_workers_end_in_the_dead_letter() -> None:
    async with Rig() as rig:
        job_id = await rig.submit()
        for name in "abc":
            await rig.worker(name)
            assert (await rig.take(name)).job_id == job_id
            await rig.clock.advance(60)
        assert [dead.job_id for dead in await rig.engine.dead_letter()] == [job_id]


async def test_failed_on_three_workers_and_blocked_on_all_is_the_workflows_fault() -> None:
    async with Rig() as rig:
        for name in "abc":
            await rig.worker(name)
        job_id = await rig.submit()
        settled = [await rig.fail(await rig.take(name), FailureKind.DEAD_WORKER) for name in "abc"]
        assert [each.phase for each in settled] == [Phase.QUEUED, Phase.QUEUED, Phase.FAILED]
        assert (await rig.engine.get(job_id)).dispatch.worker_faults == 3


async def test_a_compatible_worker_that_is_offline_for_a_moment_keeps_a_job_out_of_the_dead_letter() -> None:
    async with Rig() as rig:
        for name in "abcd":
            await rig.worker(name)
        job_id = await rig.submit()
        await rig.engine.unregister(WorkerId("d"), "for a moment")
        for name in "abc":
            settled = await rig.fail(await rig.take(name), FailureKind.DEAD_WORKER)
            assert settled.will_retry
        await rig.worker("d")
        assert (await rig.take("d")).job_id == job_id


async def test_an_invalid_workflow_fails_at_once_and_blocks_nobody() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await rig.submit()
        settled = await rig.fail(await rig.take("a"), FailureKind.INVALID_WORKFLOW)
        assert settled.phase is Phase.FAILED
        assert await rig.engine.blocks() == []


async def test_a_missing_model_blocks_the_pair_until_the_inventory_changes_and_then_the_job_runs_there() -> (
    None
):
    async with Rig() as rig:
        await rig.worker("a", models=("x.safetensors",))
        job_id = await rig.submit(graph(model="x.safetensors"))
        settled = await rig.fail(await rig.take("a"), FailureKind.MISSING_MODEL, missing=("x.safetensors",))
        assert settled.will_retry
        (block,) = await rig.engine.blocks()
        assert (block.reason, block.missing) == (BlockReason.INVENTORY, ("x.safetensors",))
        parked = rig.park("a", 1e9)
        await rig.clock.advance(600)
        assert not parked.done(), "a cooldown does not lift it"
        assert rig.fleet_events("unblocked") == []
        await rig.worker("a", models=("x.safetensors", "y.safetensors"))
        await rig.settle()
        assert taken(parked) == job_id
        assert [event.data["target"] for event in rig.fleet_events("unblocked")] == [block.target]


async def test_out_of_memory_goes_to_a_bigger_card_and_so_does_the_next_job_even_after_the_cooldown() -> None:
    async with Rig() as rig:
        await rig.worker("small", vram_gb=12)
        await rig.worker("big", vram_gb=24)
        first = await rig.submit(graph(seed=1))
        await rig.fail(await rig.take("small"), FailureKind.OUT_OF_MEMORY)
        assert await rig.poll("small") is None
        leased = await rig.take("big")
        assert leased.job_id == first
        await rig.complete(leased)
        small = rig.park("small")
        await rig.clock.advance(120)
        await rig.worker("big", vram_gb=24)
        next_job = await rig.submit(graph(seed=2))
        await rig.settle()
        assert not small.done()
        big = rig.park("big")
        await rig.settle()
        assert taken(big) == next_job


async def test_out_of_memory_where_no_card_is_bigger_waits_for_the_cooldown() -> None:
    async with Rig(cooldown_s=60) as rig:
        await rig.worker("small", vram_gb=12)
        job_id = await rig.submit()
        await rig.fail(await rig.take("small"), FailureKind.OUT_OF_MEMORY)
        parked = rig.park("small")
        await rig.clock.advance(59.9)
        assert not parked.done()
        await rig.clock.advance(0.1)
        assert taken(parked) == job_id


async def test_a_bigger_card_that_lacks_the_model_does_not_keep_the_next_job_from_the_small_one() -> None:
    async with Rig(cooldown_s=60) as rig:
        await rig.worker("small", vram_gb=12, models=("x.safetensors",))
        await rig.worker("big", vram_gb=24)
        await rig.submit(graph(model="x.safetensors"), max_attempts=1)
        await rig.fail(await rig.take("small"), FailureKind.OUT_OF_MEMORY)
        next_job = await rig.submit(graph(model="x.safetensors"))
        parked = rig.park("small")
        await rig.clock.advance(60)
        assert taken(parked) == next_job


async def test_out_of_memory_on_a_preferred_worker_goes_to_the_bigger_card_at_once() -> None:
    async with Rig() as rig:
        await rig.worker("small", vram_gb=12)
        await rig.worker("big", vram_gb=24)
        job_id = await rig.submit(preferences=rig.prefer("small"))
        await rig.fail(await rig.take("small"), FailureKind.OUT_OF_MEMORY)
        assert (await rig.take("big")).job_id == job_id


async def test_another_attempts_failure_does_not_lift_the_block_of_the_first() -> None:
    async with Rig(max_failures_before_block=3) as rig:
        await rig.worker("a", slots=2)
        for seed in (1, 2):
            await rig.submit(graph(seed=seed), max_attempts=1)
        first, second = await rig.take("a"), await rig.take("a")
        await rig.fail(first, FailureKind.OUT_OF_MEMORY)
        await rig.fail(second, FailureKind.NODE_ERROR)
        await rig.submit(graph(seed=3))
        assert await rig.poll("a") is None


async def test_a_success_clears_the_pair_tells_of_it_and_wakes_the_worker() -> None:
    async with Rig() as rig:
        await rig.worker("a", slots=2)
        for seed in (1, 2):
            await rig.submit(graph(seed=seed), max_attempts=1)
        first, second = await rig.take("a"), await rig.take("a")
        await rig.fail(first)
        waiting = await rig.submit(graph(seed=3))
        parked = rig.park("a")
        await rig.settle()
        assert not parked.done()
        await rig.complete(second)
        await rig.settle()
        assert taken(parked) == waiting
        assert await rig.engine.blocks() == []
        assert len(rig.fleet_events("unblocked")) == 1


async def test_a_worker_with_more_than_32_blocks_is_quarantined_and_comes_back_by_itself() -> None:
    async with Rig(cooldown_s=60, quarantine_s=300) as rig:
        kinds = [f"Kind{number}" for number in range(33)]
        await rig.worker("a", "Good", *kinds, slots=1)
        for kind in kinds:
            assert rig.fleet_events("quarantined") == []
            await rig.submit(graph(kind), max_attempts=1)
            await rig.fail(await rig.take("a"))
        assert len(rig.fleet_events("quarantined")) == 1
        good = await rig.submit(graph("Good"))
        parked = rig.park("a")
        await rig.clock.advance(299)
        assert not parked.done()
        await rig.clock.advance(1)
        assert taken(parked) == good
        assert len(rig.fleet_events("released")) == 1


async def test_unblocking_by_hand_wakes_the_worker() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        job_id = await rig.submit(retry_delay_s=0)
        await rig.fail(await rig.take("a"))
        parked = rig.park("a")
        await rig.settle()
        (block,) = await rig.engine.blocks()
        assert await rig.engine.unblock(WorkerId("a"), block.target)
        assert not await rig.engine.unblock(WorkerId("a"), block.target)
        await rig.settle()
        assert taken(parked) == job_id


@pytest.mark.parametrize("refused", ["a", "b"])
async def test_a_strategy_of_ones_own_is_asked_for_each_worker(refused: str) -> None:
    rig = Rig()
    rig.replace_strategy(lambda worker_id: worker_id == refused)
    async with rig:
        for name in "ab":
            await rig.engine.register(RegisterWorker(WorkerId(name), offers("KSampler")))
        parked = {name: rig.park(name) for name in "ab"}
        await rig.settle()
        job_id = await rig.submit()
        await rig.settle()
        assert {name: taken(each) for name, each in parked.items()} == {
            refused: None,
            "b" if refused == "a" else "a": job_id,
        }
        explanation = await rig.engine.explain(await rig.submit())
        assert [miss.worker_id for miss in explanation.workers] == [refused]


async def test_a_failure_and_a_retry_are_told_with_the_number_of_the_attempt() -> None:
    async with Rig(max_attempts=2) as rig:
        await rig.worker("a")
        await rig.worker("b")
        job_id = await rig.submit(retry_delay_s=0)
        for _ in range(2):
            leased = await rig.poll("a") or await rig.poll("b")
            assert leased is not None
            await rig.engine.heartbeat(leased.worker_id, [leased.ref])
            await rig.fail(leased)
        told = {
            event.kind.value: (event.data or {}).get("attempt")
            for event in rig.events
            if isinstance(event, Fact) and event.job_id == job_id
        }
        assert (told["retrying"], told["failed"]) == (1, 2)
