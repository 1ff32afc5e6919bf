"""The log of every change made through the hub, in the store's cabinet: who, what, when, and what came of it.

What an operator does is noted before it is done: where that cannot be written, nothing is changed. What callers do to
jobs is noted, many in one document, before it is answered: the job is safe in the store by then, so an entry that
cannot be written is told to the log of the process in full. Old entries are forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import msgspec

from comfyfleet.model.access import AuditEntry
from comfyfleet.model.errors import ComfyFleetError, Refusal, RefusalCode
from comfyfleet.ports import Cabinet, Chance, Clock, Document

_LOG = logging.getLogger("comfyfleet.audit")

Kind = Literal["operations", "jobs"]

DRAWERS: dict[Kind, str] = {"operations": "audit", "jobs": "audit_jobs"}
KEEP_S: dict[Kind, float] = {"operations": 90 * 86400.0, "jobs": 7 * 86400.0}

_GROUP = 50
"""Entries in one document: an entry has about a kilobyte at most, a document 64."""
_TARGET = 256
_PRUNE_EVERY_S = 10.0
_PRUNE = 2000

_entries = msgspec.json.Decoder(tuple[AuditEntry, ...])


A = TypeVar("A")


class Audit:
    def __init__(self, cabinet: Cabinet, clock: Clock, chance: Chance) -> None:
        self._cabinet = cabinet
        self._clock = clock
        self._chance = chance
        self._waiting: list[tuple[AuditEntry, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._pruned_at = clock.now()
        self._named_at = 0.0
        self.lost = 0
        """Entries that are in the log of the process alone."""

    async def operation(
        self, entry: AuditEntry, work: Callable[[], Awaitable[A]], made: Callable[[A], str | None]
    ) -> A:
        entry = self._dated(entry)
        name = self._name(entry)
        if not await self._cabinet.put(DRAWERS["operations"], name, _encode([entry]), version=0):
            raise AssertionError("names of entries are random, and never repeat")
        outcome, target = "cancelled", entry.target
        try:
            answer = await work()
            outcome, target = "done", made(answer) or target
            return answer
        except Refusal as refusal:
            outcome = refusal.code.value
            raise
        except Exception:
            outcome = "failed"
            raise
        finally:
            ended = msgspec.structs.replace(entry, outcome=outcome, target=target[:_TARGET])
            try:
                await self._cabinet.put(DRAWERS["operations"], name, _encode([ended]), version=1)
            except ComfyFleetError as error:
                self._lose(ended, error)
            await self._prune()

    async def entrance(
        self, entry: AuditEntry, work: Callable[[], Awaitable[A]], made: Callable[[A], str | None]
    ) -> A:
        """Where anybody may knock, only who was let in is noted. What cannot be noted is not handed over."""
        answer = await work()
        entry = self._dated(msgspec.structs.replace(entry, outcome="done", target=made(answer) or ""))
        await self._cabinet.put(DRAWERS["operations"], self._name(entry), _encode([entry]), version=0)
        return answer

    async def job_change(
        self, entry: AuditEntry, work: Callable[[], Awaitable[A]], made: Callable[[A], str | None]
    ) -> A:
        """Only what was done: whatever is refused has changed nothing."""
        answer = await work()
        entry = msgspec.structs.replace(entry, outcome="done", target=made(answer) or entry.target)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._dated(entry), written))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        await written
        return answer

    async def page(
        self, kind: Kind, after: str, limit: int
    ) -> tuple[list[tuple[str, AuditEntry]], str | None]:
        """Entries in order of time with their ids, and where the next page begins."""
        drawer = DRAWERS[kind]
        found: list[tuple[str, AuditEntry]] = []
        name, _, number = after.partition(".")
        if number:
            if not number.isascii() or not number.isdigit():
                raise Refusal(RefusalCode.INVALID_REQUEST, "no list goes on there: begin it anew")
            document = await self._cabinet.get(drawer, name)
            found += [] if document is None else _numbered(document)[int(number) + 1 :]
        while len(found) <= limit:
            documents = await self._cabinet.listing(drawer, name, limit + 1)
            for document in documents:
                found += _numbered(document)
            if len(documents) <= limit:
                break
            name = documents[-1].name
        page = found[:limit]
        return page, page[-1][0] if len(found) > limit else None

    # writing

    def _dated(self, entry: AuditEntry) -> AuditEntry:
        return msgspec.structs.replace(entry, at=self._clock.now(), target=entry.target[:_TARGET])

    def _name(self, entry: AuditEntry) -> str:
        # To the millisecond: two that a hub notes in one still stand in their order.
        self._named_at = max(entry.at, self._named_at + 0.001)
        return self._chance.job_id(self._named_at)

    async def _write(self) -> None:
        """Whoever comes while a group is being written is in the next: the busier the hub, the larger they are."""
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:_GROUP], self._waiting[_GROUP:]
                entries = [entry for entry, _ in group]
                try:
                    body, name = _encode(entries), self._name(entries[0])
                    await self._cabinet.put(DRAWERS["jobs"], name, body, version=0)
                # Whatever it was: those who wait are answered, and the others get their turn.
                except Exception as error:
                    for entry in entries:
                        self._lose(entry, error)
                finally:
                    for _, written in group:
                        if not written.done():
                            written.set_result(None)
                await self._prune()
        finally:
            self._writing = None

    def _lose(self, entry: AuditEntry, error: Exception) -> None:
        self.lost += 1
        _LOG.error("an entry is in this log alone (%s): %s", error, msgspec.json.encode(entry).decode())

    async def _prune(self) -> None:
        now = self._clock.now()
        if now - self._pruned_at < _PRUNE_EVERY_S:
            return
        self._pruned_at = now
        for kind, drawer in DRAWERS.items():
            try:
                for document in await self._cabinet.listing(drawer, limit=_PRUNE):
                    if _time_of(document.name) > now - KEEP_S[kind]:
                        break
                    await self._cabinet.remove(drawer, document.name)
            except ComfyFleetError as error:
                _LOG.warning("old entries could not be forgotten; it is tried again later: %s", error)


def start_after(time: float) -> str:
    """As a place in a list: before every entry of that time or later."""
    digits = f"{int(time * 1000):012x}"
    return f"{digits[:8]}-{digits[8:12]}"


def _time_of(name: str) -> float:
    return int(name.replace("-", "")[:12], 16) / 1000


def _numbered(document: Document) -> list[tuple[str, AuditEntry]]:
    entries = _entries.decode(document.body)
    return [(f"{document.name}.{number}", entry) for number, entry in enumerate(entries)]


def _encode(entries: list[AuditEntry]) -> bytes:
    return msgspec.json.encode(entries)
