"""The signal for autoscaling: what waits, and which workers would clear it."""

from __future__ import annotations

import pytest
from tests.engine._rig import Rig, graph

from comfyfleet.model.estimate import CapacityReport
from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.model.requirement import HardwareNeed, Requirements


async def run(rig: Rig, worker: str, times: int, seconds: float = 10, **options: object) -> None:
    for _ in range(times):
        await rig.submit(**options)  # type: ignore[arg-type]
        leased = await rig.take(worker)
        await rig.clock.advance(seconds)
        await rig.complete(leased, seconds=seconds)


async def test_an_empty_queue_wants_no_worker() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        assert await rig.engine.capacity(60) == CapacityReport(60, 0, 0, 1, (), ())


async def test_waiting_work_is_counted_in_gpu_seconds_and_wants_more_of_the_same() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        await run(rig, "a", 5)
        for _ in range(30):
            await rig.submit()
        found = await rig.engine.capacity(100)
        assert (found.waiting, found.gpu_seconds, found.slots) == (30, 300, 1)
        (waiting,) = found.classes
        assert (waiting.needs, waiting.waiting, waiting.gpu_seconds, waiting.slots) == ("comfyui", 30, 300, 1)
        assert not waiting.is_rough
        (wanted,) = found.wanted
        assert (wanted.workers, wanted.worker_class, wanted.gpu_seconds) == (2, "RTX/24GB/x1", 200)
        assert (await rig.engine.capacity(300)).wanted == ()


async def test_tenants_with_equal_needs_are_one_class() -> None:
    async with Rig() as rig:
        await rig.worker("a")
        for name in ("ann", "bob"):
            await rig.submit(tenant=TenantId(name))
        (waiting,) = (await rig.engine.capacity(60)).classes
        assert waiting.waiting == 2 and waiting.is_rough


async def test_work_that_no_worker_may_take_describes_the_worker_that_is_missing() -> None:
    async with Rig() as rig:
        await rig.worker("small")
        needs = Requirements(hardware=HardwareNeed(gpu_memory_gb=80), models=("big.safetensors",))
        for _ in range(5):
            await rig.submit(requirements=needs)
        (wanted,) = (await rig.engine.capacity(60)).wanted
        assert wanted.worker_class is None and wanted.workers == 1
        assert wanted.kind == "comfyui, at least 80 GB, big.safetensors"


async def test_a_worker_that_is_away_tells_of_which_kind_more_are_wanted() -> None:
    async with Rig() as rig:
        await rig.worker("a", vram_gb=48)
        await run(rig, "a", 5, requirements=Requirements(hardware=HardwareNeed(gpu_memory_gb=40)))
        await rig.engine.unregister(WorkerId("a"), "scaled down")
        await rig.submit(requirements=Requirements(hardware=HardwareNeed(gpu_memory_gb=40)))
        found = await rig.engine.capacity(60)
        assert [each.worker_class for each in found.wanted] == ["RTX/48GB/x1"]
        assert found.slots == 0


async def test_a_load_counts_while_no_worker_has_the_models() -> None:
    async with Rig() as rig:
        await rig.worker("a", models=("red.safetensors",))
        await rig.submit(graph(model="red.safetensors"))
        before = (await rig.engine.capacity(60)).gpu_seconds
        await rig.complete(await rig.take("a"), seconds=1)
        await rig.submit(graph(model="red.safetensors"))
        after = (await rig.engine.capacity(60)).gpu_seconds
        assert before > after > 0


async def test_the_key_of_a_class_stays_the_same_when_workers_and_jobs_change() -> None:
    async with Rig() as rig:
        await rig.submit()
        (before,) = (await rig.engine.capacity(60)).classes
        await rig.worker("a")
        await rig.submit()
        (after,) = (await rig.engine.capacity(60)).classes
        assert before.key == after.key and after.waiting == 2


@pytest.mark.parametrize("jobs", [10, 200])
async def test_the_cost_does_not_grow_with_the_jobs(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Rig() as rig:
        await rig.worker("a")
        for _ in range(jobs):
            await rig.submit()

        async def never(*_: object) -> None:
            raise AssertionError("jobs are not read")

        for name in ("load", "load_many", "peek"):
            monkeypatch.setattr(rig.store, name, never)
        assert (await rig.engine.capacity(60)).waiting == jobs
