"""Server-Sent Events: one job's stream, resumed by `Last-Event-ID`, and the fleet's.

What is said comes from the feeds (`job_channels.py`, `fleet_feed.py`), encoded once; here each watcher takes
what it has not seen, all of it in one write. A comment keeps an idle connection open; one that takes nothing
for a minute is closed, and comes back with the number it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.http.credentials import check_sees, no_job
from comfyfleet.hub.http.limits import ClientDisconnected, ConnectionLimits
from comfyfleet.hub.http.pipeline import Handler, HubRequest, Reply
from comfyfleet.hub.streams.feed import Feed, FeedEntry
from comfyfleet.hub.streams.fleet_feed import EventFilter, FleetFeed
from comfyfleet.hub.streams.job_channels import JobChannels, progress_of
from comfyfleet.model.access import Caller
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.wire.progress import EventsQuery, StreamQuery

CONTENT_TYPE = "text/event-stream"
_BEGIN = b"retry: 1000\n\n"
_BEAT = b":\n\n"
_HEADERS = {"content-type": CONTENT_TYPE, "cache-control": "no-store", "x-accel-buffering": "no"}


class Watcher:
    """One connection: its place in a feed, and whether it waits or is being written to."""

    def __init__(self, feed: Feed, first: bytes, wanted: Callable[[FeedEntry], bool] | None = None) -> None:
        self._feed = feed
        self._first = _BEGIN + first
        self._place = feed.head
        self._wanted = wanted
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self._is_beat_due = False
        self.task: asyncio.Task[Any] | None = None
        self.is_writing = False
        self.is_dropped = False
        self.ticks = 0
        """Since it last took anything."""

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def beat(self) -> None:
        self._is_beat_due = True
        self.wake()

    def close(self) -> None:
        self._is_closed = True
        self.wake()

    def end(self) -> None:
        self.close()
        if self.is_writing:
            # It reads so slowly that it would not see the end in time.
            self.drop()

    def drop(self) -> None:
        """It takes nothing: what is being written to it is given up."""
        if self.task is not None:
            self.is_dropped = True
            self.task.cancel()

    async def next(self) -> bytes | None:
        """Everything that is new, or None when there will be nothing more."""
        if self._first:
            first, self._first = self._first, b""
            return first
        while not self._is_closed:
            if chunk := self._unread():
                return chunk
            if self._feed.is_over:
                return None
            if self._is_beat_due:
                self._is_beat_due = False
                return _BEAT
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return None

    def _unread(self) -> bytes:
        feed, place = self._feed, self._place
        if feed.head == place:
            return b""
        self._place = feed.head
        if self._wanted is None:
            return feed.joined(place)
        chunk = b"".join(entry.sse for entry in feed.after(place) if self._wanted(entry))
        if feed.lost > place:
            return FeedEntry("resync", {"reason": "too slow: events were left out"}).sse + chunk
        return chunk


class EventStream(Response):
    def __init__(self, watcher: Watcher, leave: Callable[[], None]) -> None:
        super().__init__(status_code=200, headers=_HEADERS)
        del self.headers["content-length"]
        self._watcher = watcher
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = self._watcher
        watcher.task = asyncio.current_task()
        hung_up = asyncio.ensure_future(_until_hung_up(receive))
        hung_up.add_done_callback(lambda _: watcher.close())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while (chunk := await watcher.next()) is not None:
                watcher.is_writing = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                watcher.is_writing, watcher.ticks = False, 0
            await send({"type": "http.response.body", "body": b""})
        except asyncio.CancelledError:
            if watcher.is_dropped:
                raise ClientDisconnected from None
            raise
        finally:
            self._leave()
            hung_up.cancel()
            await asyncio.wait({hung_up})


class StreamHandlers:
    """`beat_s`: how often an idle stream says that it lives. One that takes nothing for `stalled_beats` is closed."""

    def __init__(
        self,
        engine: Engine,
        rooms: JobChannels,
        fleet: FleetFeed,
        places: ConnectionLimits,
        beat_s: float = 15.0,
        stalled_beats: int = 4,
    ) -> None:
        self._engine = engine
        self._rooms = rooms
        self._fleet = fleet
        self._places = places
        self._beat_s = beat_s
        self._stalled_beats = stalled_beats
        self._watchers: dict[Watcher, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def bound(self) -> dict[str, Handler]:
        return {"watch_job": self.watch, "job_progress": self.progress, "events": self.events}

    def close(self) -> None:
        """Every stream ends, so that no watcher keeps the server from ending."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for watcher in list(self._watchers):
            watcher.end()

    # one job

    async def watch(self, call: HubRequest[StreamQuery]) -> Reply | Response:
        accept = call.headers.get("accept", "")
        if "application/json" in accept and CONTENT_TYPE not in accept:
            return await self._record(call)
        return await self._stream(call)

    async def progress(self, call: HubRequest[StreamQuery]) -> Reply | Response:
        if CONTENT_TYPE in call.headers.get("accept", ""):
            return await self._stream(call)
        return await self._record(call)

    async def _record(self, call: HubRequest[StreamQuery]) -> Reply:
        job_id = JobId(call.parameters["job_id"])
        _after(call.headers, call.given)
        dispatch = await self._engine.store.load(job_id)
        if dispatch is None or not call.caller.sees(dispatch.tenant):
            raise no_job(job_id)
        record = await self._engine.store.records.get(job_id)
        if record is None:
            raise no_job(job_id)
        standing = await progress_of(self._engine, dispatch, record)
        return Reply(200, standing.body(self._engine.now()))

    async def _stream(self, call: HubRequest[StreamQuery]) -> Reply | Response:
        job_id, after = JobId(call.parameters["job_id"]), _after(call.headers, call.given)
        self._check_open()
        watcher: Watcher | None = None

        def wake() -> None:
            if watcher is not None:
                watcher.wake()

        with ExitStack() as staying:
            place = staying.enter_context(self._places.held("stream", call.caller.key_id, call.address))
            await check_sees(call.caller, self._engine.store, job_id)
            room = await self._rooms.enter(job_id, wake)
            staying.callback(self._rooms.leave, room, wake)
            if room.is_over and after >= room.told:
                # Nothing is left to say; a browser that gets this does not ask again.
                return Reply(204)
            watcher = Watcher(room, room.first(min(after, room.told)))
            place.end = watcher.end
            return self._watched(watcher, staying.pop_all().close)

    # the fleet

    async def events(self, call: HubRequest[EventsQuery]) -> Reply | Response:
        self._check_open()
        wanted = EventFilter(call.given, _scope(call.caller, call.given))
        watcher = Watcher(
            self._fleet, FeedEntry("resync", {"reason": "begin: read the lists first"}).sse, wanted
        )
        with ExitStack() as staying:
            place = staying.enter_context(self._places.held("stream", call.caller.key_id, call.address))
            place.end = watcher.end
            self._fleet.join(watcher.wake)
            staying.callback(self._fleet.leave, watcher.wake)
            return self._watched(watcher, staying.pop_all().close)

    # all of them

    def _check_open(self) -> None:
        if self._is_closed:
            raise Refusal(RefusalCode.UNAVAILABLE, "the hub is stopping; try again")

    def _watched(self, watcher: Watcher, leave: Callable[[], None]) -> EventStream:
        self._watchers[watcher] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._tick)

        def left() -> None:
            self._watchers.pop(watcher, None)
            leave()

        return EventStream(watcher, left)

    def _tick(self) -> None:
        self._timer = None
        for watcher in self._watchers:
            watcher.ticks += 1
            if not watcher.is_writing:
                watcher.beat()
            elif watcher.ticks > self._stalled_beats:
                watcher.drop()
        if self._watchers:
            self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._tick)


def _scope(caller: Caller, query: EventsQuery) -> TenantId | None:
    """A key of one tenant hears of its jobs alone, whatever it asks for."""
    if query.tenant is not None and not caller.sees(TenantId(query.tenant)):
        raise Refusal(RefusalCode.NOT_ALLOWED, f"this key does not see the tenant {query.tenant!r}")
    return caller.scope


def _after(headers: Mapping[str, str], query: StreamQuery) -> int:
    text = headers.get("last-event-id", "").strip()
    if not text:
        return query.last_event_id
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"Last-Event-ID {text!r} is not the number of an event")
    return int(text)


async def _until_hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
