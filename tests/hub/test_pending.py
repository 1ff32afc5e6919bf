"""A tenant whose receivers are away: what waits for them has an end, and nobody else pays for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.hub._delivering import QUICK, guard, run_one, until
from tests.hub._hub import HubRig, running_hub, submission
from tests.hub._receiver import Receiver, receiving
from tests.hub._watching import register

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.hub.webhooks import sender
from comfyfleet.hub.webhooks.sender import PendingDeliveries
from comfyfleet.model.access import Role
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.webhook import Delivery
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.tenancy.webhook_outbox import WebhookOutbox


@pytest_asyncio.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HubRig]:
    monkeypatch.setattr(sender, "_EVERY_S", 0.0)
    limits = HubLimits(max_pending_deliveries=2)
    async with running_hub(rules=QUICK, guard=guard(), limits=limits) as rig:
        await register(rig)
        yield rig


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


async def test_a_tenant_with_too_many_waiting_brings_no_more_until_they_are_sent(
    rig: HubRig, receiver: Receiver
) -> None:
    receiver.is_open.clear()
    for _ in range(2):
        job_id = await run_one(rig, role=Role.TENANT, webhook=receiver.url)

    async def code() -> str | None:
        answer = await rig.post("/api/jobs", submission(webhook=receiver.url), role=Role.TENANT)
        return None if answer.status == 201 else answer.code

    async def is_refused() -> bool:
        return await code() == "queue_full"

    await until(is_refused)
    answer = await rig.post("/api/jobs", submission(webhook=receiver.url), role=Role.TENANT)
    assert answer.body["pending"] == 2 and int(answer.headers["retry-after"]) > 0
    assert "/api/deliveries?status=pending" in answer.body["detail"]
    assert (await rig.post("/api/jobs", submission(), role=Role.TENANT)).status == 201
    assert (await rig.post("/api/jobs", submission(webhook=receiver.url))).status == 201, "another tenant's"
    await rig.post(f"/api/jobs/{job_id}/cancel")
    receiver.is_open.set()

    async def is_taken() -> bool:
        return await code() is None

    await until(is_taken)


async def test_a_standing_webhook_of_the_tenant_counts_and_one_of_the_operators_does_not(
    rig: HubRig, receiver: Receiver
) -> None:
    receiver.is_open.clear()
    everybody = {"url": receiver.url, "every_tenant": True}
    assert (await rig.post("/api/webhooks", everybody)).status == 201
    for _ in range(3):
        await run_one(rig, role=Role.TENANT)
    await receiver.until(3)
    for _ in range(3):
        await run_one(rig, role=Role.TENANT)
    assert (await rig.post("/api/webhooks", {"url": receiver.url}, role=Role.TENANT)).status == 201
    for _ in range(2):
        await run_one(rig, role=Role.TENANT)

    async def is_refused() -> bool:
        return (await rig.post("/api/jobs", submission(), role=Role.TENANT)).status == 503

    await until(is_refused)


async def test_a_count_goes_through_all_pages_and_is_not_made_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sender, "_PAGE", 2)
    ledger = WebhookOutbox(MemoryDocumentStore())
    for number in range(5):
        job_id = JobId(f"01900000-0000-7000-8000-{number:012d}")
        owner = TenantId("acme" if number != 2 else "other")
        await ledger.add(
            Delivery(job_id, 1, "job", owner, "https://x.example/", FactKind.FAILED, 1, 1.0, 1.0)
        )
    counted = PendingDeliveries(ledger, 4)
    counted.check(TenantId("acme"))
    await counted.count()
    with pytest.raises(Refusal) as refused:
        counted.check(TenantId("acme"))
    assert (refused.value.code, refused.value.details) == (RefusalCode.QUEUE_FULL, {"pending": 4})
    counted.check(TenantId("other"))
    monkeypatch.setattr(ledger, "due", None)
    await counted.count()
