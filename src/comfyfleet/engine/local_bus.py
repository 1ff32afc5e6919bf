"""The bus inside one process: it calls listeners at once and gives each subscription a bounded buffer.

A slow watcher loses progress, never facts, and slows nobody down."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from comfyfleet.model.fact import Event, Fact, ProgressEvent, ProgressKind
from comfyfleet.model.ids import JobId

_LOG = logging.getLogger(__name__)

# Only the newest of these matters to a slow watcher.
REPLACEABLE = frozenset({ProgressKind.PROGRESS, ProgressKind.PREVIEW})
MAX_PENDING_NEWS = 256


class LocalSubscription:
    def __init__(self, leave: Callable[[LocalSubscription], object]) -> None:
        self._leave = leave
        self._pending: OrderedDict[int, Event] = OrderedDict()
        self._progress: OrderedDict[int, None] = OrderedDict()
        self._newest: dict[tuple[JobId, ProgressKind], int] = {}
        self._offered = 0
        self._arrived = asyncio.Event()
        self._is_closed = False

    def offer(self, event: Event) -> None:
        """Constant cost, so that a slow watcher does not slow the others down."""
        self._offered += 1
        if isinstance(event, ProgressEvent):
            if event.kind in REPLACEABLE:
                older = self._newest.get((event.job_id, event.kind))
                if older is not None:
                    self._take(older)
                self._newest[event.job_id, event.kind] = self._offered
            if len(self._progress) >= MAX_PENDING_NEWS:
                self._take(next(iter(self._progress)))
            self._progress[self._offered] = None
        self._pending[self._offered] = event
        self._arrived.set()

    def _take(self, number: int) -> Event:
        event = self._pending.pop(number)
        if isinstance(event, ProgressEvent):
            del self._progress[number]
            if event.kind in REPLACEABLE:
                del self._newest[event.job_id, event.kind]
        return event

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            while self._pending:
                yield self._take(next(iter(self._pending)))
            if self._is_closed:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def close(self) -> None:
        self._is_closed = True
        self._arrived.set()
        self._leave(self)


class LocalBus:
    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []
        self._everything: dict[LocalSubscription, None] = {}
        self._by_job: dict[JobId, dict[LocalSubscription, None]] = {}
        self._is_closed = False

    def publish(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                # A failing listener must not stop the publication.
                _LOG.exception("a listener failed on %s", type(event).__name__)
        for subscription in tuple(self._everything):
            subscription.offer(event)
        if isinstance(event, Fact | ProgressEvent):
            for subscription in tuple(self._by_job.get(event.job_id, ())):
                subscription.offer(event)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        self._listeners.append(listener)

        def leave() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return leave

    def subscribe(self, job_id: JobId | None = None) -> LocalSubscription:
        if job_id is None:
            subscription = LocalSubscription(lambda gone: self._everything.pop(gone, None))
            self._everything[subscription] = None
        else:
            subscription = LocalSubscription(lambda gone: self._leave_job(job_id, gone))
            self._by_job.setdefault(job_id, {})[subscription] = None
        if self._is_closed:
            subscription.close()
        return subscription

    def close(self) -> None:
        """Ends present and later subscriptions after they have delivered their events."""
        self._is_closed = True
        watchers = [self._everything, *self._by_job.values()]
        for subscription in [each for some in watchers for each in some]:
            subscription.close()

    def _leave_job(self, job_id: JobId, subscription: LocalSubscription) -> None:
        watchers = self._by_job.get(job_id, {})
        watchers.pop(subscription, None)
        if not watchers:
            self._by_job.pop(job_id, None)
