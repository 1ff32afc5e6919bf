"""A feed of events, encoded once, that any number of watchers read at their own pace.

A watcher is only a position in the feed, so a slow one costs no memory and delays nobody. The feed drops old
entries that may be lost; facts stay.

`FleetFeed` is the one of all events in the fleet: facts and progress of jobs with their metadata, and worker events. It
is best effort: a watcher that falls behind must read the lists again. Without watchers, nothing is read or encoded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.errors import Fault
from comfyfleet.model.fact import Event, Fact, FleetEvent, ProgressKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.recent import RecentDict
from comfyfleet.tracing import in_background, log_failure
from comfyfleet.wire.progress import EventsQuery, FleetBody, fleet_body

_ENCODER = msgspec.json.Encoder()

_PAUSE_S = 20e-6
"""Pause for each watcher between two wake-ups. A write costs about half of it, so a feed with a thousand
watchers is read at most every 20 ms and leaves half of the event loop to others."""


class FeedEntry:
    """One event with its SSE frame. `message` caches the WebSocket frame."""

    __slots__ = ("kind", "message", "number", "sse", "value")

    def __init__(self, kind: str, value: Any, number: int = 0) -> None:
        self.kind = kind
        self.value = value
        self.number = number
        """The number of a fact; 0 for an entry that may be lost."""
        head = f"id: {number}\nevent: {kind}\ndata: " if number else f"event: {kind}\ndata: "
        self.sse = head.encode() + _ENCODER.encode(value) + b"\n\n"
        self.message: bytes | None = None


class Feed:
    """`keep`: number of entries that may be lost but are kept for slow watchers."""

    def __init__(self, keep: int) -> None:
        self.head = 0
        """Position of the newest entry."""
        self.lost = 0
        """Position of the newest entry that was dropped."""
        self.is_over = False
        self._keep = keep
        self._entries: dict[int, FeedEntry] = {}
        self._losable: deque[int] = deque()
        self._newest: dict[str, int] = {}
        self._joined: dict[int, bytes] = {}
        self._watchers: dict[Callable[[], None], None] = {}
        self._is_waking = False
        self._quiet_until = 0.0

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def subscribe(self, wake: Callable[[], None]) -> None:
        """The feed calls `wake` when there may be more to read."""
        self._watchers[wake] = None

    def unsubscribe(self, wake: Callable[[], None]) -> None:
        self._watchers.pop(wake, None)

    def add(self, entry: FeedEntry, *, only_newest: bool = False) -> None:
        """`only_newest`: replaces the previous entry of the same kind."""
        self.head += 1
        if not entry.number:
            if only_newest:
                if (older := self._newest.get(entry.kind)) is not None:
                    del self._entries[older]
                self._newest[entry.kind] = self.head
            else:
                self._losable.append(self.head)
                if len(self._losable) > self._keep:
                    self.lost = self._losable.popleft()
                    del self._entries[self.lost]
        self._entries[self.head] = entry
        self._joined.clear()
        self.wake_watchers()

    def wake_watchers(self) -> None:
        """Wakes the watchers once for all entries of one loop iteration, or of the pause after it."""
        if not self._is_waking:
            self._is_waking = True
            loop = asyncio.get_running_loop()
            if (pause_s := self._quiet_until - loop.time()) > 0:
                loop.call_later(pause_s, self._wake)
            else:
                loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._is_waking = False
        self._quiet_until = asyncio.get_running_loop().time() + _PAUSE_S * len(self._watchers)
        for wake in self._watchers:
            wake()

    def after(self, position: int) -> list[FeedEntry]:
        """The kept entries after that position, oldest first."""
        found = []
        for number in reversed(self._entries):
            if number <= position:
                break
            found.append(self._entries[number])
        found.reverse()
        return found

    def joined(self, position: int) -> bytes:
        """The same as bytes, shared by all watchers at this position."""
        known = self._joined.get(position)
        if known is None:
            known = self._joined[position] = b"".join(entry.sse for entry in self.after(position))
        return known

    def end(self) -> None:
        self.is_over = True
        self.wake_watchers()

    def __iter__(self) -> Iterator[FeedEntry]:
        return iter(self._entries.values())


_LOG = logging.getLogger(__name__)

_KEEP = 1_000
_MAX_PENDING = 10_000
_MAX_LABELS = 10_000
_LABEL_S = 1.0
"""Longest wait for the metadata of a job; later events wait too."""

_Label = tuple[TenantId | None, dict[str, Any] | None]


class EventFilter:
    """Selects events for a watcher. `scope`: the only tenant it may see; workers belong to no tenant."""

    def __init__(self, query: EventsQuery, scope: TenantId | None) -> None:
        self._query = query
        self._scope = scope
        self._kinds = None if query.kind is None else frozenset(map(str.strip, query.kind.split(",")))

    def __call__(self, entry: FeedEntry) -> bool:
        event: FleetBody = entry.value
        query = self._query
        if self._scope is not None and event.tenant != self._scope:
            return False
        return (
            (self._kinds is None or event.kind in self._kinds)
            and all(event.job_id == each for each in (query.job, query.job_id) if each is not None)
            and all(event.worker_id == each for each in (query.worker, query.worker_id) if each is not None)
            and (query.tenant is None or event.tenant == query.tenant)
            and all(str((event.metadata or {}).get(name)) == value for name, value in query.metadata.items())
        )


class FleetFeed(Feed):
    def __init__(self, engine: Engine) -> None:
        super().__init__(_KEEP)
        self._engine = engine
        self._pending: deque[Event] = deque(maxlen=_MAX_PENDING)
        self._labels: RecentDict[JobId, _Label] = RecentDict(_MAX_LABELS)
        self._publishing: asyncio.Task[None] | None = None
        self._leave_bus: Callable[[], object] | None = None

    def subscribe(self, wake: Callable[[], None]) -> None:
        super().subscribe(wake)
        if self._leave_bus is None:
            leave_bus, leave_others = (
                self._engine.bus.listen(self._on_event),
                self._engine.listen_remote(self._on_event),
            )
            self._leave_bus = lambda: (leave_bus(), leave_others())

    def unsubscribe(self, wake: Callable[[], None]) -> None:
        super().unsubscribe(wake)
        if not self.watchers:
            self.close()

    def close(self) -> None:
        if self._leave_bus is not None:
            self._leave_bus()
            self._leave_bus = None
        if self._publishing is not None:
            self._publishing.cancel()
            self._publishing = None
        self._pending.clear()
        self._labels.clear()

    def _on_event(self, event: Event) -> None:
        # Previews of all jobs are too much; the stream of each job has them.
        if event.kind is not ProgressKind.PREVIEW:
            self._pending.append(event)
            if self._publishing is None:
                self._publishing = in_background(self._publish(), name="fleet events")

    async def _publish(self) -> None:
        try:
            while self._pending:
                event = self._pending.popleft()
                try:
                    body = await self._body(event)
                except Exception:
                    log_failure(_LOG, "cannot publish a fleet event: %s", event.kind)
                else:
                    self.add(FeedEntry(body.kind, body))
        finally:
            if self._publishing is asyncio.current_task():
                self._publishing = None

    async def _body(self, event: Event) -> FleetBody:
        if isinstance(event, FleetEvent):
            return fleet_body(event)
        tenant, metadata = await self._label(event.job_id)
        if isinstance(event, Fact) and event.kind.is_final:
            self._labels.pop(event.job_id, None)
        return fleet_body(event, tenant, metadata)

    async def _label(self, job_id: JobId) -> _Label:
        known = self._labels.get(job_id)
        if known is None:
            reader = self._engine.reader
            try:
                async with asyncio.timeout(_LABEL_S):
                    record = await reader.records.get(job_id)
            except (Fault, TimeoutError):
                # The tenant's database is away. The store knows the tenant, and other events must not wait.
                dispatch = await reader.load(job_id)
                return None if dispatch is None else dispatch.tenant, None
            known = (None, None) if record is None else (record.tenant, record.payload.metadata)
            self._labels[job_id] = known
        return known
