"""A fake worker makes nothing that anybody can use: beside real workers it takes no job, unless it was told to."""

from __future__ import annotations

import msgspec
import pytest
from tests.engine._rig import Rig, offers

from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import Capabilities
from comfyfleet.ports import Inventory
from comfyfleet.worker.registration import join


async def fake(rig: Rig, name: str = "fake", *, works_beside_real: bool = False) -> WorkerId:
    offered = msgspec.structs.replace(offers("KSampler"), is_fake=True, works_beside_real=works_beside_real)
    await rig.engine.register(RegisterWorker(WorkerId(name), offered, 1))
    return WorkerId(name)


async def test_a_fleet_of_fakes_alone_works() -> None:
    async with Rig() as rig:
        await fake(rig)
        await fake(rig, "another")
        job_id = await rig.submit()
        assert (await rig.take("fake")).job_id == job_id


@pytest.mark.parametrize("is_offline", [False, True])
async def test_beside_a_real_worker_it_takes_nothing_and_the_job_says_why(is_offline: bool) -> None:
    async with Rig() as rig:
        await fake(rig)
        real = await rig.worker("gpu")
        if is_offline:
            await rig.engine.unregister(real, "switched off")
        job_id = await rig.submit()
        assert await rig.poll("fake") is None
        explained = await rig.engine.explain(job_id)
        (reason,) = [each.reason for each in explained.workers if each.worker_id == "fake"]
        assert "is a fake worker, and the fleet has real workers" in reason
        if not is_offline:
            assert (await rig.take("gpu")).job_id == job_id


async def test_a_worker_whose_server_never_answered_does_not_count_as_real() -> None:
    async with Rig() as rig:
        await rig.engine.register(
            RegisterWorker(WorkerId("dead"), Capabilities(()), 1, offline_reason="no answer")
        )
        await fake(rig)
        job_id = await rig.submit()
        assert (await rig.take("fake")).job_id == job_id


async def test_one_that_waits_for_a_job_gets_none_that_comes_after_a_real_worker() -> None:
    async with Rig() as rig:
        await fake(rig)
        waiting = rig.park("fake")
        await rig.settle()
        await rig.worker("gpu")
        await rig.submit()
        await rig.settle()
        assert not waiting.done()
        waiting.cancel()


async def test_one_that_was_told_to_works_beside_real_ones() -> None:
    async with Rig() as rig:
        await rig.worker("gpu")
        await fake(rig, works_beside_real=True)
        job_id = await rig.submit()
        assert (await rig.take("fake")).job_id == job_id


async def test_without_real_workers_any_more_fakes_work_again() -> None:
    async with Rig() as rig:
        await fake(rig)
        real = await rig.worker("gpu")
        await rig.submit()
        assert await rig.poll("fake") is None
        await rig.engine.remove_worker(real)
        await rig.take("fake")


@pytest.mark.parametrize(
    ("declared", "found", "is_fake"),
    [
        (False, [], False),
        (False, [False], False),
        (False, [True], True),
        (True, [False], True),
        (False, [False, True], False),
    ],
)
def test_a_worker_is_fake_if_all_that_it_offers_is(declared: bool, found: list[bool], is_fake: bool) -> None:
    inventories = {
        str(number): Inventory(Capabilities((), is_fake=each)) for number, each in enumerate(found)
    }
    assert join(Capabilities((), is_fake=declared), inventories).capabilities.is_fake is is_fake
