"""The webhook outbox: which jobs have webhooks, which deliveries exist, and when each is due.

It has four collections in the document store. A *note* is written before a round of a job and stays until all
deliveries of the round exist. A *delivery* is named after its fact and webhook, so two hubs create it once.
An *owner* entry, written before the delivery, lists a tenant's deliveries. A *due* entry orders deliveries by
time; `repair` repairs stale ones. Every step may be repeated, and a hub may die between any two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import sha256
from urllib.parse import urlsplit

import msgspec

from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.webhook import Delivery, DeliveryStatus
from comfyfleet.ports import Document, DocumentStore

NOTES = "webhook_notes"
DELIVERIES = "deliveries"
OF_OWNER = "deliveries_of"
DUE = "deliveries_due"

_TRIES = 20
_PAGE = 200
_BATCH_SIZE = 50
MAX_OF_A_JOB = 1_000


class WebhookOutboxEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """This round of a job has webhooks."""

    at: float
    told: int = 0
    """The number of the last fact whose deliveries exist."""


class StoredOutboxEntry(msgspec.Struct, frozen=True):
    job_id: JobId
    round: int
    entry: WebhookOutboxEntry
    version: int


class DueDelivery(msgspec.Struct, frozen=True):
    """A due delivery with what the sender needs to order it: host and owner."""

    name: str
    at: float
    host: str
    owner: str


_due_bodies = msgspec.json.Decoder(tuple[str, str])


class WebhookOutbox:
    def __init__(self, documents: DocumentStore) -> None:
        self._documents = documents

    # notes

    async def add_entry(self, job_id: JobId, round_: int, now: float) -> None:
        await self._documents.put(
            NOTES, _note_name(job_id, round_), msgspec.json.encode(WebhookOutboxEntry(now)), version=0
        )

    async def get_entry(self, job_id: JobId, round_: int) -> StoredOutboxEntry | None:
        document = await self._documents.get(NOTES, _note_name(job_id, round_))
        return (
            None if document is None else StoredOutboxEntry(job_id, round_, _note(document), document.version)
        )

    async def mark_published(self, stored: StoredOutboxEntry, number: int) -> None:
        """Deliveries exist for all facts up to this number."""
        body = msgspec.json.encode(msgspec.structs.replace(stored.entry, told=number))
        await self._documents.put(
            NOTES, _note_name(stored.job_id, stored.round), body, version=stored.version
        )

    async def remove_entry(self, stored: StoredOutboxEntry) -> None:
        await self._documents.remove(NOTES, _note_name(stored.job_id, stored.round))

    async def list_entries(self, after: str, limit: int) -> tuple[list[StoredOutboxEntry], str]:
        """A page in order of submission, and where the next one starts (empty: none)."""
        page = await self._documents.listing(NOTES, after, limit)
        found = []
        for document in page:
            job_id, _, round_ = document.name.rpartition("/")
            found.append(StoredOutboxEntry(JobId(job_id), int(round_), _note(document), document.version))
        return found, page[-1].name if len(page) == limit else ""

    # deliveries

    async def add(self, delivery: Delivery) -> DueDelivery | None:
        """Creates the delivery if it is new. None: it has been sent already."""
        name = name_of(delivery)
        if delivery.owner is not None:
            await self._documents.put(OF_OWNER, _beginning(delivery.owner) + name, b"", version=0)
        if not await self._documents.put(DELIVERIES, name, msgspec.json.encode(delivery), version=0):
            known = await self.get(name)
            if known is None or known[0].status is not DeliveryStatus.PENDING:
                return None
            delivery = known[0]
        return await self._put_due(delivery)

    async def get(self, name: str) -> tuple[Delivery, int] | None:
        """With its version."""
        document = await self._documents.get(DELIVERIES, name)
        return None if document is None else (_delivery(document), document.version)

    async def claim(self, name: str, now: float, until: float) -> tuple[Delivery, int] | None:
        """Claims the delivery for one sender. None: it is not due, or another sender has it."""
        known = await self.get(name)
        if known is None:
            return None
        delivery, version = known
        is_claimed = delivery.claimed_until is not None and now < delivery.claimed_until
        if delivery.status is not DeliveryStatus.PENDING or delivery.next_at > now or is_claimed:
            return None
        claimed = msgspec.structs.replace(delivery, claimed_until=until)
        if not await self._documents.put(DELIVERIES, name, msgspec.json.encode(claimed), version=version):
            return None
        return claimed, version + 1

    async def settle(self, before: Delivery, after: Delivery, version: int) -> bool:
        """Saves the result of a claimed delivery. False: it has changed meanwhile."""
        name = name_of(after)
        if not await self._documents.put(DELIVERIES, name, msgspec.json.encode(after), version=version):
            return False
        if after.status is DeliveryStatus.PENDING:
            await self._put_due(after)
        if due_name(after) != due_name(before) or after.status is not DeliveryStatus.PENDING:
            await self._documents.remove(DUE, due_name(before))
        return True

    async def change(self, name: str, change: Callable[[Delivery], Delivery]) -> Delivery | None:
        """A manual change. None: there is no such delivery."""
        for _ in range(_TRIES):
            known = await self.get(name)
            if known is None:
                return None
            changed = change(known[0])
            # Before and after the write: if the hub dies in between, a due entry still exists.
            await self._put_due(changed)
            if await self._documents.put(DELIVERIES, name, msgspec.json.encode(changed), version=known[1]):
                await self._put_due(changed)
                return changed
        raise Fault("the delivery keeps changing at the same time; try again")

    async def of_job(self, job_id: JobId) -> list[Delivery]:
        beginning = after = f"{job_id}/"
        found: list[Delivery] = []
        while len(found) < MAX_OF_A_JOB:
            page = await self._documents.listing(DELIVERIES, after, _PAGE)
            found += [_delivery(each) for each in page if each.name.startswith(beginning)]
            if len(page) < _PAGE or not page[-1].name.startswith(beginning):
                break
            after = page[-1].name
        return found

    async def page(self, after: str, limit: int) -> list[tuple[str, Delivery]]:
        """All deliveries with their names, in order of job submission."""
        return [
            (each.name, _delivery(each)) for each in await self._documents.listing(DELIVERIES, after, limit)
        ]

    async def page_of(
        self, owner: TenantId, after: str, limit: int
    ) -> tuple[list[tuple[str, Delivery]], str]:
        """A tenant's deliveries in the same order, and where the next page starts (empty: none)."""
        names = await self._owned_names(owner, after, limit)
        found: list[tuple[str, Delivery]] = []
        for start in range(0, len(names), _BATCH_SIZE):
            some = names[start : start + _BATCH_SIZE]
            known = await asyncio.gather(*map(self.get, some))
            # An owner entry without a delivery is being created or removed.
            found += [(name, each[0]) for name, each in zip(some, known, strict=True) if each is not None]
        return found, names[-1] if len(names) == limit else ""

    async def forget(self, name: str, owner: TenantId | None) -> None:
        # The owner entry goes last: a delivery without one could not be listed.
        await self._documents.remove(DELIVERIES, name)
        if owner is not None:
            await self._documents.remove(OF_OWNER, _beginning(owner) + name)

    async def forget_some_of(self, owner: TenantId, limit: int) -> int:
        """How many it removed; 0: none is left."""
        names = await self._owned_names(owner, "", limit)
        for name in names:
            await self.forget(name, owner)
        return len(names)

    async def _owned_names(self, owner: TenantId, after: str, limit: int) -> list[str]:
        beginning = _beginning(owner)
        page = await self._documents.listing(OF_OWNER, beginning + after, limit)
        return [each.name.removeprefix(beginning) for each in page if each.name.startswith(beginning)]

    # due entries

    async def due(self, after: str, limit: int) -> list[DueDelivery]:
        return [
            DueDelivery(document.name, int(document.name[:13]) / 1000, *_due_bodies.decode(document.body))
            for document in await self._documents.listing(DUE, after, limit)
        ]

    async def repair(self, entry: str) -> None:
        """Repairs a due entry whose delivery has ended or is due at another time."""
        pending = await self._pending(entry)
        if pending is not None:
            if due_name(pending) == entry:
                return
            await self._put_due(pending)
        await self._documents.remove(DUE, entry)
        # A manual change may have made it due again under the removed name.
        pending = await self._pending(entry)
        if pending is not None and due_name(pending) == entry:
            await self._put_due(pending)

    async def _pending(self, entry: str) -> Delivery | None:
        known = await self.get(delivery_in(entry))
        return known[0] if known is not None and known[0].status is DeliveryStatus.PENDING else None

    async def _put_due(self, delivery: Delivery) -> DueDelivery:
        owner = "" if delivery.owner is None else str(delivery.owner)
        entry = DueDelivery(due_name(delivery), delivery.next_at, host_of(delivery.url), owner)
        body = msgspec.json.encode((entry.host, entry.owner))
        await self._documents.put(DUE, entry.name, body, version=None)
        return entry


