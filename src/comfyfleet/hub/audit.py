"""The log of every change made through the hub, in the store's cabinet: who, what, when, and what came of it; and of
the workers that came, left or were lost.

What an operator does is noted before it is done: where that cannot be written, nothing is changed. What callers do to
jobs is noted, many in one group, before it is answered: the job is safe in the store by then, so an entry that
cannot be written is told to the log of the process in full. Entries stand in a chain of hashes; old ones are forgotten
from its beginning, and an entry tells of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Literal, TypeVar

import msgspec

from comfyfleet.hub.chain import Chain, Linked, linked
from comfyfleet.model.access import AuditEntry
from comfyfleet.model.errors import ComfyFleetError, Refusal
from comfyfleet.ports import Cabinet, Chance, Clock, Document
from comfyfleet.wire.chaining import FORGET, note

_LOG = logging.getLogger("comfyfleet.audit")

Kind = Literal["operations", "jobs"]

DRAWERS: dict[Kind, str] = {"operations": "audit_log", "jobs": "audit_job_log"}
BEGUN = "audit_begun"
"""Operations whose end is not in the log yet: a document each."""
KEEP_S: dict[Kind, float] = {"operations": 90 * 86400.0, "jobs": 7 * 86400.0}

_TARGET = 256
_LOOK_EVERY_S = 10.0
_FORGET_STEP_S = 12 * 3600.0
"""Old entries go together, twice a day: each time is an entry itself."""
_FORGET = 1000
_GIVEN_UP_S = 120.0
"""No operation takes so long: whoever began it is gone."""
_BATCH = 100
_CLOSE_S = 2.0


class _Begun(msgspec.Struct, frozen=True, omit_defaults=True):
    entry: AuditEntry
    claimed_until: float = 0.0
    """Some hub sees to it; one that died is not waited for any longer than this."""


_begun = msgspec.json.Decoder(_Begun)


A = TypeVar("A")


class Audit:
    def __init__(
        self, cabinet: Cabinet, clock: Clock, chance: Chance, keep_s: Mapping[Kind, float] = KEEP_S
    ) -> None:
        self._cabinet = cabinet
        self._clock = clock
        self._chance = chance
        self._keep_s = keep_s
        self._chains = {kind: Chain(cabinet, clock, drawer) for kind, drawer in DRAWERS.items()}
        self._looked_at = clock.monotonic()
        self._tidying = asyncio.Lock()
        self._later: set[asyncio.Task[None]] = set()
        self.lost = 0
        """Entries that are in the log of the process alone."""

    async def operation(
        self, entry: AuditEntry, work: Callable[[], Awaitable[A]], made: Callable[[A], str | None]
    ) -> A:
        entry = self._dated(entry)
        name = self._chance.job_id(entry.at)
        if not await self._cabinet.put(BEGUN, name, msgspec.json.encode(_Begun(entry)), version=0):
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
                await self._chains["operations"].append(ended)
                # The answer need not wait for this: what stays is found again, and known.
                self._in_background(partial(self._ended, name))
            except ComfyFleetError as error:
                self._lose(ended, error)
            self._look_after()

    async def entrance(
        self, entry: AuditEntry, work: Callable[[], Awaitable[A]], made: Callable[[A], str | None]
    ) -> A:
        """Where anybody may knock, only who was let in is noted. What cannot be noted is not handed over."""
        answer = await work()
        entry = self._dated(msgspec.structs.replace(entry, outcome="done", target=made(answer) or ""))
        await self._chains["operations"].append(entry)
        return answer

    async def job_change(
        self, entry: AuditEntry, work: Callable[[], Awaitable[A]], made: Callable[[A], str | None]
    ) -> A:
        """Only what was done: whatever is refused has changed nothing."""
        answer = await work()
        entry = self._dated(
            msgspec.structs.replace(entry, outcome="done", target=made(answer) or entry.target)
        )
        try:
            await self._chains["jobs"].append(entry)
        except Exception as error:
            self._lose(entry, error)
        self._look_after()
        return answer

    def happened(self, entry: AuditEntry) -> None:
        """Nobody asked for it, and nobody waits."""
        self._in_background(partial(self._append, self._dated(entry)))

    async def _append(self, entry: AuditEntry) -> None:
        try:
            await self._chains["operations"].append(entry)
        except ComfyFleetError as error:
            self._lose(entry, error)

    async def page(
        self, kind: Kind, after: str, limit: int, since: float | None = None
    ) -> tuple[list[Linked], str | None]:
        """Entries in their order, and where the next page begins."""
        chain = self._chains[kind]
        if since is not None and not after:
            after = await chain.place_before(since)
        found, cursor = await chain.page(after, limit)
        return [each for each in found if since is None or each.entry.at >= since], cursor

    async def close(self) -> None:
        """What happened just now is written, if the store takes it."""
        if self._later:
            await asyncio.wait(self._later, timeout=_CLOSE_S)
        for task in list(self._later):
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)

    # writing

    def _dated(self, entry: AuditEntry) -> AuditEntry:
        return msgspec.structs.replace(entry, at=self._clock.now(), target=entry.target[:_TARGET])

    def _lose(self, entry: AuditEntry, error: Exception) -> None:
        self.lost += 1
        _LOG.error("an entry is in this log alone (%s): %s", error, msgspec.json.encode(entry).decode())

    async def _ended(self, name: str) -> None:
        await self._cabinet.remove(BEGUN, name)

    # now and then

    def _look_after(self) -> None:
        now = self._clock.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._in_background(self.tidy)

    def _in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        async def quietly() -> None:
            try:
                await work()
            except ComfyFleetError as error:
                _LOG.warning("the audit log could not be tidied up; it is tried again later: %s", error)

        task = asyncio.get_running_loop().create_task(quietly(), name="audit log")
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def tidy(self) -> None:
        """What was begun by somebody who is gone gets its entry, and what is old is forgotten."""
        async with self._tidying:
            await self._give_up()
            for kind in DRAWERS:
                await self._forget(kind)

    async def _give_up(self) -> None:
        now = self._clock.now()
        for document in await self._cabinet.listing(BEGUN, limit=_BATCH):
            if _time_of(document.name) > now - _GIVEN_UP_S:
                return
            begun = _begun.decode(document.body)
            claimed = msgspec.json.encode(_Begun(begun.entry, now + _GIVEN_UP_S))
            # Of several hubs that look one goes on.
            if begun.claimed_until > now or not await self._cabinet.put(
                BEGUN, document.name, claimed, version=document.version
            ):
                continue
            if not await self._has_ended(begun.entry):
                await self._chains["operations"].append(begun.entry)
            await self._cabinet.remove(BEGUN, document.name)

    async def _has_ended(self, begun: AuditEntry) -> bool:
        after: str | None = await self._chains["operations"].place_before(begun.at)
        while after is not None:
            page, after = await self._chains["operations"].page(after, _BATCH)
            for each in page:
                if msgspec.structs.replace(each.entry, outcome="", target=begun.target) == begun:
                    return True
        return False

    async def _forget(self, kind: Kind) -> None:
        chain, before = self._chains[kind], self._clock.now() - self._keep_s[kind]
        first = await chain.first()
        if first is None or _latest(first) >= before - min(_FORGET_STEP_S, self._keep_s[kind] / 7):
            return
        old = await chain.groups_before(before, _FORGET)
        if old:
            last = linked(old[-1])[-1]
            target = note(last.number, last.hash)
            # Before they go: an entry whose beginning is missing is told from one whose beginning was forgotten.
            await chain.append(AuditEntry(self._clock.now(), "", None, FORGET, target, outcome="done"))
            await chain.forget(old)
            _LOG.info("entries of the audit log (%s) up to %s are forgotten", kind, target)


def _latest(document: Document) -> float:
    return max(each.entry.at for each in linked(document))


def _time_of(name: str) -> float:
    return int(name.replace("-", "")[:12], 16) / 1000
