"""Exchanges events between engines on one store.

`PeerBus` announces which jobs are watched here; an engine that changes such a job sends its facts and
progress. It keeps the latest progress in the store, also for direct workers. `RemoteFactPoller` reads the
facts of watched jobs once a second and publishes new ones, because peer messages may be lost. `rechecks.py`
covers the rest."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from comfyfleet.engine.context import EngineContext, stop
from comfyfleet.engine.local_bus import REPLACEABLE
from comfyfleet.engine.rechecks import Rechecks
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.errors import Fault
from comfyfleet.model.fact import Event, Fact, FactKind, FleetEvent, ProgressEvent, ProgressKind, RunSnapshot
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.recent import RecentDict
from comfyfleet.ports import Bus, PeerChannel, Timer
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

_BATCH_SIZE = 256
"""Jobs that are read together, so that a pipelining store answers them at once."""


class RemoteFactPoller:
    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._followers: Counter[JobId] = Counter()
        self._published: dict[JobId, int] = {}
        self._timer: Timer | None = None
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False
        self._rechecks = Rechecks(context.clock, context.rules.recheck_s)
        self.is_forwarding = False
        """The bus is publishing an event of another engine."""
        self.on_followed: Callable[[JobId], None] = lambda _: None
        """Set by the peer bus: a job is followed here."""
        self.on_poll: Callable[[], Awaitable[None]] | None = None
        """Set by the peer bus: more work for each pass."""
        context.bus.listen(self._hear)

    @property
    def jobs(self) -> Collection[JobId]:
        return self._followers.keys()

    def forward(self, event: Fact | ProgressEvent) -> bool:
        """Publishes another engine's event here if somebody follows the job. Facts keep their order."""
        last = self._published.get(event.job_id)
        if last is None:
            return False
        if isinstance(event, ProgressEvent) or event.number == last + 1:
            self._publish(event)
        elif event.number > last and self._running is None:
            # A fact is missing; read them all now.
            if self._timer is not None:
                self._timer.cancel()
            self._fire()
        return True

    def _publish(self, event: Fact | ProgressEvent) -> None:
        self.is_forwarding = True
        try:
            self._context.bus.publish(event)
        finally:
            self.is_forwarding = False

    @contextmanager
    def follow(
        self, job_id: JobId, after: int = 0, recheck: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Publishes the job's later facts here, whichever engine writes them. `recheck` runs every few seconds
        and reads the job from the store."""
        with self._rechecks.calling(recheck), self._following(job_id, after):
            yield

    @contextmanager
    def _following(self, job_id: JobId, after: int) -> Iterator[None]:
        if not self._context.store.is_shared:
            yield
            return
        self._followers[job_id] += 1
        self._published.setdefault(job_id, after)
        if self._followers[job_id] == 1:
            self.on_followed(job_id)
        self._arm()
        try:
            yield
        finally:
            self._followers[job_id] -= 1
            if not self._followers[job_id]:
                del self._followers[job_id], self._published[job_id]

    def _hear(self, event: Event) -> None:
        if isinstance(event, Fact) and event.job_id in self._published:
            self._published[event.job_id] = max(self._published[event.job_id], event.number)

    def _arm(self) -> None:
        if self._timer is None and self._running is None and not self._is_closed:
            clock = self._context.clock
            self._timer = clock.call_at(clock.now() + self._context.rules.round_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._followers and not self._is_closed:
            self._running = in_background(self._look(), name="follow")

    async def _look(self) -> None:
        try:
            jobs = list(self._followers)
            for start in range(0, len(jobs), _BATCH_SIZE):
                await asyncio.gather(*map(self._look_at, jobs[start : start + _BATCH_SIZE]))
            if self.on_poll is not None:
                await self.on_poll()
        except Exception:
            log_failure(_LOG, "could not read the followed jobs; the next pass tries again")
        finally:
            self._running = None
            if self._followers:
                self._arm()

    async def _look_at(self, job_id: JobId) -> None:
        try:
            facts = await self._context.store.facts(job_id, self._published.get(job_id, 0))
        except Fault as fault:
            # A job that cannot be read, such as without its tenant's key, must not hide the others.
            _LOG.info("could not read the facts of job %s; the next pass tries again: %s", job_id, fault)
            return
        for fact in facts:
            if fact.number > self._published.get(job_id, fact.number):
                self._publish(fact)

    async def close(self) -> None:
        self._is_closed = True
        self._rechecks.close()
        await stop(self._timer, self._running)


_MAX_JOBS = 20_000
_STARTS_ANEW = frozenset(
    {
        FactKind.QUEUED,
        FactKind.LEASED,
        FactKind.RETRYING,
        FactKind.RELEASED,
        FactKind.PAUSED,
        FactKind.COMPLETED,
        FactKind.FAILED,
        FactKind.CANCELLED,
    }
)


class LatestProgress:
    """Keeps the latest progress of each running job in memory, for new watchers."""

    def __init__(self, bus: Bus) -> None:
        self._known: RecentDict[JobId, ProgressEvent] = RecentDict(_MAX_JOBS)
        bus.listen(self._hear)

    def of(self, job_id: JobId) -> ProgressEvent | None:
        return self._known.get(job_id)

    def _hear(self, event: Event) -> None:
        if isinstance(event, ProgressEvent):
            if event.kind is ProgressKind.PROGRESS:
                self._known[event.job_id] = event
        elif isinstance(event, Fact) and event.kind in _STARTS_ANEW:
            self._known.pop(event.job_id, None)


_REPEAT_S = 5.0
_WANTED_S = 15.0
_KEEP_EVERY_S = 1.0
_MAX_WANTED = 100_000
_MAX_PENDING = 10_000
_MESSAGE_JOBS = 1_000
_MAX_IMAGE_BYTES = 1024 * 1024

_STATUSES = {
    FactKind.COMPLETED: "completed",
    FactKind.FAILED: "failed",
    FactKind.CANCELLED: "cancelled",
    FactKind.RETRYING: "pending",
    FactKind.RELEASED: "pending",
    FactKind.PAUSED: "pending",
}
"""The status that the run snapshot gets at its end."""
_DECIDED = frozenset({FactKind.FAILED, FactKind.RETRYING})
"""These also end runs of direct workers, which this engine did not see."""


_PRIVATE_FIELD = "message"
"""A failure message may quote the job, and every worker reads the announcements."""


class _Wants(msgspec.Struct, frozen=True, tag="wants"):
    jobs: list[JobId]
    everything: bool = False


class _Events(msgspec.Struct, frozen=True, tag="told", omit_defaults=True):
    facts: list[Fact] = []
    events: list[ProgressEvent] = msgspec.field(default_factory=list, name="news")
    fleet: list[FleetEvent] = []


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Wants | _Events] = msgspec.msgpack.Decoder(_Wants | _Events)
_kept_decoder = msgspec.json.Decoder(dict[str, Any])


async def _in_order(peer_channel: PeerChannel, job_id: JobId, notes: list[RunSnapshot]) -> None:
    for note in notes:
        await peer_channel.save_progress(job_id, note)


class PeerBus:
    def __init__(self, context: EngineContext, fact_poller: RemoteFactPoller, newest: LatestProgress) -> None:
        self._context = context
        self._fact_poller = fact_poller
        self._newest = newest
        self._peer_channel: PeerChannel | None = context.store.peer_channel
        self._listeners: dict[Callable[[Event], None], None] = {}
        self._wanted: dict[JobId, float] = {}
        self._everything_until = float("-inf")
        self._pending: RecentDict[object, Event] = RecentDict(_MAX_PENDING)
        self._count = 0
        self._asked: dict[JobId, None] = {}
        self._is_asking_all = False
        self._kept_at: RecentDict[JobId, float] = RecentDict(_MAX_PENDING)
        self._workers: RecentDict[JobId, WorkerId | None] = RecentDict(_MAX_PENDING)
        """The workers of runs that this engine has recorded."""
        self._to_keep: dict[JobId, list[RunSnapshot]] = {}
        self._announced: list[FleetEvent] = []
        self._seen: dict[JobId, bytes] = {}
        self._sending: asyncio.Task[None] | None = None
        self._timer: Timer | None = None
        self._is_closed = False
        if self._peer_channel is not None:
            context.bus.listen(self._hear)
            fact_poller.on_followed = self._ask
            fact_poller.on_poll = self._look

    def start(self) -> None:
        if self._peer_channel is not None:
            self._peer_channel.listen(self._on_message, self._pass_on)

    async def close(self) -> None:
        self._is_closed = True
        await stop(self._timer, self._sending)

    def listen_remote(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Listens, best effort, to events of other engines' jobs that nobody follows here. Returns the function
        that ends it."""
        self._listeners[listener] = None
        self._is_asking_all = True
        self._send()
        self._arm()
        return lambda: self._listeners.pop(listener, None)

    async def latest_progress(self, dispatch: Dispatch) -> ProgressEvent | None:
        """The last progress of the job's current lease, from memory or from the store."""
        lease = dispatch.lease
        if lease is None:
            return None
        progress_event = self._newest.of(dispatch.job_id)
        if progress_event is None and self._peer_channel is not None:
            (kept,) = await self._peer_channel.load_progress([dispatch.job_id])
            progress_event = None if kept is None else self._read(dispatch.job_id, kept)
        return (
            progress_event
            if progress_event is not None and progress_event.lease_number in (0, lease.number)
            else None
        )

    # sending

    def _hear(self, event: Event) -> None:
        if self._fact_poller.is_forwarding:
            return
        now = self._context.clock.monotonic()
        if isinstance(event, FleetEvent):
            self._announced.append(event)
            del self._announced[:-_MAX_PENDING]
            self._send()
            if now < self._everything_until:
                self._put(event)
            return
        if isinstance(event, Fact):
            self._note_end(event)
        elif event.kind is ProgressKind.STARTED:
            self._note(event.job_id, RunSnapshot("started", event.at, event.worker_id))
        elif event.kind is ProgressKind.PROGRESS:
            self._keep(event, now)
        if now < self._everything_until or now < self._wanted.get(event.job_id, now):
            self._put(event)

    def _put(self, event: Event) -> None:
        key: object
        if isinstance(event, ProgressEvent) and event.kind in REPLACEABLE:
            if event.image is not None and len(event.image) > _MAX_IMAGE_BYTES:
                return
            key = (event.job_id, event.kind)
        else:
            self._count += 1
            key = self._count
        self._pending[key] = event
        self._send()

    def _keep(self, progress_event: ProgressEvent, now: float) -> None:
        if now - self._kept_at.get(progress_event.job_id, 0.0) >= _KEEP_EVERY_S:
            self._kept_at[progress_event.job_id] = now
            known = {
                "at": progress_event.at,
                "worker_id": progress_event.worker_id,
                "lease": progress_event.lease_number,
            }
            progress = msgspec.json.encode({**progress_event.data, **known})
            percentage, message = progress_event.data.get("percentage"), progress_event.data.get("message")
            note = RunSnapshot(
                "assigned",
                progress_event.at,
                progress_event.worker_id,
                progress,
                percentage if isinstance(percentage, int | float) else None,
                message if isinstance(message, str) else None,
            )
            self._note(progress_event.job_id, note)

    def _note(self, job_id: JobId, note: RunSnapshot) -> None:
        self._workers[job_id] = note.worker_id
        self._to_keep.setdefault(job_id, []).append(note)
        self._send()

    def _note_end(self, fact: Fact) -> None:
        status = _STATUSES.get(fact.kind)
        if status is None or not (fact.job_id in self._workers or fact.kind in _DECIDED):
            return
        worker_id = (fact.data or {}).get("worker_id") or self._workers.get(fact.job_id)
        self._note(fact.job_id, RunSnapshot(status, fact.at, worker_id))
        del self._workers[fact.job_id]

    def _ask(self, job_id: JobId) -> None:
        self._asked[job_id] = None
        self._send()
        self._arm()

    def _send(self) -> None:
        if self._peer_channel is not None and self._sending is None and not self._is_closed:
            self._sending = in_background(self._run(self._peer_channel), name="peer bus")

    async def _run(self, peer_channel: PeerChannel) -> None:
        """Gathers the next messages while the last ones are on their way."""
        try:
            while self._pending or self._asked or self._is_asking_all or self._to_keep or self._announced:
                await asyncio.gather(*self._messages(peer_channel))
        except Fault as fault:
            _LOG.info("other engines get the events of this one only later: %s", fault)
        except Exception:
            log_failure(_LOG, "could not send the events of this engine to the others")
        finally:
            self._sending = None

    def _messages(self, peer_channel: PeerChannel) -> Iterable[Any]:
        asked, self._asked = list(self._asked), {}
        is_all, self._is_asking_all = self._is_asking_all and bool(self._listeners), False
        pending, self._pending = self._pending.values(), RecentDict(_MAX_PENDING)
        keep, self._to_keep = self._to_keep, {}
        if asked or is_all:
            yield peer_channel.watch()
        for start in range(0, max(len(asked), is_all), _MESSAGE_JOBS):
            yield peer_channel.publish(_encoder.encode(_Wants(asked[start : start + _MESSAGE_JOBS], is_all)))
        if pending:
            yield peer_channel.publish(
                _encoder.encode(
                    _Events(
                        [event for event in pending if isinstance(event, Fact)],
                        [event for event in pending if isinstance(event, ProgressEvent)],
                        [event for event in pending if isinstance(event, FleetEvent)],
                    )
                )
            )
        announced, self._announced = self._announced, []
        for event in announced:
            announcement = {
                "event": event.kind,
                "worker_id": event.worker_id,
                "timestamp": event.at,
                "data": {name: value for name, value in event.data.items() if name != _PRIVATE_FIELD},
            }
            yield peer_channel.announce(msgspec.json.encode(announcement))
        for job_id, notes in keep.items():
            yield _in_order(peer_channel, job_id, notes)

    def _arm(self) -> None:
        if self._timer is None and self._peer_channel is not None and not self._is_closed:
            clock = self._context.clock
            self._timer = clock.call_at(clock.now() + _REPEAT_S, self._repeat)

    def _repeat(self) -> None:
        self._timer = None
        self._asked |= dict.fromkeys(self._fact_poller.jobs)
        self._is_asking_all = bool(self._listeners)
        if self._asked or self._is_asking_all:
            self._send()
            self._arm()

    # receiving

    def _on_message(self, message: bytes) -> None:
        try:
            received = _decoder.decode(message)
        except (msgspec.DecodeError, UnicodeDecodeError):
            # From a newer version. The poller finds the facts.
            return
        if isinstance(received, _Wants):
            self._note_wanted(received)
            return
        for fact in received.facts:
            self._pass_on(fact)
        for progress_event in received.events:
            self._pass_on(progress_event)
        for event in received.fleet:
            self._tell(event)

    def _pass_on(self, event: Fact | ProgressEvent) -> None:
        if not self._fact_poller.forward(event):
            self._tell(event)

    def _note_wanted(self, received: _Wants) -> None:
        now = self._context.clock.monotonic()
        if received.everything:
            self._everything_until = now + _WANTED_S
        for job_id in received.jobs:
            is_new = now >= self._wanted.get(job_id, now)
            self._wanted.pop(job_id, None)
            self._wanted[job_id] = now + _WANTED_S
            if is_new and (progress_event := self._newest.of(job_id)) is not None:
                self._put(progress_event)
        while self._wanted and (
            len(self._wanted) > _MAX_WANTED or self._wanted[next(iter(self._wanted))] <= now
        ):
            del self._wanted[next(iter(self._wanted))]

    def _tell(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(event)

    async def _look(self) -> None:
        """Reads progress of direct workers, and progress that was sent while nobody listened."""
        assert self._peer_channel is not None
        jobs = list(self._fact_poller.jobs)
        for gone in self._seen.keys() - set(jobs):
            del self._seen[gone]
        for start in range(0, len(jobs), _MESSAGE_JOBS):
            some = jobs[start : start + _MESSAGE_JOBS]
            for job_id, kept in zip(some, await self._peer_channel.load_progress(some), strict=True):
                if kept is None or self._seen.get(job_id) == kept:
                    continue
                self._seen[job_id] = kept
                progress_event, known = self._read(job_id, kept), self._newest.of(job_id)
                if progress_event is not None and (known is None or known.at < progress_event.at):
                    self._fact_poller.forward(progress_event)

    def _read(self, job_id: JobId, kept: bytes) -> ProgressEvent | None:
        try:
            data = _kept_decoder.decode(kept)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        at, lease, worker_id = data.pop("at", None), data.pop("lease", 0), data.pop("worker_id", None)
        return ProgressEvent(
            job_id,
            ProgressKind.PROGRESS,
            float(at) if isinstance(at, int | float) else self._context.clock.now(),
            WorkerId(worker_id) if isinstance(worker_id, str) else None,
            lease if isinstance(lease, int) else 0,
            data,
        )