def _beginning(owner: TenantId) -> str:
    """The name prefix of a tenant's entries: the same length for every tenant."""
    return sha256(owner.encode()).hexdigest()[:32] + "/"


def name_of(delivery: Delivery) -> str:
    return f"{delivery.job_id}/{delivery.number:08d}/{delivery.webhook_id}"


def submitted_at(name: str) -> float:
    """When the job of this delivery was submitted: job ids start with the time."""
    return int(name.replace("-", "")[:12], 16) / 1000


def named(delivery_id: str) -> str | None:
    """The name of the delivery with this id. None: the id is malformed."""
    job_id, _, rest = delivery_id.partition("_")
    number, _, webhook_id = rest.partition("_")
    is_plain = delivery_id.isascii() and delivery_id.isprintable() and len(delivery_id) < 200
    if not (is_plain and job_id and webhook_id and number.isdigit() and len(number) < 9):
        return None
    return f"{job_id}/{int(number):08d}/{webhook_id}"


def due_name(delivery: Delivery) -> str:
    return f"{int(delivery.next_at * 1000):013d}/{name_of(delivery)}"


def delivery_in(entry: str) -> str:
    """The name of the delivery of a due entry."""
    return entry.partition("/")[2]


def host_of(url: str) -> str:
    return urlsplit(url).netloc.lower()


def _note_name(job_id: JobId, round_: int) -> str:
    return f"{job_id}/{round_:06d}"


def _note(document: Document) -> WebhookOutboxEntry:
    return msgspec.json.decode(document.body, type=WebhookOutboxEntry)


def _delivery(document: Document) -> Delivery:
    return msgspec.json.decode(document.body, type=Delivery)
