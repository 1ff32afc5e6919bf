"""Keys at the hub: shown once, hashed at rest, revoked at once, rotated without a gap; workers that enrol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.hub._hub import Answer, HubRig, hub_in_process, running_hub

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Refusal
from comfyfleet.model.ids import WorkerId
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.tenancy.keys import Keys
from comfyfleet.testing.time import ManualClock
from comfyfleet.wire.websocket import AGENT_PROTOCOL


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with hub_in_process() as rig:
        yield rig


async def test_a_key_is_shown_once_and_kept_as_a_digest(rig: HubRig) -> None:
    made = await rig.post("/api/keys", {"role": "tenant", "tenant": "acme", "name": "shop"})
    assert made.status == 201
    key = made.body["key"]
    assert key.startswith("cfk_")
    assert (await rig.get("/api/jobs", key=key)).status == 200
    listed = await rig.get("/api/keys")
    assert made.body["id"] in [each["id"] for each in listed.body["keys"]]
    secret = key.rpartition("_")[2]
    assert secret not in listed.content.decode()
    assert all(secret.encode() not in document.body for document in await rig.documents.listing("keys"))


async def test_keys_are_listed_page_by_page(rig: HubRig) -> None:
    page = (await rig.get("/api/keys?limit=3")).body
    rest = (await rig.get(f"/api/keys?cursor={page['cursor']}")).body
    assert len(page["keys"]) == 3 and len(rest["keys"]) == len(Role) - 3 and "cursor" in rest


async def test_keys_outlive_the_hub_that_made_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/fleet.db"
    async with hub_in_process(store_url=url) as first:
        made = (await first.post("/api/keys", {"role": "viewer"})).body["key"]
        gone = (await first.post("/api/keys", {"role": "viewer"})).body
        await first.ask("DELETE", f"/api/keys/{gone['id']}")
    async with hub_in_process(store_url=url) as second:
        assert (await second.get("/api/stats", key=made)).status == 200
        assert (await second.get("/api/stats", key=gone["key"])).status == 401
        actions = [each["action"] for each in (await second.get("/api/audit")).body["entries"]]
        assert actions == ["create_key", "create_key", "revoke_key"]


async def test_a_revoked_key_opens_nothing_from_that_moment_on(rig: HubRig) -> None:
    made = (await rig.post("/api/keys", {"role": "operator"})).body
    assert (await rig.get("/api/stats", key=made["key"])).status == 200
    assert (await rig.ask("DELETE", f"/api/keys/{made['id']}")).body["revoked_at"] > 0
    assert (await rig.get("/api/stats", key=made["key"])).code == "unauthenticated"
    assert (await rig.post(f"/api/keys/{made['id']}/rotate")).code == "wrong_phase"
    assert (await rig.ask("DELETE", "/api/keys/nobody")).code == "not_found"


@pytest.mark.parametrize("is_here", [True, False], ids=["at this hub", "at another"])
async def test_connections_that_a_key_had_opened_end_when_it_is_revoked(is_here: bool) -> None:
    async with running_hub(limits=HubLimits(beat_s=3600 if is_here else 0.05)) as rig, asyncio.timeout(60):
        job_id = await rig.submit()
        worker = (await rig.post("/api/keys", {"role": "worker"})).body
        viewer = (await rig.post("/api/keys", {"role": "viewer"})).body
        polling, looking = ({"authorization": f"Bearer {made['key']}"} for made in (worker, viewer))
        offer = {"services": [{"name": "another"}]}
        await rig.post("/api/worker/register", {"worker_id": "gpu-b", "capabilities": offer})
        poll = {"worker_id": "gpu-b", "poll_id": "1", "wait_s": 30}
        async with AsyncExitStack() as staying:
            sockets = [
                await staying.enter_async_context(
                    rig.session.ws_connect(rig.url + "/hub", headers=polling, protocols=protocols)
                )
                for protocols in ((), (AGENT_PROTOCOL,))
            ]
            streams = [
                await staying.enter_async_context(rig.session.get(rig.url + path, headers=looking))
                for path in (f"/api/jobs/{job_id}/progress", "/api/events")
            ]
            parked = asyncio.ensure_future(rig.ask("POST", "/api/worker/poll", poll, key=worker["key"]))
            while rig.hub.connection_limits.counts() != {"stream": 2, "socket": 2, "poll": 1}:
                await asyncio.sleep(0.01)
            for made in (worker, viewer):
                if is_here:
                    await rig.ask("DELETE", f"/api/keys/{made['id']}")
                else:
                    await rig.hub.keys.revoke(made["id"])
            for stream in streams:
                await stream.content.read()
            assert [(await socket.receive()).data for socket in sockets] == [1008, 1008]
            assert (await parked).code == "unauthenticated"
            while any(rig.hub.connection_limits.counts().values()):
                await asyncio.sleep(0.01)


async def test_a_rotated_key_has_a_new_secret_and_the_old_one_for_as_long_as_was_said(rig: HubRig) -> None:
    made = (await rig.post("/api/keys", {"role": "operator"})).body
    kept = (await rig.post(f"/api/keys/{made['id']}/rotate", {"overlap_s": 60})).body
    for key in (made["key"], kept["key"]):
        assert (await rig.get("/api/stats", key=key)).status == 200
    last = (await rig.post(f"/api/keys/{made['id']}/rotate")).body
    assert (await rig.get("/api/stats", key=last["key"])).status == 200
    for key in (made["key"], kept["key"]):
        assert (await rig.get("/api/stats", key=key)).code == "unauthenticated"


@pytest.mark.parametrize(
    "body",
    [
        {"role": "king"},
        {"role": "tenant"},
        {"role": "worker", "tenant": "acme"},
        {"role": "viewer", "worker_id": "gpu-a"},
        {},
    ],
)
async def test_a_key_that_makes_no_sense_is_refused(rig: HubRig, body: dict[str, Any]) -> None:
    assert (await rig.post("/api/keys", body)).code == "invalid_request"


async def test_a_worker_enrols_with_a_token_and_gets_a_key_for_itself_alone(rig: HubRig) -> None:
    token = (await rig.post("/api/enrolments", {"uses": 1, "worker_prefix": "gpu-"})).body["token"]
    wrong = await rig.post("/api/worker/enrol", {"token": token, "worker_id": "cpu-1"}, role=None)
    assert wrong.code == "not_allowed"
    made = await rig.post("/api/worker/enrol", {"token": token, "worker_id": "gpu-1"}, role=None)
    assert made.status == 201 and made.body["role"] == "worker"
    again = await rig.post("/api/worker/enrol", {"token": token, "worker_id": "gpu-2"}, role=None)
    assert again.code == "unauthenticated"
    body = {"worker_id": "gpu-1", "capabilities": {"services": ["comfyui"]}}
    assert (await rig.post("/api/worker/register", body, key=made.body["key"])).status == 200
    other = await rig.post("/api/worker/register", {**body, "worker_id": "gpu-2"}, key=made.body["key"])
    assert other.code == "not_allowed"


async def test_a_token_for_three_enrols_three_of_many_at_once(rig: HubRig) -> None:
    token = (await rig.post("/api/enrolments", {"uses": 3})).body["token"]
    found = await asyncio.gather(
        *(
            rig.post("/api/worker/enrol", {"token": token, "worker_id": f"gpu-{number}"}, role=None)
            for number in range(10)
        )
    )
    assert sorted(answer.status for answer in found) == [201] * 3 + [401] * 7


async def test_a_name_that_has_a_key_gets_no_second_one_unless_the_token_replaces(rig: HubRig) -> None:
    async def enrol(token: str) -> Answer:
        return await rig.post("/api/worker/enrol", {"token": token, "worker_id": "gpu-7"}, role=None)

    several = (await rig.post("/api/enrolments", {"uses": 5})).body["token"]
    first = (await enrol(several)).body
    second = await enrol(several)
    assert second.code == "not_allowed" and "key invite --replace" in second.body["detail"]
    body = {"worker_id": "gpu-7", "capabilities": {"services": ["comfyui"]}}
    assert (await rig.post("/api/worker/register", body, key=first["key"])).status == 200
    replacing = (await rig.post("/api/enrolments", {"uses": 2, "replace": True})).body["token"]
    third = (await enrol(replacing)).body
    assert (await rig.post("/api/worker/register", body, key=third["key"])).status == 200
    assert (await rig.post("/api/worker/register", body, key=first["key"])).code == "unauthenticated"
    # A key that was revoked is in nobody's way.
    await rig.ask("DELETE", f"/api/keys/{third['id']}")
    assert (await enrol(several)).status == 201


async def test_of_many_that_enrol_under_one_name_at_once_one_has_a_key(rig: HubRig) -> None:
    token = (await rig.post("/api/enrolments", {"uses": 20})).body["token"]
    body = {"token": token, "worker_id": "twin"}
    found = await asyncio.gather(*(rig.post("/api/worker/enrol", body, role=None) for _ in range(8)))
    assert sorted(answer.status for answer in found) == [201] + [403] * 7
    (key,) = (answer.body["key"] for answer in found if answer.status == 201)
    assert await rig.hub.keys.check(key) is not None


async def test_keys_tokens_and_old_secrets_end_with_their_time() -> None:
    clock = ManualClock()
    keys = Keys(MemoryDocumentStore(), clock)
    key, text = await keys.create(Role.ADMIN, expires_in_s=10)
    _, token = await keys.invite(uses=5, expires_in_s=10)
    _, newer = await keys.rotate(key.key_id, overlap_s=5)
    assert await keys.check(text) and await keys.check(newer)
    await clock.advance(5)
    assert await keys.check(text) is None and await keys.check(newer)
    await clock.advance(5)
    assert await keys.check(newer) is None
    with pytest.raises(Refusal, match="enrolment token is not valid"):
        await keys.enrol(token, WorkerId("gpu-1"))
