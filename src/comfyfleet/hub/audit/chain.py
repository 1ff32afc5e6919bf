"""A tamper-evident log in the document store: groups of entries, each with the hash of the entry before it.

A document holds one group; its name is the number of the first entry. Writing means creating the next
document, which only one of several hubs can do; the others read that document and continue after it. So a
group costs one write.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from comfyfleet.model.access import AuditEntry
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.ports import Clock, Document, DocumentStore
from comfyfleet.wire.keys import BEGINNING, hash_of

CHAINS = "audit_chains"
"""One document for each log: the id of its current chain. A copied store may bring other chains."""

_GROUP = 50
"""Entries of one document. An entry has about a kilobyte at most, a document 64."""
_PAGE = 100
_TRUSTED_S = 600.0
"""Shorter than every retention time of a log."""
_CONTENDED_S = 1.0
_PAUSE_S = 0.003
_TRIES = 200
_DIGITS = 14


class LogGroup(msgspec.Struct, frozen=True):
    previous: str
    """Hash of the entry before the first one."""
    at: float
    """Time of the newest entry, and never before that of the previous group."""
    hash: str
    """Hash of the last entry."""
    entries: tuple[AuditEntry, ...]


class ChainedEntry(msgspec.Struct, frozen=True):
    id: str
    number: int
    previous: str
    hash: str
    entry: AuditEntry


class _Head(msgspec.Struct, frozen=True):
    number: int = 0
    hash: str = BEGINNING
    at: float = 0.0


_groups = msgspec.json.Decoder(LogGroup)


class HashChain:
    def __init__(self, documents: DocumentStore, clock: Clock, collection: str) -> None:
        self._documents = documents
        self._clock = clock
        self.collection = collection
        self._name = ""
        self._head: _Head | None = None
        self._seen_at = 0.0
        """When `_head` was known to be the head."""
        self._contended_at = float("-inf")
        """When this hub last found that another hub had written."""
        self._waiting: list[tuple[AuditEntry, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def append(self, entry: AuditEntry) -> None:
        """Returns when the entry is stored. Entries that arrive during a write share the next group."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, written))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        await written

    async def _write(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:_GROUP], self._waiting[_GROUP:]
                error: Exception | None = None
                try:
                    await self._link(tuple(entry for entry, _ in group))
                # Any error: report it to the waiting callers and go on with the next group.
                except Exception as caught:
                    error = caught
                for _, written in group:
                    if written.done():
                        continue
                    if error is None:
                        written.set_result(None)
                    else:
                        written.set_exception(error)
        finally:
            self._writing = None

    async def _link(self, entries: tuple[AuditEntry, ...]) -> None:
        now = self._clock.monotonic()
        if self._head is None:
            self._head = await self._find_head()
        elif now >= self._seen_at + _TRUSTED_S:
            # Groups of other hubs may have been deleted by now; their numbers must not be used again.
            self._head = await self._catch_up(self._head)
        self._seen_at = now
        if now < self._contended_at + _CONTENDED_S:
            # Following another hub costs a read more than leading, so without a pause the hub that wrote
            # last would always write next.
            await asyncio.sleep(_PAUSE_S)
        for _ in range(_TRIES):
            head = self._head
            group = _group(head, entries)
            name = self._document(head.number + 1)
            if await self._documents.put(self.collection, name, msgspec.json.encode(group), version=0):
                self._head = _Head(head.number + len(entries), group.hash, group.at)
                return
            # Another hub was faster; its groups come first.
            self._contended_at = self._clock.monotonic()
            self._head = await self._catch_up(head)
        raise Fault("other hubs keep writing to the audit log at the same time; try again")

    async def _catch_up(self, head: _Head) -> _Head:
        # The names of documents sort by number.
        after = self._document(head.number)
        while page := await self._documents.listing(self.collection, after, _PAGE):
            for document in page:
                if not document.name.startswith(f"{self._name}/"):
                    return head
                group = _groups.decode(document.body)
                head = _Head(_number(document.name) + len(group.entries) - 1, group.hash, group.at)
            after = page[-1].name
        return head

    async def page(self, after: str, limit: int) -> tuple[list[ChainedEntry], str | None]:
        """A page of entries and the next cursor. Chains from another store sort by their start."""
        found: list[ChainedEntry] = []
        name, _, index = after.partition(".")
        if index:
            if not index.isascii() or not index.isdigit():
                raise Refusal(RefusalCode.INVALID_REQUEST, "the cursor is not valid: start without one")
            document = await self._documents.get(self.collection, name)
            found += [] if document is None else linked(document)[int(index) + 1 :]
        while len(found) <= limit:
            documents = await self._documents.listing(self.collection, name, limit + 1)
            for document in documents:
                found += linked(document)
            if len(documents) <= limit:
                break
            name = documents[-1].name
        page = found[:limit]
        return page, page[-1].id if len(found) > limit else None

    async def place_before(self, time: float) -> str:
        """The cursor after all groups that have only older entries."""
        await self._begin()
        last = await self._last_before(time)
        return self._document(0) if last is None else last.name

    async def first(self) -> Document | None:
        await self._begin()
        return await self._next(0)

    async def groups_before(self, time: float, limit: int) -> list[Document]:
        """The groups that have only older entries, oldest first."""
        await self._begin()
        page = await self._documents.listing(self.collection, self._document(0), limit)
        own = (each for each in page if each.name.startswith(f"{self._name}/"))
        return [each for each in own if _groups.decode(each.body).at < time]

    async def forget(self, documents: Sequence[Document]) -> None:
        """Never pass the last group: the next one needs its hash."""
        for document in documents:
            await self._documents.remove(self.collection, document.name)

    async def _begin(self) -> None:
        if self._name:
            return
        document = await self._documents.get(CHAINS, self.collection)
        if document is None:
            name = f"{int(self._clock.now() * 1000):012x}{secrets.token_hex(4)}"
            await self._documents.put(CHAINS, self.collection, name.encode(), version=0)
            document = await self._documents.get(CHAINS, self.collection)
            assert document is not None, "this hub or another one has just written it"
        self._name = document.body.decode()

    async def _find_head(self) -> _Head:
        await self._begin()
        last = await self._last_before(float("inf"))
        if last is None:
            return _Head()
        group = _groups.decode(last.body)
        return _Head(_number(last.name) + len(group.entries) - 1, group.hash, group.at)

    async def _last_before(self, time: float) -> Document | None:
        """The last group with only older entries, by an exponential and then a binary search."""

        async def look(number: int) -> Document | None:
            """The first group after that number, if it is older."""
            document = await self._next(number)
            return None if document is None or _groups.decode(document.body).at >= time else document

        last = await look(0)
        if last is None:
            return None
        step = 1
        while (found := await look(_number(last.name) + step)) is not None:
            last, step = found, step * 2
        while step > 1:
            step //= 2
            if (found := await look(_number(last.name) + step)) is not None:
                last = found
        # Steps count entries and a group has several, so the next group may still be older.
        while (found := await look(_number(last.name))) is not None:
            last = found
        return last

    async def _next(self, number: int) -> Document | None:
        found = await self._documents.listing(self.collection, self._document(number), 1)
        return found[0] if found and found[0].name.startswith(f"{self._name}/") else None

    def _document(self, number: int) -> str:
        return f"{self._name}/{number:0{_DIGITS}d}"


def linked(document: Document) -> list[ChainedEntry]:
    """The entries of a group. The last one gets the hash that is stored with the group."""
    group = _groups.decode(document.body)
    hash_, number, found = group.previous, _number(document.name), []
    for index, entry in enumerate(group.entries):
        previous, hash_ = hash_, hash_of(hash_, _plain(entry))
        found.append(ChainedEntry(f"{document.name}.{index}", number + index, previous, hash_, entry))
    if found and found[-1].hash != group.hash:
        found[-1] = msgspec.structs.replace(found[-1], hash=group.hash)
    return found


def _group(head: _Head, entries: tuple[AuditEntry, ...]) -> LogGroup:
    hash_ = head.hash
    for entry in entries:
        hash_ = hash_of(hash_, _plain(entry))
    return LogGroup(head.hash, max([head.at, *(entry.at for entry in entries)]), hash_, entries)


def _plain(entry: AuditEntry) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(entry)
    return plain


def _number(name: str) -> int:
    return int(name.rpartition("/")[2])
