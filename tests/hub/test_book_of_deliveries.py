"""The book of deliveries where two hubs write in it at once."""

from __future__ import annotations

from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.webhook import Delivery, DeliveryStatus
from comfyfleet.policy.webhook_delivery import abandoned, retried_manually
from comfyfleet.ports import Document
from comfyfleet.stores.documents import MemoryDocumentStore
from comfyfleet.tenancy.webhook_outbox import DELIVERIES, DUE, WebhookOutbox, due_name, name_of

JOB = JobId("01900000-0000-7000-8000-000000000000")


class Interleaved(MemoryDocumentStore):
    """Before an entry is removed, somebody asks for its delivery again."""

    async def remove(self, collection: str, name: str) -> bool:
        if collection == DUE:
            await WebhookOutbox(self).change(
                name.partition("/")[2], lambda delivery: retried_manually(delivery, 20.0)
            )
        return await super().remove(collection, name)


async def test_one_that_is_asked_for_again_while_its_entry_is_put_right_stays_due() -> None:
    over = abandoned(
        Delivery(JOB, 3, "job", TenantId("acme"), "https://x.example/", FactKind.FAILED, 1, 1.0, 1.0), "", 2.0
    )
    documents = Interleaved()
    ledger = WebhookOutbox(documents)
    await ledger.add(over)
    # As whoever asks for it leaves it for a moment: the entry is there, the delivery not yet changed.
    entry = due_name(retried_manually(over, 20.0))
    await documents.put(DUE, entry, b'["x.example","acme"]', version=None)
    await ledger.repair(entry)
    known = await ledger.get(name_of(over))
    assert known is not None and known[0].status is DeliveryStatus.PENDING
    assert entry in [each.name for each in await ledger.due("", 10)]


def made(number: int, owner: str | None) -> Delivery:
    job = JobId(f"01900000-0000-7000-8000-{number:012d}")
    tenant = None if owner is None else TenantId(owner)
    return Delivery(job, 1, "job", tenant, "https://x.example/", FactKind.FAILED, 1, 1.0, 1.0)


class Counting(MemoryDocumentStore):
    """Counts the documents that anybody was given."""

    read = 0

    async def get(self, collection: str, name: str) -> Document | None:
        self.read += 1
        return await super().get(collection, name)

    async def listing(self, collection: str, after: str = "", limit: int = 100) -> list[Document]:
        found = await super().listing(collection, after, limit)
        self.read += len(found)
        return found


async def test_a_tenants_list_costs_by_what_is_its_own() -> None:
    documents = Counting()
    ledger = WebhookOutbox(documents)
    for number in range(500):
        await ledger.add(made(number, ("others", "more", None)[number % 3]))
    mine = [made(number, "acme") for number in (600, 3, 40)]
    for delivery in mine:
        await ledger.add(delivery)
    documents.read = 0
    first, further = await ledger.page_of(TenantId("acme"), "", 2)
    rest, end = await ledger.page_of(TenantId("acme"), further, 2)
    assert [name for name, _ in first + rest] == sorted(map(name_of, mine))
    assert (end, await ledger.page_of(TenantId("nobody"), "", 2)) == ("", ([], ""))
    assert documents.read <= 10


async def test_what_is_forgotten_leaves_nothing_and_an_entry_without_a_delivery_is_passed_over() -> None:
    documents = MemoryDocumentStore()
    ledger = WebhookOutbox(documents)
    first, second = made(1, "acme"), made(2, "acme")
    for delivery in (first, second):
        await ledger.add(delivery)
    await documents.remove(DELIVERIES, name_of(first))
    found, _ = await ledger.page_of(TenantId("acme"), "", 10)
    assert [delivery for _, delivery in found] == [second]
    for delivery in (first, second):
        await ledger.forget(name_of(delivery), delivery.owner)
    assert await documents.collections() == [DUE]
