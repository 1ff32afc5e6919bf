"""Workers that come, leave or are lost, in the audit log: once, whichever engine noticed.

What the log tells of a worker so far stands in a document of its own. Every hub compares it with the worker's record,
at once when its own engine tells of a change and otherwise every second, and of several hubs that find a difference the
one whose document stands enters it.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.audit import Audit
from comfyfleet.model.access import AuditEntry, Role
from comfyfleet.model.errors import ComfyFleetError
from comfyfleet.model.fact import Event, FleetEvent
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.ports import Cabinet, Timer
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

DRAWER = "audit_workers"
LOOK_S = 1.0
_MAX_AGE_S = 2.0
"""An engine reads the fleet as often by itself."""
_RECENT_S = 10.0
_CLOSE_S = 2.0
_PAGE = 200


class _Noted(msgspec.Struct, frozen=True):
    connected_at: float
    disconnects: int
    is_offline: bool


_decoder = msgspec.json.Decoder(_Noted)


class WorkerLog:
    """`start` and `close` are its life; both may be called twice. What its own engine tells it enters without them."""

    def __init__(self, engine: Engine, cabinet: Cabinet, audit: Audit) -> None:
        self._engine = engine
        self._cabinet = cabinet
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
            _LOG.warning("workers that came or went are entered in the audit log later: %s", error)
        except Exception:
            log_failure(_LOG, "workers that came or went could not be entered; the next look tries again")
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
            document = await self._cabinet.get(DRAWER, worker_id)
            # Read after the document, and so never older than what that tells of.
            worker = await self._engine.store.get_worker(worker_id)
            if worker is None:
                return
            now = _state_of(worker)
            before = self._unknown(worker) if document is None else _decoder.decode(document.body)
            version, body = 0 if document is None else document.version, msgspec.json.encode(now)
            if document is not None and before == now:
                break
            if await self._cabinet.put(DRAWER, worker_id, body, version=version):
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
        while page := await self._cabinet.listing(DRAWER, after, _PAGE):
            absent |= {each.name for each in page if each.name not in there}
            after = page[-1].name
        for name in absent & self._absent:
            await self._cabinet.remove(DRAWER, name)
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
