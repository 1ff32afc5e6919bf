"""For whom a job is submitted, and who may read what was asked for with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, graph, hub_in_process, submission

from comfyfleet.model.access import Role
from comfyfleet.model.ids import TenantId


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(folder=tmp_path) as rig:
        yield rig


async def tenant_of(rig: HubRig, job_id: str) -> str:
    return str((await rig.get(f"/api/jobs/{job_id}")).body["tenant"])


# for whom


@pytest.mark.parametrize("role", [Role.ADMIN, Role.OPERATOR])
@pytest.mark.parametrize("name", ["tenant", "tenant_id", "customer_id"])
async def test_operators_submit_for_any_tenant(rig: HubRig, role: Role, name: str) -> None:
    job_id = await rig.submit(role=role, **{name: "acme"})
    assert await tenant_of(rig, job_id) == "acme"
    assert (await rig.get(f"/api/jobs/{job_id}", role=Role.TENANT)).status == 200


@pytest.mark.parametrize("name", ["tenant", "tenant_id", "customer_id"])
async def test_a_tenant_submits_for_itself_alone(rig: HubRig, name: str) -> None:
    refused = await rig.post("/api/jobs", submission(**{name: "somebody-else"}), role=Role.TENANT)
    assert (refused.status, refused.code) == (403, "not_allowed")
    assert refused.body["field"] == name and "'acme'" in refused.body["detail"]
    assert (await rig.get("/api/jobs")).body["jobs"] == []
    # Its own name is no other.
    assert await tenant_of(rig, await rig.submit(role=Role.TENANT, **{name: "acme"})) == "acme"


async def test_two_names_for_the_tenant_must_agree(rig: HubRig) -> None:
    refused = await rig.post("/api/jobs", submission(tenant_id="acme", customer_id="other"))
    assert refused.code == "invalid_request"
    job_id = await rig.submit(tenant_id="acme", customer_id="acme", tenant="acme")
    assert await tenant_of(rig, job_id) == "acme"


async def test_each_job_of_a_batch_is_for_its_own_tenant(rig: HubRig) -> None:
    jobs = [submission(tenant="acme"), submission(), submission(customer_id="other")]
    answer = (await rig.post("/api/jobs/batch", {"jobs": jobs})).body
    found = [await tenant_of(rig, item["job"]["id"]) for item in answer["items"]]
    assert found == ["acme", "default", "other"]
    partly = (await rig.post("/api/jobs/batch", {"jobs": jobs}, role=Role.TENANT)).body
    assert [item["status"] for item in partly["items"]] == [201, 201, 403]
    assert partly["items"][2]["problem"]["code"] == "not_allowed"


async def test_a_reference_is_the_tenants_for_whom_the_job_is(rig: HubRig) -> None:
    mine = await rig.submit(reference="r1", role=Role.TENANT)
    again = await rig.post("/api/jobs", submission(reference="r1", tenant="acme"))
    assert (again.status, again.body["id"]) == (200, mine)
    assert (await rig.post("/api/jobs", submission(reference="r1"))).status == 201


async def test_a_file_that_an_operator_uploads_for_a_tenant_is_the_tenants(rig: HubRig) -> None:
    made = await rig.post("/api/files", {"name": "a.png", "tenant": "acme"}, role=Role.OPERATOR)
    assert made.status == 201
    assert (await rig.get(f"/api/files/{made.body['id']}", role=Role.TENANT)).status == 200
    refused = await rig.post("/api/files", {"name": "a.png", "tenant": "other"}, role=Role.TENANT)
    assert refused.code == "not_allowed"


# what was asked for


ASKED: dict[str, Any] = {
    "requirements": {"hardware": {"gpu_memory_gb": 24}, "models": ["a.safetensors"], "workers": ["gpu-a"]},
    "preferences": {"region": "eu"},
    "metadata": {"user": "42"},
    "timeouts": {"total_s": 60},
    "priority": 3,
    "max_attempts": 2,
    "include_outputs": ["2"],
    "webhook": "https://example.com/hook?secret=x",
}


async def test_what_was_asked_for_can_be_read_and_submitted_again(rig: HubRig) -> None:
    job_id = await rig.submit(role=Role.TENANT, **ASKED)
    for role in (Role.TENANT, Role.OPERATOR, Role.ADMIN):
        answer = await rig.get(f"/api/jobs/{job_id}/payload", role=role)
        assert answer.status == 200
        told = answer.body
        assert (told["id"], told["tenant"], told["service"]) == (job_id, "acme", "comfyui")
        assert told["payload"] == {"workflow": graph()}
        for name in ("preferences", "metadata", "timeouts", "priority", "max_attempts", "include_outputs"):
            assert told[name] == ASKED[name]
        assert told["requirements"] == ASKED["requirements"]
        # A webhook's query may hold a secret.
        assert told["webhook"]["url"] == "https://example.com/hook?…"
    again = {name: value for name, value in told.items() if name not in ("id", "webhook", "seeds")}
    assert (await rig.post("/api/jobs", again)).status == 201


async def test_a_changed_priority_and_a_drawn_seed_are_told(rig: HubRig) -> None:
    job_id = await rig.submit(workflow=graph(seed=-1), priority=1)
    await rig.ask("PATCH", f"/api/jobs/{job_id}", {"priority": 9})
    told = (await rig.get(f"/api/jobs/{job_id}/payload")).body
    assert told["priority"] == 9
    assert told["seeds"] == (await rig.get(f"/api/jobs/{job_id}")).body["seeds"] != {}


async def test_a_payload_is_not_for_those_who_only_look_nor_for_other_tenants(rig: HubRig) -> None:
    job_id = await rig.submit(role=Role.TENANT)
    assert (await rig.get(f"/api/jobs/{job_id}/payload", role=Role.VIEWER)).code == "not_allowed"
    _, stranger = await rig.hub.keys.create(Role.TENANT, tenant=TenantId("other"))
    assert (await rig.get(f"/api/jobs/{job_id}/payload", key=stranger)).code == "not_found"
