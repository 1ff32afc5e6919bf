"""The audit log of every change made through the hub, and of workers that register, leave or are lost.

An operation is recorded before it runs: if the record cannot be written, nothing changes. A change to a job
is recorded before the answer; an entry that cannot be written goes to the process log. `WorkerLog` keeps one
document per worker with the last logged state; the hub that replaces a changed document writes the entry, so
each event is logged once.
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
from comfyfleet.paginator import documents_in
from comfyfleet.ports import Clock, Document, DocumentStore, RandomSource, Timer
from comfyfleet.tracing import in_background, log_failure
from comfyfleet.wire.keys import FORGET, note

_LOG = logging.getLogger("comfyfleet.audit")

Kind = Literal["operations", "jobs"]

COLLECTIONS: dict[Kind, str] = {"operations": "audit_log", "jobs": "audit_job_log"}
BEGUN = "audit_begun"
"""Operations without a final entry yet, one document each."""
KEEP_S: dict[Kind, float] = {"operations": 90 * 86400.0, "jobs": 7 * 86400.0}

_TARGET = 256
_TIDY_EVERY_S = 10.0
_FORGET_STEP_S = 12 * 3600.0
"""Old entries are deleted together, twice a day, because each deletion is an entry itself."""
_FORGET = 1000
_ABANDONED_S = 120.0
"""No operation takes this long: the hub that began it is gone."""
_BATCH = 100
_CLOSE_S = 2.0


class _Begun(msgspec.Struct, frozen=True, omit_defaults=True):
    entry: AuditEntry
    claimed_until: float = 0.0
    """Until then, another hub is handling it."""


_begun = msgspec.json.Decoder(_Begun)


A = TypeVar("A")


class AuditLog:
    def __init__(
        self,
        documents: DocumentStore,
        clock: Clock,
        rng: RandomSource,
        keep_s: Mapping[Kind, float] = KEEP_S,
    ) -> None:
        self._documents = documents
        self._clock = clock
        self._chance = rng
        self._keep_s = keep_s
        self._chains = {
            kind: HashChain(documents, clock, collection) for kind, collection in COLLECTIONS.items()
        }
        self._tidied_at = clock.monotonic()
        self._tidying = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self.lost = 0
        """Entries that only the process log has."""

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
                # The answer does not wait: if the removal fails, `clean_up` finds the document and the entry.
                self._in_background(partial(self._ended, name))
            except ComfyFleetError as error:
                self._lose(ended, error)
            self._tidy_if_due()

    async def log_success(
        self, entry: AuditEntry, work: Callable[[], Awaitable[A]], made: Callable[[A], str | None]
    ) -> A:
        """For routes without a key: logs successes only. Without an entry there is no answer."""
        answer = await work()
        entry = self._dated(msgspec.structs.replace(entry, outcome="done", target=made(answer) or ""))
        await self._chains["operations"].append(entry)
        return answer

    async def job_change(
        self, entry: AuditEntry, work: Callable[[], Awaitable[A]], made: Callable[[A], str | None]
    ) -> A:
        """Logs successes only: a refused request changes nothing."""
        answer = await work()
        entry = self._dated(
            msgspec.structs.replace(entry, outcome="done", target=made(answer) or entry.target)
        )
        try:
            await self._chains["jobs"].append(entry)
        except Exception as error:
            self._lose(entry, error)
        self._tidy_if_due()
        return answer

    def log_event(self, entry: AuditEntry) -> None:
        """Logs an event in the background."""
        self._in_background(partial(self._append, self._dated(entry)))

    async def _append(self, entry: AuditEntry) -> None:
        try:
            await self._chains["operations"].append(entry)
        except ComfyFleetError as error:
            self._lose(entry, error)

    async def page(
        self, kind: Kind, after: str, limit: int, since: float | None = None
    ) -> tuple[list[ChainedEntry], str | None]:
        chain = self._chains[kind]
        if since is not None and not after:
            after = await chain.place_before(since)
        found, cursor = await chain.page(after, limit)
        return [each for each in found if since is None or each.entry.at >= since], cursor

    async def close(self) -> None:
        """Writes pending entries if the store accepts them."""
        if self._background:
            await asyncio.wait(self._background, timeout=_CLOSE_S)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _dated(self, entry: AuditEntry) -> AuditEntry:
        return msgspec.structs.replace(entry, at=self._clock.now(), target=entry.target[:_TARGET])

    def _lose(self, entry: AuditEntry, error: Exception) -> None:
        self.lost += 1
        _LOG.error("entry missing in the audit log (%s): %s", error, msgspec.json.encode(entry).decode())

    async def _ended(self, name: str) -> None:
        await self._documents.remove(BEGUN, name)

    def _tidy_if_due(self) -> None:
        now = self._clock.monotonic()
        if now - self._tidied_at >= _TIDY_EVERY_S:
            self._tidied_at = now
            self._in_background(self.clean_up)

    def _in_background(self, work: Callable[[], Awaitable[None]]) -> None:
        async def guarded() -> None:
            try:
                await work()
            except ComfyFleetError as error:
                _LOG.warning("cannot clean up the audit log; will try again: %s", error)

        task = asyncio.get_running_loop().create_task(guarded(), name="audit log")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def clean_up(self) -> None:
        """Completes operations whose hub is gone, and deletes old entries."""
        async with self._tidying:
            await self._complete_abandoned()
            for kind in COLLECTIONS:
                await self._forget(kind)

    async def _complete_abandoned(self) -> None:
        now = self._clock.now()
        for document in await self._documents.listing(BEGUN, limit=_BATCH):
            if _time_of(document.name) > now - _ABANDONED_S:
                return
            begun = _begun.decode(document.body)
            claimed = msgspec.json.encode(_Begun(begun.entry, now + _ABANDONED_S))
            # Only one of several hubs continues.
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
            # Before the deletion: readers can then tell deleted entries from missing ones.
            await chain.append(AuditEntry(self._clock.now(), "", None, FORGET, target, outcome="done"))
            await chain.forget(old)
            _LOG.info("deleted entries of the audit log (%s) up to %s", kind, target)


def _latest(document: Document) -> float:
    return max(each.entry.at for each in linked(document))


def _time_of(name: str) -> float:
    return int(name.replace("-", "")[:12], 16) / 1000


_WORKER_LOG = logging.getLogger(__name__)

COLLECTION = "audit_workers"
LOOK_S = 1.0
_MAX_AGE_S = 2.0
"""An engine reads the fleet this often anyway."""
_RECENT_S = 10.0
_PAGE = 200


class _Noted(msgspec.Struct, frozen=True):
    connected_at: float
    disconnects: int
    is_offline: bool


_decoder = msgspec.json.Decoder(_Noted)


class WorkerLog:
    """`start` and `close` may be called twice. Events of its own engine are logged without `start`, too."""

    def __init__(self, engine: Engine, documents: DocumentStore, audit: AuditLog) -> None:
        self._engine = engine
        self._documents = documents
        self._audit = audit
        self._began = engine.now()
        self._noted: dict[WorkerId, _Noted] = {}
        self._absent: set[str] = set()
        self._running: asyncio.Task[None] | None = None
        self._is_look_pending = False
        self._timer: Timer | None = None
        self._is_started = False
        self._leave_bus = engine.bus.listen(self._on_event)

    def start(self) -> None:
        self._is_started = True
        self._wake()

    async def close(self) -> None:
        """Writes pending entries if the store accepts them."""
        self._leave_bus()
        self._is_started = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (running := self._running) is not None:
            await asyncio.wait((running,), timeout=_CLOSE_S)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, FleetEvent) and event.kind in ("online", "offline"):
            self._wake()

    def _wake(self) -> None:
        if self._running is not None:
            self._is_look_pending = True
        else:
            self._running = in_background(self._run(), name="workers in the audit log")

    def _fire(self) -> None:
        self._timer = None
        self._wake()

    async def _run(self) -> None:
        try:
            while True:
                self._is_look_pending = False
                await self.poll()
                if not self._is_look_pending:
                    break
        except Exception:
            log_failure(_WORKER_LOG, "cannot log worker changes in the audit log; will try again")
        finally:
            self._running = None
            if self._is_started and self._timer is None:
                clock = self._engine.clock
                self._timer = clock.call_at(clock.now() + LOOK_S, self._fire)

    async def poll(self) -> None:
        """Logs changes that no hub has logged yet."""
        for worker in await self._engine.workers(max_age_s=_MAX_AGE_S):
            if self._noted.get(worker.worker_id) != _state_of(worker):
                await self._compare(worker.worker_id)

    async def _compare(self, worker_id: WorkerId) -> None:
        while True:
            document = await self._documents.get(COLLECTION, worker_id)
            # Read after the document, so it is never older than the document.
            worker = await self._engine.reader.get_worker(worker_id)
            if worker is None:
                return
            now = _state_of(worker)
            before = self._unknown(worker) if document is None else _decoder.decode(document.body)
            version, body = 0 if document is None else document.version, msgspec.json.encode(now)
            if document is not None and before == now:
                break
            if await self._documents.put(COLLECTION, worker_id, body, version=version):
                for action in _between(before, now, was_lost=worker.was_lost):
                    self._audit.log_event(AuditEntry(0.0, "", Role.WORKER, action, worker_id, outcome="done"))
                break
        self._noted[worker_id] = now

    def _unknown(self, worker: WorkerRecord) -> _Noted:
        """For a worker older than this log: only its presence is logged, not its past disconnects."""
        is_new = worker.connected_at >= self._began - _RECENT_S
        return _Noted(0.0, 0 if is_new else worker.disconnects, True)

    async def clean_up(self) -> None:
        """Deletes the documents of workers that were missing in the store twice in a row."""
        there = {worker.worker_id for worker in await self._engine.reader.workers()}
        known = documents_in(self._documents, COLLECTION, size=_PAGE)
        absent = {each.name async for each in known if each.name not in there}
        for name in absent & self._absent:
            await self._documents.remove(COLLECTION, name)
            self._noted.pop(WorkerId(name), None)
        self._absent = absent - self._absent


def _state_of(worker: WorkerRecord) -> _Noted:
    return _Noted(worker.connected_at, worker.disconnects, worker.is_offline)


def _between(before: _Noted, now: _Noted, *, was_lost: bool) -> list[str]:
    """The events between two states, in order."""
    is_another = now.disconnects == before.disconnects and not (before.is_offline or now.is_offline)
    if is_another or now.disconnects < before.disconnects:
        # The worker was removed and registered as a new one.
        before = _Noted(0.0, 0, True)
    is_offline, still_to_go, actions = before.is_offline, now.disconnects - before.disconnects, list[str]()
    while still_to_go > 0 or is_offline != now.is_offline:
        is_offline = not is_offline
        still_to_go -= is_offline
        is_last = still_to_go <= 0
        departure = "worker_lost" if was_lost and is_last else "worker_left"
        actions.append(departure if is_offline else "worker_registered")
    return actions
