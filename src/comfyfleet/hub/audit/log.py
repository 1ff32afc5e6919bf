"""The log of every change made through the hub, in the store's cabinet: who, what, when, and what came of it; and of
the workers that came, left or were lost.

What an operator does is noted before it is done: where that cannot be written, nothing is changed. What callers do to
jobs is noted, many in one group, before it is answered: the job is safe in the store by then, so an entry that
cannot be written is told to the log of the process in full. Entries stand in a chain of hashes; old ones are forgotten
from its beginning, and an entry tells of it.

Workers that come, leave or are lost, in the audit log: once, whichever engine noticed.

What the log tells of a worker so far stands in a document of its own. Every hub compares it with the worker's record,
at once when its own engine tells of a change and otherwise every second, and of several hubs that find a difference the
one whose document stands enters it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Literal, TypeVar

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.audit.chain import ChainedEntry, HashChain, linked
from comfyfleet.model.access import AuditEntry, Role
from comfyfleet.model.errors import ComfyFleetError, Refusal
from comfyfleet.model.fact import Event, FleetEvent
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.ports import Clock, Document, DocumentStore, RandomSource, Timer
from comfyfleet.tracing import in_background, log_failure
from comfyfleet.wire.keys import FORGET, note

_LOG = logging.getLogger("comfyfleet.audit")

Kind = Literal["operations", "jobs"]

COLLECTIONS: dict[Kind, str] = {"operations": "audit_log", "jobs": "audit_job_log"}
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


class AuditLog:
    def __init__(
        self,
        documents: DocumentStore,
        clock: Clock,
        chance: RandomSource,
        keep_s: Mapping[Kind, float] = KEEP_S,
    ) -> None:
        self._documents = documents
        self._clock = clock
        self._chance = chance
        self._keep_s = keep_s
        self._chains = {
            kind: HashChain(documents, clock, collection) for kind, collection in COLLECTIONS.items()
        }
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
        if not await self._documents.put(BEGUN, name, msgspec.json.encode(_Begun(entry)), version=0):
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
    ) -> tuple[list[ChainedEntry], str | None]:
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
        await self._documents.remove(BEGUN, name)

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
            for kind in COLLECTIONS:
                await self._forget(kind)

    async def _give_up(self) -> None:
        now = self._clock.now()
        for document in await self._documents.listing(BEGUN, limit=_BATCH):
            if _time_of(document.name) > now - _GIVEN_UP_S:
                return
            begun = _begun.decode(document.body)
            claimed = msgspec.json.encode(_Begun(begun.entry, now + _GIVEN_UP_S))
            # Of several hubs that look one goes on.
            if begun.claimed_until > now or not await self._documents.put(
                BEGUN, document.name, claimed, version=document.version
            ):
                continue
            if not await self._has_ended(begun.entry):
                await self._chains["operations"].append(begun.entry)
            await self._documents.remove(BEGUN, document.name)

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


_WORKER_LOG = logging.getLogger(__name__)

COLLECTION = "audit_workers"
LOOK_S = 1.0
_MAX_AGE_S = 2.0
"""An engine reads the fleet as often by itself."""
_RECENT_S = 10.0
_PAGE = 200


class _Noted(msgspec.Struct, frozen=True):
    connected_at: float
    disconnects: int
    is_offline: bool


_decoder = msgspec.json.Decoder(_Noted)


class WorkerLog:
    """`start` and `close` are its life; both may be called twice. What its own engine tells it enters without them."""

    def __init__(self, engine: Engine, documents: DocumentStore, audit: AuditLog) -> None:
        self._engine = engine
        self._documents = documents
        self._audit = audit
        self._began = engine.now()
        self._noted: dict[WorkerId, _Noted] = {}
        self._absent: set[str] = set()
        self._running: asyncio.Task[None] | None = None
        self._is_called_again = False
        self._timer: Timer | None = None
        self._is_started = False
        self._leave_bus = engine.bus.listen(self._hear)

    def start(self) -> None:
        self._is_started = True
        self._wake()

    async def close(self) -> None:
        """What was noticed just now is entered, if the store takes it."""
        self._leave_bus()
        self._is_started = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (running := self._running) is not None:
            await asyncio.wait((running,), timeout=_CLOSE_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _hear(self, event: Event) -> None:
        if isinstance(event, FleetEvent) and event.kind in ("online", "offline"):
            self._wake()

    def _wake(self) -> None:
        if self._running is not None:
            self._is_called_again = True
        else:
            self._running = in_background(self._run(), name="workers in the audit log")

    def _fire(self) -> None:
        self._timer = None
        self._wake()

    async def _run(self) -> None:
        try:
            while True:
                self._is_called_again = False
                await self.look()
                if not self._is_called_again:
                    break
        except ComfyFleetError as error:
            _WORKER_LOG.warning("workers that came or went are entered in the audit log later: %s", error)
        except Exception:
            log_failure(
                _WORKER_LOG, "workers that came or went could not be entered; the next look tries again"
            )
        finally:
            self._running = None
            if self._is_started and self._timer is None:
                clock = self._engine.clock
                self._timer = clock.call_at(clock.now() + LOOK_S, self._fire)

    async def look(self) -> None:
        """Enters what nobody has entered yet."""
        for worker in await self._engine.workers(max_age_s=_MAX_AGE_S):
            if self._noted.get(worker.worker_id) != _state_of(worker):
                await self._compare(worker.worker_id)

    async def _compare(self, worker_id: WorkerId) -> None:
        while True:
            document = await self._documents.get(COLLECTION, worker_id)
            # Read after the document, and so never older than what that tells of.
            worker = await self._engine.store.get_worker(worker_id)
            if worker is None:
                return
            now = _state_of(worker)
            before = self._unknown(worker) if document is None else _decoder.decode(document.body)
            version, body = 0 if document is None else document.version, msgspec.json.encode(now)
            if document is not None and before == now:
                break
            if await self._documents.put(COLLECTION, worker_id, body, version=version):
                for action in _between(before, now, was_lost=worker.was_lost):
                    self._audit.happened(AuditEntry(0.0, "", Role.WORKER, action, worker_id, outcome="done"))
                break
        self._noted[worker_id] = now

    def _unknown(self, worker: WorkerRecord) -> _Noted:
        """One of before the log was kept so: only that it is there, if it is, not how often it went before."""
        is_new = worker.connected_at >= self._began - _RECENT_S
        return _Noted(0.0, 0 if is_new else worker.disconnects, True)

    async def tidy(self) -> None:
        """Forgets workers that are gone from the store, and were when it last looked."""
        there = {worker.worker_id for worker in await self._engine.store.workers()}
        absent, after = set[str](), ""
        while page := await self._documents.listing(COLLECTION, after, _PAGE):
            absent |= {each.name for each in page if each.name not in there}
            after = page[-1].name
        for name in absent & self._absent:
            await self._documents.remove(COLLECTION, name)
            self._noted.pop(WorkerId(name), None)
        self._absent = absent - self._absent


def _state_of(worker: WorkerRecord) -> _Noted:
    return _Noted(worker.connected_at, worker.disconnects, worker.is_offline)


def _between(before: _Noted, now: _Noted, *, was_lost: bool) -> list[str]:
    """What became of a worker in the meantime, in order."""
    is_another = now.disconnects == before.disconnects and not (before.is_offline or now.is_offline)
    if is_another or now.disconnects < before.disconnects:
        # Removed, and registered as if it had never been there.
        before = _Noted(0.0, 0, True)
    is_offline, still_to_go, actions = before.is_offline, now.disconnects - before.disconnects, list[str]()
    while still_to_go > 0 or is_offline != now.is_offline:
        is_offline = not is_offline
        still_to_go -= is_offline
        is_last = still_to_go <= 0
        came_or_went = "worker_lost" if was_lost and is_last else "worker_left"
        actions.append(came_or_went if is_offline else "worker_registered")
    return actions
