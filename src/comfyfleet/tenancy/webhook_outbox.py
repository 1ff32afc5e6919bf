"""The book of deliveries, in the store's cabinet: whose facts are to be told, what was told, and what is due when.

Four drawers. A *note* is written before a round of a job is, and stays until the end of the round is in the book: it
says where to look for facts. A *delivery* has a name that follows from fact and webhook, so that two hubs that enter
the same one enter it once. An entry *of its owner*, made before it, lets a tenant's be listed without anybody else's. A
*due* entry stands in the order of time and leads to its delivery; one that leads nowhere
is put right by whoever finds it. So every step may be taken twice, and a hub may die between any two.
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
    """Somebody is to hear of this round of a job."""

    at: float
    told: int = 0
    """The number of the last fact that is in the book."""


class StoredOutboxEntry(msgspec.Struct, frozen=True):
    """A note as it was read."""

    job_id: JobId
    round: int
    note: WebhookOutboxEntry
    version: int


class DueDelivery(msgspec.Struct, frozen=True):
    """What has to be known to line it up: where it goes, and whose it is."""

    name: str
    at: float
    host: str
    owner: str


_lining_up = msgspec.json.Decoder(tuple[str, str])


class WebhookOutbox:
    def __init__(self, documents: DocumentStore) -> None:
        self._documents = documents

    # notes

    async def note(self, job_id: JobId, round_: int, now: float) -> None:
        await self._documents.put(
            NOTES, _note_name(job_id, round_), msgspec.json.encode(WebhookOutboxEntry(now)), version=0
        )

    async def noted(self, job_id: JobId, round_: int) -> StoredOutboxEntry | None:
        document = await self._documents.get(NOTES, _note_name(job_id, round_))
        return (
            None if document is None else StoredOutboxEntry(job_id, round_, _note(document), document.version)
        )

    async def told(self, noted: StoredOutboxEntry, number: int) -> None:
        """Everything up to that fact is in the book. Whoever was quicker has said the same."""
        body = msgspec.json.encode(msgspec.structs.replace(noted.note, told=number))
        await self._documents.put(NOTES, _note_name(noted.job_id, noted.round), body, version=noted.version)

    async def forget_note(self, noted: StoredOutboxEntry) -> None:
        await self._documents.remove(NOTES, _note_name(noted.job_id, noted.round))

    async def notes(self, after: str, limit: int) -> tuple[list[StoredOutboxEntry], str]:
        """Some of them in the order of submission, and where to go on: nowhere (empty) behind the last."""
        page = await self._documents.listing(NOTES, after, limit)
        found = []
        for document in page:
            job_id, _, round_ = document.name.rpartition("/")
            found.append(StoredOutboxEntry(JobId(job_id), int(round_), _note(document), document.version))
        return found, page[-1].name if len(page) == limit else ""

    # deliveries

    async def add(self, delivery: Delivery) -> DueDelivery | None:
        """Enters it once. What is answered is still to be sent."""
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
        """For whoever is going to send it, if nobody else is. None: there is nothing to do here now."""
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
        """What came of a claimed one. False: it was changed in between, by hand or because the claim was over."""
        name = name_of(after)
        if not await self._documents.put(DELIVERIES, name, msgspec.json.encode(after), version=version):
            return False
        if after.status is DeliveryStatus.PENDING:
            await self._put_due(after)
        if due_name(after) != due_name(before) or after.status is not DeliveryStatus.PENDING:
            await self._documents.remove(DUE, due_name(before))
        return True

    async def change(self, name: str, change: Callable[[Delivery], Delivery]) -> Delivery | None:
        """By hand: it is due from then on. None: there is no such delivery."""
        for _ in range(_TRIES):
            known = await self.get(name)
            if known is None:
                return None
            changed = change(known[0])
            # Before and after: a hub that dies in between leaves an entry that leads to it, at the worst one too many.
            await self._put_due(changed)
            if await self._documents.put(DELIVERIES, name, msgspec.json.encode(changed), version=known[1]):
                await self._put_due(changed)
                return changed
        raise Fault("the delivery is being changed by others all the time; try again")

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
        """Everybody's, in the order of submission of their jobs, with their names."""
        return [
            (each.name, _delivery(each)) for each in await self._documents.listing(DELIVERIES, after, limit)
        ]

    async def page_of(
        self, owner: TenantId, after: str, limit: int
    ) -> tuple[list[tuple[str, Delivery]], str]:
        """A tenant's own, in the same order, and where to go on: nowhere (empty) behind the last."""
        beginning = _beginning(owner)
        page = await self._documents.listing(OF_OWNER, beginning + after, limit)
        names = [each.name.removeprefix(beginning) for each in page if each.name.startswith(beginning)]
        found: list[tuple[str, Delivery]] = []
        for start in range(0, len(names), _BATCH_SIZE):
            some = names[start : start + _BATCH_SIZE]
            known = await asyncio.gather(*map(self.get, some))
            # An entry without a delivery: it is being made, or was forgotten by halves.
            found += [(name, each[0]) for name, each in zip(some, known, strict=True) if each is not None]
        return found, names[-1] if len(names) == limit else ""

    async def forget(self, name: str, owner: TenantId | None) -> None:
        """The entry last: one that is left over is passed over, a delivery without one could not be listed."""
        await self._documents.remove(DELIVERIES, name)
        if owner is not None:
            await self._documents.remove(OF_OWNER, _beginning(owner) + name)

    async def forget_some_of(self, owner: TenantId, limit: int) -> int:
        """How many were there to be forgotten; 0: none is left."""
        beginning = _beginning(owner)
        page = await self._documents.listing(OF_OWNER, beginning, limit)
        names = [each.name.removeprefix(beginning) for each in page if each.name.startswith(beginning)]
        for name in names:
            await self.forget(name, owner)
        return len(names)

    # what is due

    async def due(self, after: str, limit: int) -> list[DueDelivery]:
        """In the order of time."""
        return [
            DueDelivery(document.name, int(document.name[:13]) / 1000, *_lining_up.decode(document.body))
            for document in await self._documents.listing(DUE, after, limit)
        ]

    async def mend(self, entry: str) -> None:
        """An entry may lead to a delivery that is over, or is due at another time."""
        pending = await self._pending(entry)
        if pending is not None:
            if due_name(pending) == entry:
                return
            await self._put_due(pending)
        await self._documents.remove(DUE, entry)
        # Asked for again in between it may be due under this very name, and nothing else would lead to it.
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
    """Of the same length for every tenant, whatever it is called."""
    return sha256(owner.encode()).hexdigest()[:32] + "/"


