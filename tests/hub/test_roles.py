"""Every route with every role, from the table itself; and the hub that asks for no key."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.hub._hub import HubRig, ask_app, hub_in_process

from comfyfleet.hub.app import Hub
from comfyfleet.hub.serving import Serving, ServingSettings
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Refusal
from comfyfleet.wire.openapi import document
from comfyfleet.wire.routes import ROUTES

DOCUMENT = document(ROUTES, "1")
OPERATIONS = [
    (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]
OPEN_TO_ALL = {
    "GET /health",
    "GET /health/live",
    "GET /health/ready",
    "GET /openapi.json",
    "POST /api/worker/enrol",
    # By a signed link, which is a credential of its own.
    "GET /api/files/{file_id}/content",
    "PUT /api/files/{file_id}/content",
}


@pytest_asyncio.fixture(scope="module")
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        yield rig


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
            await Serving(rig.hub, ServingSettings(host="0.0.0.0", port=0)).__aenter__()
