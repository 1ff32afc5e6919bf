"""While a tenant's database is away, nobody else learns from any route that a job or a file of it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
from tests.hub._hub import Answer, HubRig, running_hub, submission
from tests.hub.test_deleting import uploaded
from tests.hub.test_inputs import edit
from tests.hub.test_socket import Line

from comfyfleet.files.records import is_file_id
from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import TenantId
from comfyfleet.wire.route import Route
from comfyfleet.wire.routes import ROUTES

ABOUT = [route for route in ROUTES if {"job_id", "file_id"} & {*route.parameters} and route.roles]


class Scene(NamedTuple):
    rig: HubRig
    job_id: str
    file_id: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder: Path = tmp_path_factory.mktemp("hub")
    databases = {"default": f"sqlite:///{folder}/tenants.db"}
    limits = HubLimits(max_wait_s=0.0, requests_per_s=1e6, burst=1_000_000)
    async with running_hub(folder=folder / "files", databases=databases, limits=limits) as rig:
        assert (await rig.post("/api/tenants", {"id": "acme"})).status == 201
        job_id, file_id = await rig.submit(role=Role.TENANT), await uploaded(rig)

        async def away(*_: object) -> None:
            raise Fault("the database is away")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rig.tenant_services.databases, "database_of", away)
            yield Scene(rig, job_id, file_id)


async def asked(scene: Scene, route: Route, key: str, job_id: str, file_id: str) -> tuple[int, str]:
    path = route.path.replace("{job_id}", job_id).replace("{file_id}", file_id)
    body = {"priority": 1} if route.name == "change_job" else {"parts": [{"number": 1, "sha256": "0" * 64}]}
    async with asyncio.timeout(60):
        answer: Answer = await scene.rig.ask(
            route.method, path, body if route.body and not route.is_body_optional else None, key=key
        )
    return answer.status, answer.body["detail"].replace(job_id, "JOB").replace(file_id, "FILE")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("route", ABOUT, ids=lambda route: route.name)
async def test_to_others_what_is_there_is_like_what_is_not(scene: Scene, route: Route) -> None:
    nobodys = "f_" + "0" * 32
    assert is_file_id(nobodys)
    for role in (Role.TENANT, Role.VIEWER):
        _, stranger = await scene.rig.hub.keys.create(role, tenant=TenantId("other"))
        there = await asked(scene, route, stranger, scene.job_id, scene.file_id)
        nowhere = await asked(scene, route, stranger, "01a1e5f4-cb17-72fd-ad20-e5e545e7d00e", nobodys)
        assert there == nowhere and there[0] in (403, 404)


@pytest.mark.asyncio(loop_scope="module")
async def test_whose_it_is_hears_that_the_database_is_away(scene: Scene) -> None:
    rig = scene.rig
    _, elsewhere = await rig.hub.keys.create(Role.OPERATOR, tenant=TenantId("other"))
    for key in (rig.keys[Role.TENANT], rig.keys[Role.OPERATOR], elsewhere):
        for path in (f"/api/jobs/{scene.job_id}/payload", f"/api/files/{scene.file_id}"):
            answer = await rig.get(path, key=key)
            assert (answer.status, answer.body["detail"]) == (503, "the database is away")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_submission_learns_nothing_of_anothers_file(scene: Scene) -> None:
    _, stranger = await scene.rig.hub.keys.create(Role.TENANT, tenant=TenantId("other"))
    for file_id in (scene.file_id, "f_" + "0" * 32):
        inputs = [{"file": file_id, "node": "10", "input": "image"}]
        answer = await scene.rig.post("/api/jobs", submission(workflow=edit(), inputs=inputs), key=stranger)
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert answer.body["detail"] == f"there is no file {file_id!r} (any more)"
        made = await scene.rig.post("/api/files", {"name": "a.png", "source": file_id}, key=stranger)
        assert made.body["detail"] == f"there is no file {file_id!r} (any more)"


@pytest.mark.asyncio(loop_scope="module")
async def test_over_the_websocket_too(scene: Scene) -> None:
    _, stranger = await scene.rig.hub.keys.create(Role.TENANT, tenant=TenantId("other"))
    headers = {"authorization": f"Bearer {stranger}"}
    async with scene.rig.session.ws_connect(f"{scene.rig.url}/hub", headers=headers) as socket:
        line = Line(socket)
        for name in ("subscribe_progress", "cancel_job", "retry_job"):
            told = await line.ask(name, job_id=scene.job_id)
            assert told["type"] == "error" and told["code"] == "not_found", told
