"""Webhooks over real connections: what is told to whom, signed how, tried again when, and never lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from tests.hub._delivering import QUICK, deliveries, guard, run_one, settled, until
from tests.hub._hub import Answer, HubRig, running_hub, submission
from tests.hub._receiver import Receiver, receiving
from tests.hub._watching import complete, lease, register

from comfyfleet.hub.webhooks import dispatcher, handlers
from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion, FailureReport
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import JobResult
from comfyfleet.model.webhook import Delivery
from comfyfleet.net.url_guard import UrlGuard
from comfyfleet.tenancy.webhook_outbox import StoredOutboxEntry
from comfyfleet.wire.webhooks import MAX_EVENT_BYTES


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub(rules=QUICK, guard=guard()) as rig:
        await register(rig)
        yield rig


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


async def secret_of(rig: HubRig, role: Role = Role.ADMIN, **body: Any) -> str:
    answer = await rig.post("/api/webhook-secret", body, role=role)
    assert answer.status == 200, answer.content
    return str(answer.body["secret"])


# what is told


async def test_the_end_of_a_job_is_delivered_signed_and_with_its_result(
    rig: HubRig, receiver: Receiver
) -> None:
    secret = await secret_of(rig)
    job_id = await run_one(rig, webhook=receiver.url, metadata={"user": "42"}, reference="mine")
    (came,) = await receiver.until(1)
    event = came.verified(secret)
    assert (event.type, event.id) == ("job.completed", f"{job_id}_3_job")
    assert event.data["id"] == job_id
    assert (event.data["status"], event.data["number"]) == ("completed", 3)
    assert (event.data["metadata"], event.data["reference"]) == ({"user": "42"}, "mine")
    assert event.data["result"] == {"outputs": {"2": {"images": []}}}
    assert came.headers["content-type"] == "application/json"
    found = await settled(rig, job_id, "delivered")
    assert (found["event"], found["attempts"], found["last_status"]) == ("job.completed", 1, 204)
    assert found["ended_at"] and found["next_at"] is None


async def test_more_is_told_where_more_is_asked_for(rig: HubRig, receiver: Receiver) -> None:
    await run_one(rig, webhook={"url": receiver.url, "events": ["completed", "queued", "leased"]})
    await receiver.until(3)
    assert sorted(receiver.events) == ["job.completed", "job.leased", "job.queued"]


async def test_a_failure_and_a_cancel_are_told_and_a_retry_by_hand_tells_again(
    rig: HubRig, receiver: Receiver
) -> None:
    job_id = await rig.submit(webhook=receiver.url)
    leased = await lease(rig)
    failure = Failure(FailureKind.NODE_ERROR, "a node failed")
    await rig.engine.fail(FailureReport(leased.ref, failure))
    await receiver.until(1)
    assert receiver.came[0].said["data"]["error"]["message"] == "a node failed"
    await rig.post(f"/api/jobs/{job_id}/retry")
    await rig.post(f"/api/jobs/{job_id}/cancel")
    await receiver.until(2)
    assert receiver.events == ["job.failed", "job.cancelled"]
    assert receiver.came[1].said["data"]["round"] == 2
    assert receiver.came[0].id != receiver.came[1].id


async def test_a_result_that_is_too_large_is_left_out_and_said_so(rig: HubRig, receiver: Receiver) -> None:
    await rig.submit(webhook=receiver.url)
    leased = await lease(rig)
    large = JobResult(outputs={"2": {"text": ["x" * MAX_EVENT_BYTES]}})
    await rig.engine.complete(Completion(leased.ref, large, 0.0))
    (came,) = await receiver.until(1)
    assert came.said["data"]["is_cut"] is True
    assert "result" not in came.said["data"]
    assert len(came.body) < 10_000


async def test_a_job_without_a_webhook_leaves_nothing_behind(rig: HubRig) -> None:
    job_id = await run_one(rig)
    assert await deliveries(rig, job_id) == []
    assert not {"webhook_notes", "deliveries", "deliveries_due"} & set(await rig.documents.collections())


async def test_a_job_without_a_webhook_is_not_looked_at_because_of_others(
    rig: HubRig, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    noted = rig.hub._webhook_dispatcher._ledger.get_entry

    async def note_of(job_id: JobId, round_: int) -> StoredOutboxEntry | None:
        looked_at.append(job_id)
        return await noted(job_id, round_)

    monkeypatch.setattr(rig.hub._webhook_dispatcher._ledger, "get_entry", note_of)
    heard_of = await rig.submit(webhook=receiver.url, priority=-100)
    await run_one(rig)
    assert not rig.hub._webhook_dispatcher._unwanted, "its end is the end of it"
    await complete(rig, await lease(rig))
    await receiver.until(1)
    assert set(looked_at) == {heard_of}


async def test_what_was_delivered_leaves_the_log_and_nothing_else(rig: HubRig, receiver: Receiver) -> None:
    for _ in range(5):
        await run_one(rig, webhook={"url": receiver.url, "events": ["queued", "completed"]})
    await receiver.until(10)

    async def is_tidy() -> bool:
        return not {"webhook_notes", "deliveries_due"} & set(await rig.documents.collections())

    await until(is_tidy)
    assert len(await rig.documents.listing("deliveries")) == 10


# twice, later, never


async def test_a_receiver_that_fails_is_asked_again_under_the_same_id(
    rig: HubRig, receiver: Receiver
) -> None:
    secret = await secret_of(rig)
    receiver.answer = lambda number: web.Response(status=500 if number == 0 else 200)
    job_id = await run_one(rig, webhook=receiver.url)
    first, second = await receiver.until(2)
    assert first.id == second.id
    assert first.body == second.body
    second.verified(secret)
    assert (await settled(rig, job_id, "delivered"))["attempts"] == 2


async def test_after_so_many_tries_it_is_given_up_and_can_be_sent_again(
    rig: HubRig, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answer = lambda _: web.Response(status=503)
    job_id = await run_one(rig, webhook=f"{receiver.url}?token=hidden")
    given_up = await settled(rig, job_id, "given_up")
    (told,) = [each.message for each in caplog.records if "is given up" in each.message]
    assert given_up["id"] in told
    assert "/hook" not in told
    assert (given_up["attempts"], given_up["last_status"]) == (3, 503)
    assert "answered 503" in given_up["last_error"]
    assert "hidden" not in str(given_up)
    listed = (await rig.get("/api/deliveries?status=given_up")).body["deliveries"]
    assert listed == [given_up]
    assert (await rig.get("/api/deliveries?status=pending")).body["deliveries"] == []
    assert (await rig.get("/api/deliveries?status=null")).code == "invalid_request"

    receiver.answer = lambda _: web.Response(status=200)
    again = await rig.post(f"/api/deliveries/{given_up['id']}/resend")
    assert (again.status, again.body["status"]) == (200, "pending")
    assert (await settled(rig, job_id, "delivered"))["attempts"] == 4
    assert len({each.id for each in receiver.came}) == 1


@pytest.mark.parametrize(
    ("status", "attempts", "why"),
    [(410, 1, "accepts no more deliveries"), (307, 3, "redirects are not followed")],
)
async def test_an_answer_has_its_meaning(
    rig: HubRig, receiver: Receiver, status: int, attempts: int, why: str
) -> None:
    target = {"location": "http://169.254.169.254/latest/meta-data/"}
    receiver.answer = lambda _: web.Response(status=status, headers=target)
    found = await settled(rig, await run_one(rig, webhook=receiver.url), "given_up")
    assert (found["attempts"], found["last_status"]) == (attempts, status)
    assert why in found["last_error"]


async def test_what_nobody_foresaw_has_an_end_too(
    rig: HubRig, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stumble(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(rig.hub._webhook_dispatcher._guard, "post", stumble)
    found = await settled(rig, await run_one(rig, webhook=receiver.url), "given_up")
    assert (found["attempts"], found["last_status"]) == (3, None)
    assert "see the hub's log" in found["last_error"]


async def test_a_name_that_leads_home_is_taken_and_never_called(receiver: Receiver) -> None:
    async def lookup(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async with running_hub(rules=QUICK, guard=UrlGuard(lookup=lookup)) as rig:
        await register(rig)
        port = receiver.url.rpartition(":")[2]
        job_id = await run_one(rig, webhook=f"http://rebound.example:{port}")
        found = await settled(rig, job_id, "given_up")
        assert "resolves to an address that is not public" in found["last_error"]
        assert receiver.came == []


async def test_a_dead_receiver_keeps_nobody_waiting() -> None:
    patient = msgspec.structs.replace(QUICK, delivery_base_s=60.0)
    async with (
        receiving() as dead,
        receiving() as live,
        running_hub(rules=patient, guard=guard(30.0)) as rig,
    ):
        await register(rig)
        dead.is_open.clear()
        for _ in range(10):
            await run_one(rig, webhook=dead.url)
        await dead.until(4)
        for _ in range(10):
            await run_one(rig, webhook=live.url)
        await live.until(10)
        assert len(dead.came) == 4, "no host has more than its share of what goes out at a time"
        # As soon as one is answered the next has its turn.
        dead.is_open.set()
        await dead.until(10)


async def test_old_deliveries_are_forgotten(receiver: Receiver) -> None:
    async with running_hub(rules=QUICK, guard=guard()) as rig:
        await register(rig)
        job_id = await run_one(rig, webhook=receiver.url)
        await settled(rig, job_id, "delivered")
        (document,) = await rig.documents.listing("deliveries")
        # The same in other states and ages, of jobs that were submitted long ago.
        delivery, now = msgspec.json.decode(document.body, type=Delivery), rig.engine.now()
        for number, (status, ended_at) in enumerate(
            [
                ("delivered", now - 25 * 3600),
                ("delivered", now - 3600),
                ("given_up", now - 25 * 3600),
                ("given_up", now - 8 * 86400),
                ("pending", None),
            ]
        ):
            old = msgspec.structs.replace(delivery, status=status, ended_at=ended_at)
            name = f"01800000-0000-7000-8000-{number:012d}/00000003/job"
            await rig.documents.put("deliveries", name, msgspec.json.encode(old), version=0)
        rig.hub._webhook_dispatcher._pruned_at = 0.0

        async def is_pruned() -> bool:
            return len(await rig.documents.listing("deliveries")) == 4

        await until(is_pruned)
        kept = [each.name[:36] for each in await rig.documents.listing("deliveries")]
        assert kept == [f"01800000-0000-7000-8000-{number:012d}" for number in (1, 2, 4)] + [job_id]


async def test_however_many_are_old_they_are_forgotten_without_a_pause(
    rig: HubRig, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    await settled(rig, await run_one(rig, webhook=receiver.url), "delivered")
    (document,) = await rig.documents.listing("deliveries")
    old = msgspec.structs.replace(msgspec.json.decode(document.body, type=Delivery), ended_at=1.0)
    for number in range(100):
        name = f"01800000-0000-7000-8000-{number:012d}/00000003/job"
        await rig.documents.put("deliveries", name, msgspec.json.encode(old), version=0)
    monkeypatch.setattr(dispatcher, "_PRUNE", 10)
    rig.hub._webhook_dispatcher._pruned_at = 0.0

    async def is_pruned() -> bool:
        return len(await rig.documents.listing("deliveries")) == 1

    await until(is_pruned)


# standing webhooks and secrets


async def stand(rig: HubRig, receiver: Receiver, role: Role = Role.ADMIN, **more: Any) -> Answer:
    return await rig.post("/api/webhooks", {"url": receiver.url, **more}, role=role)


async def test_a_standing_webhook_hears_of_its_tenants_jobs_alone(rig: HubRig, receiver: Receiver) -> None:
    made = await stand(rig, receiver, Role.TENANT, name="billing")
    assert (made.status, made.body["tenant"], made.body["events"]) == (
        201,
        "acme",
        ["completed", "failed", "cancelled"],
    )
    job_id = await run_one(rig, role=Role.TENANT)
    await run_one(rig)
    other = await run_one(rig, role=Role.TENANT)
    await receiver.until(2)
    assert [each.said["data"]["id"] for each in receiver.came] == [job_id, other]
    (found,) = await deliveries(rig, job_id, Role.TENANT)
    assert found["webhook"] == made.body["id"]

    assert (await rig.ask("DELETE", f"/api/webhooks/{made.body['id']}", role=Role.TENANT)).status == 204
    assert (await rig.get("/api/webhooks")).body["webhooks"] == []
    job_id = await run_one(rig, role=Role.TENANT)
    assert await deliveries(rig, job_id) == []


async def test_the_hubs_own_webhook_hears_of_everybody_and_is_the_operators(
    rig: HubRig, receiver: Receiver
) -> None:
    assert (await stand(rig, receiver, Role.TENANT, every_tenant=True)).code == "not_allowed"
    made = await stand(rig, receiver, Role.OPERATOR, every_tenant=True)
    assert made.body["tenant"] is None
    secret = await secret_of(rig, Role.OPERATOR, every_tenant=True)
    assert (await rig.post("/api/webhook-secret", {"every_tenant": True}, role=Role.TENANT)).status == 403
    job_id = await run_one(rig, role=Role.TENANT)
    (came,) = await receiver.until(1)
    assert came.verified(secret).data["tenant"] == "acme"
    found = await settled(rig, job_id, "delivered")
    # Whom it was told to is not the tenant's to know.
    assert await deliveries(rig, job_id, Role.TENANT) == []
    assert (await rig.get("/api/deliveries", role=Role.TENANT)).body["deliveries"] == []
    assert (await rig.get("/api/webhooks", role=Role.TENANT)).body["webhooks"] == []
    for path in (f"/api/deliveries/{found['id']}/resend", f"/api/webhooks/{made.body['id']}"):
        method = "POST" if "resend" in path else "DELETE"
        assert (await rig.ask(method, path, role=Role.TENANT)).code == "not_found"


async def test_tenants_do_not_see_each_others(rig: HubRig, receiver: Receiver) -> None:
    _, other = await rig.hub.keys.create(Role.TENANT, tenant=TenantId("other"))
    made = await stand(rig, receiver, Role.TENANT)
    job_id = await run_one(rig, role=Role.TENANT, webhook=receiver.url)
    await receiver.until(2)
    assert (await rig.get("/api/webhooks", key=other)).body["webhooks"] == []
    assert (await rig.get("/api/deliveries", key=other)).body["deliveries"] == []
    assert (await rig.get(f"/api/jobs/{job_id}/deliveries", key=other)).code == "not_found"
    assert (await rig.ask("DELETE", f"/api/webhooks/{made.body['id']}", key=other)).code == "not_found"
    for found in await deliveries(rig, job_id):
        refused = await rig.post(f"/api/deliveries/{found['id']}/resend", key=other)
        never_was = await rig.post(f"/api/deliveries/x{found['id']}/resend", key=other)
        assert (refused.code, refused.body["detail"]) == (
            "not_found",
            never_was.body["detail"].replace("'x", "'"),
        )


async def test_a_list_that_others_stand_in_leads_past_them_and_does_not_name_them(
    rig: HubRig, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_PAGE", 1)
    monkeypatch.setattr(handlers, "_MAX_RECORDS_READ", 2)
    events = ["queued", "leased", "completed"]
    others = [await run_one(rig, webhook={"url": receiver.url, "events": events}) for _ in range(3)]
    own = await run_one(rig, role=Role.TENANT, webhook=receiver.url)
    await receiver.until(10)
    cursor, found = "", []
    for _ in range(20):
        page = (await rig.get(f"/api/deliveries?limit=5{cursor}", role=Role.TENANT)).body
        found += [each["job_id"] for each in page["deliveries"]]
        assert not any(each in str(page) for each in others)
        if page["cursor"] is None:
            break
        cursor = f"&cursor={page['cursor'].replace('/', '%2F')}"
    assert found == [own]
    assert page["cursor"] is None, "it comes to an end"


@pytest.mark.parametrize("delivery_id", ["x", "a_b_c", "a_1_", "_1_job", "a_1_job", "a%00_1_job", "ä_1_job"])
async def test_a_delivery_that_is_none_is_not_found(rig: HubRig, delivery_id: str) -> None:
    assert (await rig.post(f"/api/deliveries/{delivery_id}/resend")).code == "not_found"


async def test_an_old_secret_signs_too_while_it_overlaps(rig: HubRig, receiver: Receiver) -> None:
    first = await secret_of(rig)
    second = await secret_of(rig, overlap_s=60)
    await run_one(rig, webhook=receiver.url)
    (came,) = await receiver.until(1)
    assert came.verified(first).id == came.verified(second).id
    third = await secret_of(rig, overlap_s=0)
    await run_one(rig, webhook=receiver.url)
    _, came = await receiver.until(2)
    came.verified(third)
    assert len(came.headers["webhook-signature"].split()) == 1


async def test_there_are_only_so_many_standing_webhooks(rig: HubRig, receiver: Receiver) -> None:
    for _ in range(20):
        assert (await stand(rig, receiver)).status == 201
    assert (await stand(rig, receiver)).code == "invalid_request"
    assert (await stand(rig, receiver, Role.TENANT)).status == 201


async def test_what_must_not_be_called_is_refused_before_anything_is_kept(rig: HubRig) -> None:
    for url in ("http://10.0.0.1/", "http://[::1]/", "https://user@example.com/", "ftp://example.com/"):
        assert (await rig.post("/api/webhooks", {"url": url})).code == "invalid_request"
        answer = await rig.post("/api/jobs", submission(webhook=url))
        assert (answer.status, answer.code) == (400, "invalid_request")
    assert (await rig.get("/api/stats")).body["waiting"] == 0
    assert "webhook_notes" not in await rig.documents.collections()


async def test_who_changed_a_webhook_is_in_the_audit_log_and_no_secret_is(
    rig: HubRig, receiver: Receiver
) -> None:
    made = await stand(rig, receiver)
    secret = await secret_of(rig)
    await rig.ask("DELETE", f"/api/webhooks/{made.body['id']}")
    log = (await rig.get("/api/audit")).body["entries"]
    operations = [each for each in log if each["role"] != "worker"]
    assert [(each["action"], each["target"]) for each in operations] == [
        ("create_webhook", made.body["id"]),
        ("rotate_webhook_secret", "tenant default"),
        ("delete_webhook", made.body["id"]),
    ]
    assert secret not in str(log)


async def test_pages_of_deliveries_lead_through_all_of_them(rig: HubRig, receiver: Receiver) -> None:
    for _ in range(5):
        await run_one(rig, webhook=receiver.url)
    await receiver.until(5)
    found: list[str] = []
    query = "?limit=2"
    while True:
        page = (await rig.get(f"/api/deliveries{query}")).body
        found += [each["id"] for each in page["deliveries"]]
        if page["cursor"] is None:
            break
        query = f"?limit=2&cursor={page['cursor'].replace('/', '%2F')}"
    assert len(found) == len(set(found)) == 5
