"""Several engines put profiles and classes into one table at once: no worker misses a class for good."""

from __future__ import annotations

import pytest
from tests.engine._rig import graph
from tests.engine.test_several_engines import Engines, register, take

from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.model.job import Submission
from comfyfleet.model.requirement import RequirementClass, Requirements
from comfyfleet.model.worker import WorkerRecord

KSAMPLER = RequirementClass(Requirements(node_classes=("KSampler", "SaveImage")))


async def test_a_class_that_comes_while_a_worker_registers_at_another_engine_is_for_that_worker_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine of the class reads the workers before that registration, and the table after it."""
    async with Engines() as it:
        await it.first.submit(Submission(graph(), tenant=TenantId("ann")))
        look = it.store.workers

        async def look_before_the_worker_comes() -> list[WorkerRecord]:
            monkeypatch.setattr(it.store, "workers", look)
            found = await look()
            await register(it.second, "gpu", "KSampler")
            return found

        monkeypatch.setattr(it.store, "workers", look_before_the_worker_comes)
        await it.first._context.fleet.ensure_class(KSAMPLER)
        job_id = (await it.first.submit(Submission(graph(), priority=5))).job_id
        assert (await it.first.get(job_id)).dispatch.class_key == KSAMPLER.key
        assert await take(it.second, "gpu") == job_id


async def test_a_class_that_comes_between_a_workers_profile_and_its_record_is_for_that_worker_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Engines() as it:
        await it.first.submit(Submission(graph(), tenant=TenantId("ann")))
        add, jobs = it.store.add_worker, []

        async def add_after_the_job(worker: WorkerRecord) -> bool:
            monkeypatch.setattr(it.store, "add_worker", add)
            assert worker.profile in (await it.store.table()).profiles
            jobs.append((await it.first.submit(Submission(graph(), priority=5))).job_id)
            return await add(worker)

        monkeypatch.setattr(it.store, "add_worker", add_after_the_job)
        await register(it.second, "gpu", "KSampler")
        await it.clock.advance(2)
        assert [await take(it.second, "gpu")] == jobs


async def test_a_profile_that_an_engine_dropped_and_puts_back_has_all_its_classes() -> None:
    async with Engines() as it:
        await register(it.first, "old", "KSampler")
        job_id = (await it.first.submit(Submission(graph()))).job_id
        await register(it.second, "new", "KSampler")
        await it.first.remove_worker(WorkerId("old"))
        assert (await it.store.table()).profiles == set(), "the first engine has not heard of the new worker"
        await it.first._context.fleet.sync()
        assert await take(it.second, "new") == job_id


async def test_a_profile_dropped_while_two_workers_get_it_has_the_class_for_which_they_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Engines() as it:
        for name in ("a", "b"):
            await register(it.second, name, "KSampler", "New")
        await it.second.submit(Submission(graph()))
        new = RequirementClass(Requirements(node_classes=("New", "SaveImage")))
        assert await it.store.put_class(new, (), version=(await it.store.table()).version)
        replace = it.store.replace_worker

        async def replace_after_a_drop(worker: WorkerRecord) -> bool:
            monkeypatch.setattr(it.store, "replace_worker", replace)
            await it.store.drop_profiles({worker.profile})
            return await replace(worker)

        monkeypatch.setattr(it.store, "replace_worker", replace_after_a_drop)
        await it.second._context.fleet.sync()
        job_id = (await it.second.submit(Submission(graph("New"), priority=5))).job_id
        assert (await it.second.get(job_id)).dispatch.class_key == new.key
        assert await take(it.second, "a") == job_id
