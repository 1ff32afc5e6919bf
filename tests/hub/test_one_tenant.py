"""What a key of one tenant learns of the rest of the fleet: its own jobs are counted, and workers are named to it only
where they are listed for it or run its jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tests.hub._hub import TENANT, HubRig, hub_in_process, submission

from comfyfleet.model.access import Role
from comfyfleet.model.calls import Poll, RegisterWorker
from comfyfleet.model.ids import PollId, TenantId, WorkerId
from comfyfleet.model.worker import Capabilities, Service, TenantAccess

SECRET = ("gpu-of-borg", "gpu-common-1", "gpu-common-2")
OURS = "gpu-of-acme"


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        await register(rig, "gpu-of-borg", TenantAccess("strict", allowed=(TenantId("borg"),)))
        await register(rig, "gpu-common-1")
        await register(rig, "gpu-common-2")
        yield rig


async def register(rig: HubRig, name: str, access: TenantAccess | None = None, *nodes: str) -> None:
    service = Service("comfyui", node_classes=frozenset({"SaveImage", *nodes}))
    access = access or TenantAccess()
    await rig.engine.register(RegisterWorker(WorkerId(name), Capabilities((service,), tenant_access=access)))


@pytest_asyncio.fixture
async def viewer(rig: HubRig) -> str:
    """The key of somebody who looks at one tenant's jobs."""
    _, key = await rig.hub.keys.create(Role.VIEWER, tenant=TENANT)
    return key


async def test_stats_of_one_tenant_count_its_jobs(rig: HubRig, viewer: str) -> None:
    for _ in range(3):
        await rig.submit()
    await rig.submit(role=Role.TENANT)
    await rig.submit(role=Role.TENANT, not_before=4e9)
    paused = await rig.submit(role=Role.TENANT)
    await rig.post(f"/api/jobs/{paused}/pause", role=Role.TENANT)
    cancelled = await rig.submit(role=Role.TENANT)
    await rig.post(f"/api/jobs/{cancelled}/cancel", role=Role.TENANT)
    everybody = (await rig.get("/api/stats")).body
    assert (everybody["waiting"], everybody["cancelled"], everybody["workers"]) == (4, 1, 3)
    assert "counted" not in everybody
    for key in (viewer, rig.keys[Role.TENANT]):
        stats = (await rig.get("/api/stats", key=key)).body
        shown = {
            name: stats[name] for name in ("waiting", "delayed", "paused", "leased", "cancelled", "failed")
        }
        assert shown == {"waiting": 1, "delayed": 1, "paused": 1, "leased": 0, "cancelled": 1, "failed": 0}
        assert stats["counted"] == 4
        assert stats["workers"] == 2, "those that may work for it"
        assert 0 < stats["payload_bytes"] < everybody["payload_bytes"]


async def test_the_page_of_one_tenant_counts_its_jobs_and_names_no_worker_of_others(
    rig: HubRig, viewer: str
) -> None:
    for _ in range(37):
        await rig.submit()
    for key in (viewer, rig.keys[Role.TENANT]):
        page = (await rig.get("/", key=key)).content.decode()
        assert "<dd>37</dd>" not in page
        assert not [name for name in SECRET if name in page]


async def test_figures_of_the_whole_fleet_are_not_for_a_key_of_one_tenant(rig: HubRig, viewer: str) -> None:
    answer = await rig.get("/metrics", key=viewer)
    assert (answer.status, answer.code) == (403, "not_allowed")
    assert "/api/stats" in answer.body["detail"]


async def test_workers_that_are_not_for_a_tenant_are_not_there_for_its_viewer(
    rig: HubRig, viewer: str
) -> None:
    await register(rig, OURS, TenantAccess("strict", allowed=(TENANT,)))
    listed = (await rig.get("/api/workers", key=viewer)).body["workers"]
    assert [worker["id"] for worker in listed] == [OURS]
    assert (await rig.get(f"/api/workers/{OURS}", key=viewer)).status == 200
    hidden = await rig.get("/api/workers/gpu-common-1", key=viewer)
    never = await rig.get("/api/workers/nobody", key=viewer)
    assert (hidden.status, never.status) == (404, 404)
    assert hidden.body["detail"].replace("gpu-common-1", "nobody") == never.body["detail"]
    assert len((await rig.get("/api/workers")).body["workers"]) == 4, "an operator sees all"


async def test_a_worker_that_runs_a_tenants_job_is_known_to_it(rig: HubRig, viewer: str) -> None:
    await register(rig, "gpu-common-1", None, "KSampler")
    job_id = await rig.submit(role=Role.TENANT)
    leased = await rig.engine.poll(Poll(WorkerId("gpu-common-1"), PollId("1"), 0))
    assert leased is not None and leased.job_id == job_id
    assert (await rig.get(f"/api/jobs/{job_id}", role=Role.TENANT)).body["worker_id"] == "gpu-common-1"
    listed = (await rig.get("/api/workers", key=viewer)).body["workers"]
    assert [worker["id"] for worker in listed] == ["gpu-common-1"]


async def explained(rig: HubRig, role: Role, **fields: Any) -> tuple[dict[str, Any], str]:
    job_id = await rig.submit(role=Role.TENANT, **fields)
    answer = await rig.get(f"/api/jobs/{job_id}/explain", role=role)
    assert answer.status == 200
    return answer.body, answer.content.decode()


async def test_explain_gives_a_tenant_reasons_and_counts_without_names(rig: HubRig) -> None:
    body, text = await explained(rig, Role.TENANT)
    assert not [name for name in SECRET if name in text]
    lacks = "lacks the node class 'KSampler'"
    assert {(*each["reasons"], each.get("count", 1)) for each in body["workers"]} == {
        (lacks, 2),
        (lacks, "works for listed tenants only, and 'acme' is not listed", 1),
    }
    assert "lacks the node class 'KSampler'" in body["summary"]
    assert "borg" not in text


async def test_explain_names_a_tenants_own_worker_to_it(rig: HubRig) -> None:
    await register(rig, OURS, TenantAccess("strict", allowed=(TENANT,)))
    body, text = await explained(rig, Role.TENANT)
    assert OURS in [each["worker_id"] for each in body["workers"]]
    assert not [name for name in SECRET if name in text]
    await register(rig, OURS, TenantAccess("strict", allowed=(TENANT,)), "KSampler")
    await register(rig, "gpu-common-2", None, "KSampler")
    body, text = await explained(rig, Role.TENANT)
    assert (body["able"], body["able_others"]) == ([OURS], 1)
    assert "2 worker(s) can take it" in body["summary"]
    assert not [name for name in SECRET if name in text]


async def test_explain_names_every_worker_to_an_operator(rig: HubRig) -> None:
    body, _ = await explained(rig, Role.OPERATOR)
    assert {each["worker_id"] for each in body["workers"]} == set(SECRET)
    assert body["nearest"] in SECRET


@pytest.mark.parametrize("path", ["/api/jobs", "/api/jobs/batch"])
async def test_a_submission_nobody_can_run_names_no_worker(rig: HubRig, path: str) -> None:
    one = submission(workflow={"1": {"class_type": "Nowhere", "inputs": {}}})
    answer = await rig.post(path, {"jobs": [one]} if path.endswith("batch") else one, role=Role.TENANT)
    assert answer.status in (200, 201), answer.content
    assert not [name for name in SECRET if name in msgspec.json.encode(answer.body).decode()]
