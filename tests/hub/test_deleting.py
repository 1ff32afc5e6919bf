"""Files are listed and deleted, jobs that have ended are deleted: by their own tenant, and never from under a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.hub._hub import Answer, HubRig, hub_in_process, running_hub, submission
from tests.hub._watching import complete, lease, register
from tests.hub.test_files import left_in
from tests.hub.test_inputs import edit

from comfyfleet import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import TenantId


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[HubRig]:
    async with hub_in_process(folder=tmp_path) as rig:
        yield rig


async def uploaded(rig: HubRig, name: str = "a.png", role: Role = Role.TENANT, **more: Any) -> str:
    made = (await rig.post("/api/files", {"name": name, "type": "image/png", **more}, role=role)).body
    assert (await rig.ask("PUT", made["link"]["url"], role=None, raw=name.encode())).status == 200
    assert (await rig.post(f"/api/files/{made['id']}/complete", role=role)).status == 200
    return str(made["id"])


async def listed(rig: HubRig, query: str = "", **more: Any) -> list[str]:
    answer = await rig.get(f"/api/files{query}", **more)
    assert answer.status == 200, answer.content
    return [each["id"] for each in answer.body["files"]]


# files


async def test_files_are_listed_page_by_page_each_tenant_its_own(rig: HubRig) -> None:
    mine = [await uploaded(rig, f"{number}.png") for number in range(3)]
    theirs = await uploaded(rig, tenant="other", role=Role.ADMIN)
    assert await listed(rig, role=Role.TENANT) == mine
    assert await listed(rig) == [*mine, theirs]
    assert await listed(rig, "?tenant=other", role=Role.OPERATOR) == [theirs]
    assert await listed(rig, "?tenant=other", role=Role.TENANT) == []
    page = (await rig.get("/api/files?limit=2", role=Role.TENANT)).body
    rest = (await rig.get(f"/api/files?limit=2&cursor={page['cursor']}", role=Role.TENANT)).body
    assert [each["id"] for each in (*page["files"], *rest["files"])] == mine
    first = page["files"][0]
    assert (first["name"], first["is_complete"], first["size"]) == ("0.png", True, 5)
    assert (await rig.get(first["link"]["url"], role=None)).content == b"0.png"


async def test_whoever_only_looks_gets_no_link_to_write_to_from_a_list(rig: HubRig) -> None:
    await rig.post("/api/files", {"name": "a.png"}, role=Role.TENANT)
    for role in (Role.VIEWER, Role.TENANT):
        (seen,) = (await rig.get("/api/files", role=role)).body["files"]
        assert seen.get("link") is None and not seen.get("is_complete")


async def test_the_files_of_a_job_are_found_by_it(rig: HubRig) -> None:
    await uploaded(rig)
    assert await listed(rig, "?kind=output") == []
    assert await listed(rig, "?job_id=nobody") == []
    assert len(await listed(rig, "?kind=input")) == 1


async def test_a_deleted_file_is_gone_with_its_bytes(rig: HubRig, tmp_path: Path) -> None:
    file_id = await uploaded(rig)
    assert left_in(tmp_path) == [file_id]
    assert (await rig.ask("DELETE", f"/api/files/{file_id}", role=Role.TENANT)).status == 204
    assert left_in(tmp_path) == []
    assert await listed(rig) == []
    assert (await rig.get(f"/api/files/{file_id}")).code == "not_found"
    assert (await rig.ask("DELETE", f"/api/files/{file_id}")).code == "not_found"
    jobs = (await rig.get("/api/audit?kind=jobs")).body["entries"]
    assert ("delete_file", file_id) in [(each["action"], each.get("target")) for each in jobs]


async def test_a_file_that_an_open_job_brings_is_not_deleted(rig: HubRig) -> None:
    file_id = await uploaded(rig)
    body = submission(workflow=edit(), inputs=[{"file": file_id, "node": "10", "input": "image"}])
    job_id = (await rig.post("/api/jobs", body, role=Role.TENANT)).body["id"]
    refused = await rig.ask("DELETE", f"/api/files/{file_id}", role=Role.TENANT)
    assert (refused.status, refused.code) == (409, "wrong_phase")
    assert "cancel" in refused.body["detail"]
    assert await listed(rig) == [file_id]
    await rig.post(f"/api/jobs/{job_id}/cancel", role=Role.TENANT)
    assert (await rig.ask("DELETE", f"/api/files/{file_id}", role=Role.TENANT)).status == 204
    # Whoever names it from now on hears that it is gone.
    again = await rig.post("/api/jobs", body, role=Role.TENANT)
    assert again.code == "invalid_request" and file_id in again.body["detail"]


async def test_another_tenants_file_is_not_deleted(rig: HubRig) -> None:
    file_id = await uploaded(rig)
    _, stranger = await rig.hub.keys.create(Role.TENANT, tenant=TenantId("other"))
    assert (await rig.ask("DELETE", f"/api/files/{file_id}", key=stranger)).code == "not_found"
    assert (await rig.ask("DELETE", f"/api/files/{file_id}", role=Role.VIEWER)).code == "not_allowed"
    assert await listed(rig) == [file_id]


async def test_files_of_a_tenant_with_a_database_are_listed_and_deleted(tmp_path: Path) -> None:
    databases = {"default": f"sqlite:///{tmp_path}/tenants.db"}
    async with hub_in_process(folder=tmp_path / "files", databases=databases) as rig:
        assert (await rig.post("/api/tenants", {"id": "acme"})).status == 201
        mine = await uploaded(rig)
        for key in (rig.keys[Role.TENANT], rig.keys[Role.ADMIN]):
            (seen,) = (await rig.get("/api/files", key=key)).body["files"]
            assert (seen["id"], seen["name"], seen["is_complete"]) == (mine, "a.png", True)
        assert (await rig.ask("DELETE", f"/api/files/{mine}", role=Role.TENANT)).status == 204
        assert await listed(rig) == []


# jobs


@pytest.mark.parametrize("url", ["memory:", "sqlite:///{}/fleet.db"], ids=["memory", "sqlite"])
async def test_a_job_that_has_ended_is_deleted_and_one_that_has_not_is_not(url: str, tmp_path: Path) -> None:
    async with hub_in_process(store_url=url.format(tmp_path)) as rig:
        await register(rig)
        job_id = await rig.submit(role=Role.TENANT, reference="mine")
        open_ = await rig.ask("DELETE", f"/api/jobs/{job_id}", role=Role.TENANT)
        assert (open_.status, open_.code) == (409, "wrong_phase")
        assert "cancel it first" in open_.body["detail"]
        await complete(rig, await lease(rig))
        assert (await rig.ask("DELETE", f"/api/jobs/{job_id}", role=Role.VIEWER)).code == "not_allowed"
        assert (await rig.ask("DELETE", f"/api/jobs/{job_id}", role=Role.TENANT)).status == 204
        for path in ("", "/result", "/payload", "/explain"):
            assert (await rig.get(f"/api/jobs/{job_id}{path}")).code == "not_found"
        assert (await rig.get("/api/jobs")).body["jobs"] == []
        assert (await rig.get("/api/stats")).body["completed"] == 0
        assert (await rig.ask("DELETE", f"/api/jobs/{job_id}", role=Role.TENANT)).code == "not_found"
        # Its reference is free again.
        assert await rig.submit(role=Role.TENANT, reference="mine") != job_id


async def test_a_job_that_others_wait_for_has_told_them_before_it_goes(rig: HubRig) -> None:
    await register(rig)
    first, other = await rig.submit(), await rig.submit(priority=-5)
    last = await rig.submit(after=[first, other])
    await complete(rig, await lease(rig))
    assert (await rig.ask("DELETE", f"/api/jobs/{first}")).status == 204
    await complete(rig, await lease(rig, poll_id="2"))
    assert (await lease(rig, poll_id="3")).job_id == last


async def test_a_cancelled_job_of_a_tenant_with_a_database_goes_once_it_is_settled(tmp_path: Path) -> None:
    databases = {"default": f"sqlite:///{tmp_path}/tenants.db"}
    async with hub_in_process(databases=databases) as rig:
        assert (await rig.post("/api/tenants", {"id": "acme"})).status == 201
        job_id = await rig.submit(role=Role.TENANT)
        await rig.post(f"/api/jobs/{job_id}/cancel", role=Role.TENANT)
        soon = await rig.ask("DELETE", f"/api/jobs/{job_id}", role=Role.TENANT)
        assert soon.code == "wrong_phase" and 0 < soon.body["retry_after_s"] <= 60
        assert (await rig.get(f"/api/jobs/{job_id}")).status == 200


async def settled_job(rig: HubRig, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a tenant with a database, under the reference "mine"; its end need not be remembered for a minute."""
    monkeypatch.setattr("comfyfleet.engine.job_operations.TOMBSTONE_S", 1e-3)
    assert (await rig.post("/api/tenants", {"id": "acme"})).status == 201
    job_id = await rig.submit(role=Role.TENANT, reference="mine")
    await rig.post(f"/api/jobs/{job_id}/cancel", role=Role.TENANT)
    return job_id


