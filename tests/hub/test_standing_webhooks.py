"""What a submit asks for to know whether anybody is to hear of its job: next to nothing."""

from __future__ import annotations

import asyncio

import pytest

from comfyfleet.engine.system import SystemClock
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import TenantId
from comfyfleet.ports import Document
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.tenancy.webhooks import Webhooks

ACME = TenantId("acme")


class Counting(MemoryDocumentStore):
    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.is_away = False

    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]:
        self.asked += 1
        found = await super().listing(collection, after, limit)
        await asyncio.sleep(0)
        if self.is_away:
            raise Fault("the store is away")
        return found


async def test_a_thousand_at_once_ask_the_store_once() -> None:
    documents = Counting()
    webhooks = Webhooks(documents, SystemClock())
    await asyncio.gather(*(webhooks.subscriptions_for(ACME) for _ in range(1000)))
    assert documents.asked == 2, "the tenant's own, and the hub's"


async def test_a_store_that_was_away_is_asked_again_at_once() -> None:
    documents = Counting()
    webhooks = Webhooks(documents, SystemClock())
    documents.is_away = True
    with pytest.raises(Fault):
        await webhooks.subscriptions_for(ACME)
    documents.is_away = False
    assert await webhooks.subscriptions_for(ACME) == ()


async def test_what_was_asked_before_a_change_is_not_remembered_after_it() -> None:
    webhooks = Webhooks(Counting(), SystemClock())
    before = asyncio.create_task(webhooks.subscriptions_for(ACME))
    made = await webhooks.create(ACME, "https://example.com/")
    await before
    assert await webhooks.subscriptions_for(ACME) == (made,)


async def test_whoever_hangs_up_takes_the_answer_from_nobody() -> None:
    webhooks = Webhooks(Counting(), SystemClock())
    impatient, other = (asyncio.create_task(webhooks.subscriptions_for(ACME)) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    assert await other == ()
