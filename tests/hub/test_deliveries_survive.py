"""Hubs that stop or die while facts are on their way out: what they leave behind is found, sent and put away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from tests.hub._delivering import QUICK, guard, run_one, settled, until
from tests.hub._hub import HubRig, hub_in_process, running_hub, submission
from tests.hub._receiver import Receiver, receiving
from tests.hub._watching import complete, lease, register

from comfyfleet.engine.system import SystemClock, SystemRandom
from comfyfleet.hub.webhooks import sender
from comfyfleet.hub.webhooks.dispatcher import WebhookDispatcher
from comfyfleet.hub.webhooks.sender import PendingDeliveries, WebhookSender
from comfyfleet.model.errors import Fault
from comfyfleet.model.fact import Fact
from comfyfleet.model.ids import JobId
from comfyfleet.model.webhook import Delivery
from comfyfleet.ports import Document, DocumentStore
from comfyfleet.tenancy.webhook_outbox import WebhookOutbox
from comfyfleet.tenancy.webhooks import Webhooks


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[HubRig]:
    async with running_hub(rules=QUICK, guard=guard()) as rig:
        await register(rig)
        yield rig


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as receiver:
        yield receiver


async def test_what_was_not_heard_is_found(rig: HubRig, receiver: Receiver) -> None:
    """As when a worker has no engine, or the hub that heard it died."""
    job_id = await rig.submit(webhook=receiver.url)
    rig.hub._webhook_dispatcher._leave_bus()
    await complete(rig, await lease(rig))
    await settled(rig, job_id, "delivered")


async def test_a_job_whose_tenants_database_is_away_keeps_no_others_from_being_told(
    rig: HubRig, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.hub.webhooks.dispatcher._BATCH_SIZE", 1)
    rig.hub._webhook_dispatcher._leave_bus()
    first, second = [await rig.submit(webhook=receiver.url) for _ in range(2)]
    store, is_away = rig.engine.store, True
    facts = store.facts

    async def facts_if_there(job_id: JobId, after: int = 0) -> list[Fact]:
        if is_away and job_id == first:
            raise Fault("the database is away")
        return await facts(job_id, after)

    monkeypatch.setattr(store, "facts", facts_if_there)
    for number in range(2):
        await complete(rig, await lease(rig, poll_id=f"poll-{number}"))
    await settled(rig, second, "delivered")
    is_away = False
    await settled(rig, first, "delivered")


async def test_a_note_whose_job_never_came_is_forgotten(rig: HubRig) -> None:
    await rig.documents.put(
        "webhook_notes", "01900000-0000-7000-8000-000000000000/000001", b'{"at":1}', version=0
    )

    async def is_gone() -> bool:
        return not await rig.documents.listing("webhook_notes")

    await until(is_gone)


async def test_an_attempt_whose_hub_died_is_made_again_when_its_claim_is_over(
    rig: HubRig, receiver: Receiver
) -> None:
    receiver.answer = lambda _: web.Response(status=410)
    job_id = await run_one(rig, webhook=receiver.url)
    await settled(rig, job_id, "given_up")
    (document,) = await rig.documents.listing("deliveries")
    delivery = msgspec.json.decode(document.body, type=Delivery)
    now = rig.engine.now()
    # As a hub that was killed while it sent has left it: claimed for a while, and its entry in its place.
    left = msgspec.structs.replace(
        delivery, status="pending", ended_at=None, tries=0, next_at=now, claimed_until=now + 0.3
    )
    receiver.answer = lambda _: web.Response()
    await rig.documents.put("deliveries", document.name, msgspec.json.encode(left), version=None)
    entry = f"{int(now * 1000):013d}/{document.name}"
    await rig.documents.put("deliveries_due", entry, b'["127.0.0.1","default"]', version=None)
    assert (await settled(rig, job_id, "delivered"))["attempts"] == 2
    assert rig.engine.now() >= now + 0.3


async def test_a_hub_that_stops_gives_back_what_it_was_sending(
    rig: HubRig, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_GRACE_S", 0.0)
    receiver.is_open.clear()
    await run_one(rig, webhook=receiver.url)
    await receiver.until(1)
    await rig.hub.finish()
    (document,) = await rig.documents.listing("deliveries")
    left = msgspec.json.decode(document.body, type=Delivery)
    assert (left.status, left.claimed_until) == ("pending", None)
    (due,) = await rig.documents.listing("deliveries_due")
    assert due.name.endswith(document.name)


class Dying:
    """A cabinet as a hub sees it that dies before its write of this number: nothing of what follows is done."""

    def __init__(self, documents: DocumentStore, dies_at: int) -> None:
        self._documents = documents
        self._dies_at = dies_at
        self._writes = 0
        self.has_died = asyncio.Event()

    async def get(self, collection: str, name: str) -> Document | None:
        self._live()
        return await self._documents.get(collection, name)

    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]:
        self._live()
        return await self._documents.listing(collection, after, limit)

    async def collections(self) -> list[str]:
        return await self._documents.collections()

    async def put(self, collection: str, name: str, body: bytes, *, version: int | None) -> bool:
        self._write()
        return await self._documents.put(collection, name, body, version=version)

    async def remove(self, collection: str, name: str) -> bool:
        self._write()
        return await self._documents.remove(collection, name)

    def _write(self) -> None:
        self._writes += 1
        if self._writes >= self._dies_at:
            self.has_died.set()
        self._live()

    def _live(self) -> None:
        if self.has_died.is_set():
            raise Fault("this hub is dead")


def delivering(rig: HubRig, documents: DocumentStore) -> WebhookDispatcher:
    webhooks, ledger, called = Webhooks(documents, SystemClock()), WebhookOutbox(documents), guard()
    sender = WebhookSender(rig.engine, ledger, webhooks, called, SystemRandom(), claim_s=0.1)
    return WebhookDispatcher(rig.engine, ledger, webhooks, called, sender, PendingDeliveries(ledger, 100))


WRITES = 12
"""Of a hub that takes a job and delivers two facts of it, and the secret that signs; the first is the note."""


@pytest.mark.parametrize("dies_at", range(2, WRITES + 1))
async def test_a_hub_may_die_before_any_of_its_writes(receiver: Receiver, dies_at: int) -> None:
    async with hub_in_process(rules=QUICK) as rig:
        await register(rig)
        await rig.hub.finish()
        documents = Dying(rig.documents, dies_at)
        first = delivering(rig, documents)
        first.start()
        webhook = {"url": receiver.url, "events": ["queued", "completed"]}
        assert (await rig.post("/api/jobs", submission(webhook=webhook))).status == 201
        await complete(rig, await lease(rig))
        async with asyncio.timeout(60):
            await documents.has_died.wait()
        await first.close()
        second = delivering(rig, rig.documents)
        second.start()

        async def is_told() -> bool:
            kept: list[Any] = [
                msgspec.json.decode(each.body) for each in await rig.documents.listing("deliveries")
            ]
            is_tidy = not {"webhook_notes", "deliveries_due"} & set(await rig.documents.collections())
            return is_tidy and [each.get("status") for each in kept] == ["delivered", "delivered"]

        await until(is_told)
        assert len({each.id for each in receiver.came}) == 2
        assert len(receiver.came) <= 4, "a call is repeated only where nobody could note that it was made"
        await second.close()