async def deleted(rig: HubRig, job_id: str) -> Answer:
    async with asyncio.timeout(60):
        while True:
            answer = await rig.ask("DELETE", f"/api/jobs/{job_id}", role=Role.TENANT)
            if answer.status != 409:
                return answer


async def test_a_job_that_lies_in_a_database_goes_from_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hub_in_process(databases={"default": f"sqlite:///{tmp_path}/tenants.db"}) as rig:
        job_id = await settled_job(rig, monkeypatch)
        assert (await deleted(rig, job_id)).status == 204
        assert (await rig.get("/api/jobs", role=Role.TENANT)).body["jobs"] == []
        assert await rig.submit(role=Role.TENANT, reference="mine") != job_id


async def test_a_job_whose_tenant_is_on_its_way_to_another_database_goes_when_it_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows must stay as they are meanwhile; forgotten in the queue alone, its reference would lead nowhere."""
    async with hub_in_process(databases={"default": f"sqlite:///{tmp_path}/tenants.db"}) as rig:
        job_id = await settled_job(rig, monkeypatch)
        home = await rig.tenant_services.directory.locate(TenantId("acme"))
        assert home is not None
        with monkeypatch.context() as patch:
            patch.setattr(home.database, "forget_jobs", _nothing_forgotten)
            told = await deleted(rig, job_id)
            assert (told.status, told.code) == (503, "unavailable")
            assert (await rig.get(f"/api/jobs/{job_id}", role=Role.TENANT)).body["reference"] == "mine"
        assert (await deleted(rig, job_id)).status == 204
        assert await rig.submit(role=Role.TENANT, reference="mine") != job_id


async def test_a_job_whose_database_goes_away_at_the_last_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hub_in_process(databases={"default": f"sqlite:///{tmp_path}/tenants.db"}) as rig:
        job_id = await settled_job(rig, monkeypatch)
        home = await rig.tenant_services.directory.locate(TenantId("acme"))
        assert home is not None

        async def away(*_: object) -> None:
            raise Fault("the database is away")

        with monkeypatch.context() as patch:
            patch.setattr(home.database, "forget_jobs", away)
            assert (await deleted(rig, job_id)).status == 503
            assert (await rig.get(f"/api/jobs/{job_id}", role=Role.TENANT)).status == 200
        assert (await deleted(rig, job_id)).status == 204
        assert await rig.submit(role=Role.TENANT, reference="mine") != job_id


async def _nothing_forgotten(*_: object) -> int:
    return 0


async def test_a_program_does_the_same(tmp_path: Path) -> None:
    async with running_hub(folder=tmp_path) as rig, FleetClient(rig.url, rig.keys[Role.TENANT]) as client:
        files = [await client.upload(f"picture {number}".encode(), name="a.png") for number in range(3)]
        page = await client.files(limit=2)
        assert [each.id for each in page.files] == [each.id for each in files[:2]] and page.cursor
        assert [each.id async for each in client.every_file()] == [each.id for each in files]
        await client.delete_file(files[0].id)
        assert len((await client.files()).files) == 2
        made = await client.submit({"1": {"class_type": "A", "inputs": {}}})
        await client.cancel(made.id)
        await client.delete(made.id)
        assert (await client.jobs()).jobs == ()