def name_of(delivery: Delivery) -> str:
    return f"{delivery.job_id}/{delivery.number:08d}/{delivery.webhook_id}"


def submitted_at(name: str) -> float:
    """When the job of the delivery with this name was submitted: its id begins with the time."""
    return int(name.replace("-", "")[:12], 16) / 1000


def named(delivery_id: str) -> str | None:
    """The name of the delivery with this id, if it can be one's."""
    job_id, _, rest = delivery_id.partition("_")
    number, _, webhook_id = rest.partition("_")
    is_plain = delivery_id.isascii() and delivery_id.isprintable() and len(delivery_id) < 200
    if not (is_plain and job_id and webhook_id and number.isdigit() and len(number) < 9):
        return None
    return f"{job_id}/{int(number):08d}/{webhook_id}"


def due_name(delivery: Delivery) -> str:
    return f"{int(delivery.next_at * 1000):013d}/{name_of(delivery)}"


def delivery_in(entry: str) -> str:
    """The name of the delivery that an entry leads to."""
    return entry.partition("/")[2]


def host_of(url: str) -> str:
    return urlsplit(url).netloc.lower()


def _note_name(job_id: JobId, round_: int) -> str:
    return f"{job_id}/{round_:06d}"


def _note(document: Document) -> WebhookOutboxEntry:
    return msgspec.json.decode(document.body, type=WebhookOutboxEntry)


def _delivery(document: Document) -> Delivery:
    return msgspec.json.decode(document.body, type=Delivery)
