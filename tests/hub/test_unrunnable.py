"""Jobs that no worker which is here can run: found in the list, counted for Prometheus."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, hub_in_process

from comfyfleet import engine
from comfyfleet.model.access import Role
from comfyfleet.model.calls import RegisterWorker
from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.model.worker import Capabilities, Service

NEEDS_MORE = {"requirements": {"hardware": {"gpu_memory_gb": 80}}}


@pytest_asyncio.fixture(params=["memory:", "sqlite:///{}/fleet.db"], ids=["memory", "sqlite"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(store_url=request.param.format(tmp_path)) as rig:
        await rig.engine.register(RegisterWorker(WorkerId("gpu-a"), Capabilities((Service("comfyui"),))))
        yield rig


async def unrunnable(rig: HubRig, query: str = "", **more: object) -> list[str]:
    answer = await rig.get(f"/api/jobs?unrunnable=true&order=oldest{query}", **more)
    assert answer.status == 200, answer.content
    return [job["id"] for job in answer.body["jobs"]]


async def counted(rig: HubRig) -> int:
    text = (await rig.get("/metrics")).content.decode()
    found = re.search(r"^comfyfleet_jobs_unrunnable (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return int(float(found[1]))


@pytest.fixture(autouse=True)
def always_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.waiting_jobs, "_REMEMBER_S", 0.0)


async def test_what_nobody_can_run_is_listed_and_counted_until_somebody_comes(rig: HubRig) -> None:
    await rig.submit()
    first = await rig.submit(**NEEDS_MORE)
    second = await rig.submit(service="another", role=Role.TENANT)
    await rig.submit()
    assert await unrunnable(rig) == [first, second]
    assert await counted(rig) == 2
    await rig.engine.register(RegisterWorker(WorkerId("gpu-b"), Capabilities((Service("another"),))))
    assert await unrunnable(rig) == [first]
    assert await counted(rig) == 1
    await rig.post(f"/api/jobs/{first}/cancel")
    assert await unrunnable(rig) == [] and await counted(rig) == 0


async def test_without_any_worker_every_job_that_waits_is_such_a_one(rig: HubRig) -> None:
    waiting = await rig.submit()
    held = await rig.submit(after=[waiting])
    assert await counted(rig) == 0
    await rig.engine.unregister(WorkerId("gpu-a"), "it left")
    # What waits for another job could not run anyway.
    assert await unrunnable(rig) == [waiting] != [held]
    assert await counted(rig) == 1


async def test_the_filter_goes_with_the_others_and_with_pages(rig: HubRig) -> None:
    made = []
    for number in range(5):
        made.append(await rig.submit(**NEEDS_MORE, metadata={"number": str(number)}))
        await rig.submit()
    page = (await rig.get("/api/jobs?unrunnable=true&order=oldest&limit=2")).body
    rest = await unrunnable(rig, f"&cursor={page['cursor']}")
    assert [job["id"] for job in page["jobs"]] + rest == made
    assert await unrunnable(rig, "&metadata[number]=3") == [made[3]]
    assert await unrunnable(rig, "&status=queued") == made
    assert await unrunnable(rig, "&status=completed") == []
    assert len((await rig.get("/api/jobs?unrunnable=false")).body["jobs"]) == 10
    assert (await rig.get("/api/jobs?unrunnable=perhaps")).code == "invalid_request"


async def test_a_tenant_finds_its_own_alone(rig: HubRig) -> None:
    mine = await rig.submit(**NEEDS_MORE, role=Role.TENANT)
    await rig.submit(**NEEDS_MORE)
    assert await unrunnable(rig, role=Role.TENANT) == [mine]
    _, stranger = await rig.hub.keys.create(Role.TENANT, tenant=TenantId("other"))
    assert await unrunnable(rig, key=stranger) == []
