"""Every route with every role, from the table itself; and the hub that asks for no key."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, ask_app, hub_in_process

from comfyfleet.hub.app import Hub
from comfyfleet.hub.http.server import HubServer, HubServerSettings
from comfyfleet.model.access import Role
from comfyfleet.model.calls import FailureReport, Poll, RegisterWorker, Release
from comfyfleet.model.errors import Refusal
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import PollId, TenantId, WorkerId
from comfyfleet.model.worker import Capabilities, Service, TenantAccess
from comfyfleet.policy.rules import Rules
from comfyfleet.wire.openapi import document
from comfyfleet.wire.routes import ROUTES

DOCUMENT = document(ROUTES, "1")
OPERATIONS = [
    (method.upper(), each, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
    for each in (path, *operation.get("x-aliases", ()))
]
OPEN_TO_ALL = {
    "GET /health",
    "GET /health/live",
    "GET /health/ready",
    "GET /docs",
    "GET /openapi.json",
    "POST /api/worker/enrol",
    # By a signed link, which is a credential of its own.
    "GET /api/files/{file_id}/content",
    "PUT /api/files/{file_id}/content",
}


ACME = TenantId("acme")
OTHER = TenantId("other")


@pytest_asyncio.fixture(scope="module")
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        yield rig


class Belongings:
    """What one tenant has, and keys of another tenant beside it."""

    def __init__(self, rig: HubRig, ids: dict[str, str], strangers: dict[Role, str]) -> None:
        self.rig = rig
        self.ids = ids
        self.strangers = strangers


@pytest_asyncio.fixture(scope="module")
async def theirs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Belongings]:
    folder = tmp_path_factory.mktemp("files")
    databases = {"default": f"sqlite:///{folder}/tenants.db"}
    async with hub_in_process(folder=folder, rules=Rules(max_attempts=1), databases=databases) as rig:
        offer = Capabilities(
            (Service("comfyui"),), tenant_access=TenantAccess("loose", allowed=(ACME, OTHER))
        )
        await rig.engine.register(RegisterWorker(WorkerId("gpu-a"), offer, 3))
        failure = Failure(FailureKind.NODE_ERROR, "acme's own words")
        jobs = [await rig.submit(role=Role.TENANT, metadata={"of": "acme"}) for _ in range(3)]
        failed = await rig.engine.poll(Poll(WorkerId("gpu-a"), PollId("1"), 0))
        assert failed is not None
        await rig.engine.fail(FailureReport(failed.ref, failure))
        for block in await rig.engine.blocks():
            await rig.engine.unblock(block.worker_id, block.target)
        declined = await rig.engine.poll(Poll(WorkerId("gpu-a"), PollId("2"), 0))
        assert declined is not None
        await rig.engine.release(Release(declined.ref, "declined"))
        assert await rig.engine.poll(Poll(WorkerId("gpu-a"), PollId("3"), 0)) is not None
        file = await rig.post("/api/files", {"name": "acme.png", "type": "image/png"}, role=Role.TENANT)
        # Set up last: the jobs above lie in the store itself.
        assert (await rig.post("/api/tenants", {"id": ACME})).status == 201
        ids = {"job_id": jobs[0], "file_id": file.body["id"], "tenant_id": ACME}
        strangers = {
            role: (await rig.hub.keys.create(role, tenant=OTHER))[1] for role in (Role.TENANT, Role.VIEWER)
        }
        yield Belongings(rig, ids, strangers)


def filled(path: str) -> str:
    # The fleet's stream has no end: it is asked for what it refuses.
    return re.sub(r"\{\w+\}", "nobody", path) + ("?nonsense=1" if path == "/api/events" else "")


@pytest.mark.parametrize("role", [*Role, None], ids=lambda role: "no key" if role is None else role.value)
@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [(method, path, operation["x-roles"]) for method, path, operation in OPERATIONS],
    ids=[f"{method} {path}" for method, path, _ in OPERATIONS],
)
async def test_a_route_opens_to_its_roles_alone(
    rig: HubRig, method: str, path: str, allowed: list[str], role: Role | None
) -> None:
    answer = await rig.ask(method, filled(path), role=role, raw=b"not JSON")
    if not allowed:
        assert answer.status not in (401, 403), "a link is refused for what it lacks, not for a key"
    elif role is None:
        assert (answer.status, answer.code) == (401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"
    elif role.value not in allowed:
        assert (answer.status, answer.code) == (403, "not_allowed")
    else:
        assert answer.status not in (401, 403, 405)
        assert answer.status < 500


def test_few_routes_need_no_key_and_admins_may_all() -> None:
    public = {f"{method} {path}" for method, path, operation in OPERATIONS if not operation["x-roles"]}
    assert public == OPEN_TO_ALL
    assert all("admin" in operation["x-roles"] for _, _, operation in OPERATIONS if operation["x-roles"])


def test_a_viewer_changes_nothing_and_a_worker_sees_no_job() -> None:
    for method, path, operation in OPERATIONS:
        if "viewer" in operation["x-roles"]:
            assert method == "GET"
        if "worker" in operation["x-roles"]:
            assert path.startswith("/api/worker/")


OF_ONE_TENANT = [
    (method, path, Role(role))
    for method, path, operation in OPERATIONS
    for role in operation["x-roles"]
    if role in ("tenant", "viewer") and re.search(r"\{(job_id|file_id|tenant_id)\}", path)
]
LOOKS = [
    (path, Role(role))
    for method, path, operation in OPERATIONS
    for role in operation["x-roles"]
    if role in ("tenant", "viewer")
    and method == "GET"
    and not re.search(r"\{(job_id|file_id|tenant_id)\}", path)
    # A stream has no end; test_streams.py listens to it.
    if path != "/api/events"
]


@pytest.mark.parametrize(("method", "path", "role"), OF_ONE_TENANT)
async def test_to_another_tenants_key_a_job_a_file_and_a_book_are_not_there(
    theirs: Belongings, method: str, path: str, role: Role
) -> None:
    """In the very words of one that never was, and nothing is changed."""
    rig, key = theirs.rig, theirs.strangers[role]
    name, known = next((name, each) for name, each in theirs.ids.items() if f"{{{name}}}" in path)
    body: dict[str, Any] | None = {"priority": 1} if method == "PATCH" else None
    if path.endswith("/parts"):
        body = {"parts": [{"number": 1, "sha256": "0" * 64}]}
    before = (await rig.get(f"/api/jobs/{theirs.ids['job_id']}")).body
    answers = [
        await rig.ask(method, path.replace(f"{{{name}}}", each), body, key=key) for each in (known, "nobody")
    ]
    assert [(answer.status, answer.code) for answer in answers] == [(404, "not_found")] * 2
    there, never = (answer.body for answer in answers)
    assert there["detail"].replace(known, "nobody") == never["detail"]
    assert (await rig.get(f"/api/jobs/{theirs.ids['job_id']}")).body == before


@pytest.mark.parametrize(("path", "role"), LOOKS)
async def test_nothing_another_tenant_looks_at_tells_of_jobs_and_files(
    theirs: Belongings, path: str, role: Role
) -> None:
    rig, key = theirs.rig, theirs.strangers[role]
    for query in ("", "?tenant=acme") if path.endswith("jobs") else ("",):
        answer = await rig.get(path.replace("{worker_id}", "gpu-a") + query, key=key)
        # Figures of the whole fleet are no tenant's.
        assert answer.status == (403 if path in ("/metrics", "/api/capacity") else 200), answer.content
        shown = answer.content.decode()
        every = [job["id"] for job in (await rig.get("/api/jobs")).body["jobs"]]
        told = [word for word in (*every, *theirs.ids.values(), "acme") if word in shown]
        assert told == []


async def test_what_belongs_to_a_tenant_is_there_for_its_own_keys(theirs: Belongings) -> None:
    """The other side: what the tests above do not find can be found."""
    rig = theirs.rig
    _, viewer = await rig.hub.keys.create(Role.VIEWER, tenant=ACME)
    for key in (viewer, rig.keys[Role.VIEWER], rig.keys[Role.TENANT]):
        assert len((await rig.get("/api/jobs", key=key)).body["jobs"]) == 3
        assert (await rig.get(f"/api/jobs/{theirs.ids['job_id']}", key=key)).status == 200
    for key in (viewer, rig.keys[Role.VIEWER]):
        assert len((await rig.get("/api/dead-letter", key=key)).body["jobs"]) == 1
        (worker,) = (await rig.get("/api/workers", key=key)).body["workers"]
        assert worker["status"] == "busy" and len(worker["current_jobs"]) == 1
        assert len((await rig.get("/api/blocks", key=key)).body["blocks"]) == 1


def test_every_route_that_names_a_job_or_a_file_is_asked_for_with_a_wrong_tenant() -> None:
    asked = {(method, path) for method, path, _ in OF_ONE_TENANT} | {("GET", path) for path, _ in LOOKS}
    left = {
        f"{method} {path}"
        for method, path, operation in OPERATIONS
        if (method, path) not in asked and {"tenant", "viewer"} & set(operation["x-roles"])
    }
    jobs = ("/api/jobs", "/jobs", "/api/ai-jobs")
    # They make something, and of whose it becomes the key decides; or they answer with what they were sent.
    making = (
        *jobs,
        *(f"{path}/batch" for path in jobs),
        "/api/files",
        "/api/workflows/convert",
        "/api/jobs/quote",
    )
    # test_webhooks.py and test_changing_webhooks.py try these with the keys of another tenant.
    elsewhere = {
        "POST /api/webhooks",
        "PATCH /api/webhooks/{webhook_id}",
        "POST /api/webhooks/{webhook_id}/test",
        "DELETE /api/webhooks/{webhook_id}",
        "POST /api/webhook-secret",
        "POST /api/deliveries/{delivery_id}/resend",
    }
    assert left == {"GET /api/events", *elsewhere, *(f"POST {path}" for path in making)}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer cfk_",
        "Bearer cfk_x_y",
        "Basic Y2Zr",
        "cfk_a_b",
        "Bearer cfk_0_\u00e9",
        "Bearer a b",
    ],
)
async def test_a_credential_that_is_none_is_refused(rig: HubRig, header: str) -> None:
    answer = await rig.get("/api/stats", role=None, headers={"authorization": header})
    assert (answer.status, answer.code) == (401, "unauthenticated")


async def test_a_key_in_the_query_opens_no_ordinary_route(rig: HubRig) -> None:
    answer = await rig.get(f"/api/stats?token={rig.keys[Role.ADMIN]}", role=None)
    assert answer.code == "unauthenticated"


# a hub without keys


async def ask_open(hub: Hub, address: str = "127.0.0.1", **headers: str) -> int:
    sent = {"host": "127.0.0.1:3001", **headers}
    return (await ask_app(hub, "GET", "/api/keys", sent, b"", address)).status


async def test_an_open_hub_believes_its_own_machine_and_nobody_else() -> None:
    async with hub_in_process(is_open=True) as rig:
        assert await ask_open(rig.hub) == 200
        assert await ask_open(rig.hub, "::1", host="[::1]:3001") == 200
        assert await ask_open(rig.hub, host="localhost:3001", origin="http://localhost:3001") == 200
        assert await ask_open(rig.hub, "10.0.0.7") == 401
        # A name that somebody else made point here, and a page of another site in this machine's browser.
        assert await ask_open(rig.hub, host="evil.example:3001") == 401
        assert await ask_open(rig.hub, origin="http://evil.example") == 401
        assert await ask_open(rig.hub, origin="null") == 401
        # A wrong key is wrong here too.
        assert await ask_open(rig.hub, authorization="Bearer cfk_0_1") == 401
        assert await ask_open(rig.hub, authorization=f"Bearer {rig.keys[Role.VIEWER]}") == 403


async def test_an_open_hub_listens_on_the_loopback_alone() -> None:
    async with hub_in_process(is_open=True) as rig:
        with pytest.raises(Refusal, match="may not listen on"):
            await HubServer(rig.hub, HubServerSettings(host="0.0.0.0", port=0)).__aenter__()
