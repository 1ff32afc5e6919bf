"""A standing webhook is changed and tried out; enrolment tokens are listed and revoked, and never shown again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from aiohttp import web
from tests.hub._delivering import QUICK, guard, run_one
from tests.hub._hub import HubRig, running_hub
from tests.hub._receiver import Receiver, receiving
from tests.hub._watching import register

from comfyfleet import FleetClient
from comfyfleet.model.access import Role
from comfyfleet.model.ids import TenantId


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub(rules=QUICK, guard=guard()) as rig:
        await register(rig)
        yield rig


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


async def test_a_changed_webhook_hears_what_it_is_asked_for_from_then_on(
    rig: HubRig, receiver: Receiver
) -> None:
    made = (await rig.post("/api/webhooks", {"url": "https://example.com/old", "name": "billing"})).body
    path = f"/api/webhooks/{made['id']}"
    changed = await rig.ask("PATCH", path, {"url": receiver.url, "events": ["leased"]})
    assert changed.status == 200
    assert changed.body == {**made, "url": receiver.url, "events": ["leased"]}
    assert (await rig.get("/api/webhooks")).body["webhooks"] == [changed.body]
    await run_one(rig)
    await receiver.until(1)
    assert receiver.events == ["job.leased"]
    # What is left out stays; null events are those that are told unless more is asked for.
    renamed = (await rig.ask("PATCH", path, {"name": "", "events": None})).body
    assert (renamed["url"], renamed["name"]) == (receiver.url, "")
    assert renamed["events"] == ["completed", "failed", "cancelled"]


async def test_a_webhook_is_not_changed_to_what_it_could_not_have_been_made_with(rig: HubRig) -> None:
    made = (await rig.post("/api/webhooks", {"url": "https://example.com/"})).body
    path = f"/api/webhooks/{made['id']}"
    wrong: list[dict[str, Any]] = [{"url": "http://10.0.0.1/"}, {"events": []}, {"every_tenant": True}]
    for body in (*wrong, {"url": None}):
        assert (await rig.ask("PATCH", path, body)).code == "invalid_request"
    assert (await rig.get("/api/webhooks")).body["webhooks"] == [made]


async def test_a_test_delivery_is_signed_and_answered_with_what_the_receiver_said(
    rig: HubRig, receiver: Receiver
) -> None:
    secret = (await rig.post("/api/webhook-secret")).body["secret"]
    made = (await rig.post("/api/webhooks", {"url": receiver.url})).body
    tested = await rig.post(f"/api/webhooks/{made['id']}/test")
    assert tested.status == 200
    (came,) = receiver.came
    event = came.verified(secret)
    assert (event.type, event.data["webhook_id"], event.id) == ("webhook.test", made["id"], tested.body["id"])
    assert (tested.body["is_delivered"], tested.body["status"], tested.body["error"]) == (True, 204, None)
    assert tested.body["seconds"] >= 0 and tested.body["url"] == receiver.url
    # What a receiver says beside its status is nobody's business: it may be one of the operator's own network.
    receiver.answer = lambda _: web.Response(status=500, text="a secret of the inner network")
    failed = await rig.post(f"/api/webhooks/{made['id']}/test")
    assert (failed.body["is_delivered"], failed.body["status"]) == (False, 500)
    assert "secret" not in failed.content.decode()
    # It is no delivery of a job: nothing is kept, and nothing tried again.
    assert (await rig.get("/api/deliveries")).body["deliveries"] == []
    assert len(receiver.came) == 2


async def test_a_test_delivery_that_reaches_nobody_says_so(rig: HubRig) -> None:
    async with receiving() as gone:
        url = gone.url
    made = (await rig.post("/api/webhooks", {"url": url})).body
    tested = (await rig.post(f"/api/webhooks/{made['id']}/test")).body
    assert (tested["is_delivered"], tested["status"]) == (False, None)
    assert tested["error"]


async def test_another_tenants_webhook_is_neither_changed_nor_tried(rig: HubRig, receiver: Receiver) -> None:
    made = (await rig.post("/api/webhooks", {"url": receiver.url}, role=Role.TENANT)).body
    ours = (await rig.post("/api/webhooks", {"url": receiver.url, "every_tenant": True})).body
    _, stranger = await rig.hub.keys.create(Role.TENANT, tenant=TenantId("other"))
    for each in (made["id"], ours["id"], "nobody"):
        told = [
            await rig.ask("PATCH", f"/api/webhooks/{each}", {"name": "x"}, key=stranger),
            await rig.post(f"/api/webhooks/{each}/test", key=stranger),
        ]
        assert [answer.code for answer in told] == ["not_found"] * 2
        assert {answer.body["detail"] for answer in told} == {f"there is no webhook {each!r} (any more)"}
    assert receiver.came == []
    assert (await rig.post(f"/api/webhooks/{made['id']}/test", role=Role.TENANT)).body["is_delivered"]


async def test_however_many_tests_are_asked_for_few_go_out_at_a_time(rig: HubRig, receiver: Receiver) -> None:
    made = (await rig.post("/api/webhooks", {"url": receiver.url}, role=Role.TENANT)).body
    path = f"/api/webhooks/{made['id']}/test"
    receiver.is_open.clear()
    asked = [asyncio.ensure_future(rig.post(path, role=Role.TENANT)) for _ in range(40)]
    ended, under_way = await asyncio.wait(asked, timeout=60.0, return_when=asyncio.FIRST_COMPLETED)
    while len(ended) < 36:
        more, under_way = await asyncio.wait(under_way, timeout=60.0, return_when=asyncio.FIRST_COMPLETED)
        assert more, "the others are refused while the receiver is silent"
        ended |= more
    assert {each.result().code for each in ended} == {"rate_limited"}
    await receiver.until(4)
    receiver.is_open.set()
    assert [(await each).body["is_delivered"] for each in under_way] == [True] * 4
    assert len(receiver.came) == 4
    assert (await rig.post(path, role=Role.TENANT)).body["is_delivered"], (
        "when they are over there is room again"
    )


async def test_a_silent_receiver_keeps_nobody_elses_test_waiting(rig: HubRig, receiver: Receiver) -> None:
    silent = (await rig.post("/api/webhooks", {"url": receiver.url}, role=Role.TENANT)).body
    receiver.is_open.clear()
    asked = [
        asyncio.ensure_future(rig.post(f"/api/webhooks/{silent['id']}/test", role=Role.TENANT))
        for _ in range(4)
    ]
    await receiver.until(4)
    async with receiving("127.0.0.2") as other:
        made = (await rig.post("/api/webhooks", {"url": other.url})).body
        assert (await rig.post(f"/api/webhooks/{made['id']}/test")).body["is_delivered"]
    receiver.is_open.set()
    await asyncio.gather(*asked)


async def test_two_changes_of_a_webhook_at_once_are_both_kept(rig: HubRig) -> None:
    made = (await rig.post("/api/webhooks", {"url": "https://example.com/"})).body
    path = f"/api/webhooks/{made['id']}"
    await asyncio.gather(
        rig.ask("PATCH", path, {"name": "billing"}), rig.ask("PATCH", path, {"events": ["late"]})
    )
    (kept,) = (await rig.get("/api/webhooks")).body["webhooks"]
    assert (kept["name"], kept["events"]) == ("billing", ["late"])


async def test_enrolment_tokens_are_listed_without_their_secret_and_revoked(rig: HubRig) -> None:
    made = (await rig.post("/api/enrolments", {"uses": 3, "worker_prefix": "gpu-", "replace": True})).body
    await rig.post("/api/worker/enrol", {"token": made["token"], "worker_id": "gpu-1"}, role=None)
    # Their ids tell milliseconds, and the list goes by them.
    await asyncio.sleep(0.002)
    second = (await rig.post("/api/enrolments")).body
    listed = await rig.get("/api/enrolments", role=Role.OPERATOR)
    first, other = listed.body["enrolments"]
    assert (first["id"], first["uses_left"], first["worker_prefix"], first["replace"]) == (
        made["id"],
        2,
        "gpu-",
        True,
    )
    assert first["expires_at"] == made["expires_at"] and first["created_at"] < first["expires_at"]
    assert (other["id"], other["uses_left"], other["is_good"]) == (second["id"], 1, True)
    for text in (made["token"], made["token"].rpartition("_")[2], "digest"):
        assert text not in listed.content.decode()
    page = (await rig.get("/api/enrolments?limit=1")).body
    rest = (await rig.get(f"/api/enrolments?limit=1&cursor={page['cursor']}")).body
    assert [each["id"] for each in (*page["enrolments"], *rest["enrolments"])] == [made["id"], second["id"]]
    assert (await rig.ask("DELETE", f"/api/enrolments/{made['id']}")).status == 204
    assert [each["id"] for each in (await rig.get("/api/enrolments")).body["enrolments"]] == [second["id"]]
    refused = await rig.post("/api/worker/enrol", {"token": made["token"], "worker_id": "gpu-2"}, role=None)
    assert refused.code == "unauthenticated"


async def test_a_token_that_is_used_up_is_listed_as_such(rig: HubRig) -> None:
    made = (await rig.post("/api/enrolments")).body
    await rig.post("/api/worker/enrol", {"token": made["token"], "worker_id": "gpu-1"}, role=None)
    (listed,) = (await rig.get("/api/enrolments")).body["enrolments"]
    assert (listed["uses_left"], listed["is_good"]) == (0, False)


async def test_a_program_does_the_same(rig: HubRig, receiver: Receiver) -> None:
    async with FleetClient(rig.url, rig.keys[Role.ADMIN]) as client:
        made = await client.create_webhook(receiver.url)
        changed = await client.change_webhook(made.id, events=["late"], name="late ones")
        assert (changed.url, changed.events, changed.name) == (made.url, ("late",), "late ones")
        tested = await client.test_webhook(made.id)
        assert (tested.is_delivered, tested.status) == (True, 204)
        token = await client.invite(uses=2)
        (listed,) = (await client.invites()).enrolments
        assert (listed.id, listed.uses_left) == (token.id, 2)
        await client.uninvite(token.id)
        assert (await client.invites()).enrolments == ()
