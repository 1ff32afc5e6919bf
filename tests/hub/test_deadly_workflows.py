"""A tenant's graphs that servers die of, over the API: refused, listed, lifted; and the tenant that goes on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
import pytest_asyncio
from tests.hub._hub import TENANT, HubRig, graph, hub_in_process, submission

from comfyfleet.model.access import Role
from comfyfleet.model.calls import FailureReport, Poll, RegisterWorker
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.worker import Capabilities, Service

ACME = f"/api/tenants/{TENANT}"


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(databases={"default": f"sqlite:///{tmp_path}/default.db"}) as rig:
        assert (await rig.post("/api/tenants", {"id": TENANT})).status == 201
        yield rig


async def kill_two(rig: HubRig, kind: str) -> str:
    job_id = await rig.submit(role=Role.TENANT, workflow=graph(kind), retry_delay_s=0)
    for name in ("gpu-a", "gpu-b"):
        worker_id = WorkerId(name)
        capabilities = Capabilities((Service("comfyui"),), has_hub=True)
        await rig.engine.register(RegisterWorker(worker_id, capabilities))
        leased = await rig.engine.poll(Poll(worker_id, PollId(f"{kind}-{name}"), 0))
        assert leased is not None and leased.job_id == job_id
        failure = Failure(FailureKind.DEAD_WORKER, "its execution thread is dead", server_died="thread")
        await rig.engine.fail(FailureReport(leased.ref, failure))
    return job_id


async def test_an_operator_sees_and_lifts_what_is_refused(rig: HubRig) -> None:
    job_id = await kill_two(rig, "Deadly")
    assert (await rig.get(f"/api/jobs/{job_id}")).body["status"] == "failed"
    refused = await rig.post("/api/jobs", submission(workflow=graph("Deadly")), role=Role.TENANT)
    assert (refused.status, refused.code) == (422, "invalid_workflow")
    assert "servers died while they ran this workflow" in refused.body["detail"]
    assert "comfyfleet blocks lift '*'" in refused.body["detail"]
    blocks = (await rig.get("/api/blocks")).body["blocks"]
    (block,) = [each for each in blocks if each["worker_id"] == "*"]
    assert (block["tenant"], block["workflow_hash"]) == (TENANT, refused.body["workflow_hash"])
    assert (block["reason"], block.get("blocked_until")) == ("server_died", None)
    path = f"/api/blocks/{quote('*', safe='')}/{quote(block['target'], safe='')}"
    assert (await rig.ask("DELETE", path, role=Role.TENANT)).code == "not_allowed"
    assert (await rig.ask("DELETE", path)).status == 204
    assert (await rig.ask("DELETE", path)).code == "not_found"
    await rig.submit(role=Role.TENANT, workflow=graph("Deadly"))


async def test_a_tenant_of_whose_graphs_servers_die_is_suspended_with_an_alert(
    rig: HubRig, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in ("One", "Two"):
        await kill_two(rig, kind)
    assert (await rig.get(ACME)).body["state"] == "active"
    with caplog.at_level(logging.WARNING):
        await kill_two(rig, "Three")
    assert (await rig.get(ACME)).body["state"] == "suspended"
    assert f"tenant {TENANT} is suspended: servers died of 3 or more of its workflows" in caplog.text
    entries = (await rig.get("/api/audit")).body["entries"]
    assert ("hub", "tenant_suspended", TENANT, "done") in [
        (each["key_id"], each["action"], each["target"], each["outcome"]) for each in entries
    ]
    refused = await rig.post("/api/jobs", submission(workflow=graph("Fine")), role=Role.TENANT)
    assert "suspended" in refused.body["detail"]
    await rig.submit(workflow=graph("Fine"))
    assert (await rig.post(f"{ACME}/resume")).body["state"] == "active"
    await rig.submit(role=Role.TENANT, workflow=graph("Fine"))
