"""Server-Sent Events of one job, which `Last-Event-ID` resumes, and of the fleet.

`job_channels.py` and `fleet_feed.py` encode each event once; here each watcher gets what it has not seen in
one write. A comment keeps an idle connection open. A connection that reads nothing for a minute is closed and
can resume.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.job_operations import no_job
from comfyfleet.hub.http.credentials import check_sees, visible_job
from comfyfleet.hub.http.limits import ClientDisconnected, ConnectionLimits
from comfyfleet.hub.http.pipeline import HubRequest, Reply, until_disconnected
from comfyfleet.hub.streams.feed import EventFilter, Feed, FeedEntry, FleetFeed
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
    """One connection and its position in a feed."""

    def __init__(self, feed: Feed, first: bytes, wanted: Callable[[FeedEntry], bool] | None = None) -> None:
        self._feed = feed
        self._first = _BEGIN + first
        self._position = feed.head
        self._wanted = wanted
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self._is_beat_due = False
        self.task: asyncio.Task[Any] | None = None
        self.is_writing = False
        self.is_dropped = False
        self.ticks = 0
        """Since its last successful write."""

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def keep_alive(self) -> None:
        self._is_beat_due = True
        self.wake()

    def close(self) -> None:
        self._is_closed = True
        self.wake()

    def end(self) -> None:
        self.close()
        if self.is_writing:
            # A slow reader would not see the end in time.
            self.drop()

    def drop(self) -> None:
        """Cancels a write that makes no progress."""
        if self.task is not None:
            self.is_dropped = True
            self.task.cancel()

    async def next(self) -> bytes | None:
        """All new data, or None at the end."""
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
        feed, position = self._feed, self._position
        if feed.head == position:
            return b""
        self._position = feed.head
        if self._wanted is None:
            return feed.joined(position)
        chunk = b"".join(entry.sse for entry in feed.after(position) if self._wanted(entry))
        if feed.lost > position:
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
        disconnected = asyncio.ensure_future(until_disconnected(receive))
        disconnected.add_done_callback(lambda _: watcher.close())
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
            disconnected.cancel()
            await asyncio.wait({disconnected})


_STALLED_BEATS = 4


class StreamHandlers:
    """An idle stream sends a comment every `beat_s`. A write that stalls for `_STALLED_BEATS` is ended."""

    def __init__(
        self,
        engine: Engine,
        channels: JobChannels,
        fleet: FleetFeed,
        connection_limits: ConnectionLimits,
        beat_s: float = 15.0,
    ) -> None:
        self._engine = engine
        self._channels = channels
        self._fleet = fleet
        self._connection_limits = connection_limits
        self._beat_s = beat_s
        self._watchers: dict[Watcher, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def close(self) -> None:
        """Ends every stream, so that the server can end."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for watcher in list(self._watchers):
            watcher.end()

    async def watch_job(self, call: HubRequest[StreamQuery]) -> Reply | Response:
        accept = call.headers.get("accept", "")
        if "application/json" in accept and CONTENT_TYPE not in accept:
            return await self._record(call)
        return await self._stream(call)

    async def job_progress(self, call: HubRequest[StreamQuery]) -> Reply | Response:
        if CONTENT_TYPE in call.headers.get("accept", ""):
            return await self._stream(call)
        return await self._record(call)

    async def _record(self, call: HubRequest[StreamQuery]) -> Reply:
        job_id = JobId(call.parameters["job_id"])
        _after(call.headers, call.data)
        dispatch = await visible_job(call.caller, self._engine, job_id)
        record = await self._engine.reader.records.get(job_id)
        if record is None:
            raise no_job(job_id)
        progress = await progress_of(self._engine, dispatch, record)
        return Reply(200, progress.body(self._engine.now()))

    async def _stream(self, call: HubRequest[StreamQuery]) -> Reply | Response:
        job_id, after = JobId(call.parameters["job_id"]), _after(call.headers, call.data)
        self._check_open()
        watcher: Watcher | None = None

        def wake() -> None:
            if watcher is not None:
                watcher.wake()

        with ExitStack() as cleanup:
            slot = cleanup.enter_context(
                self._connection_limits.held("stream", call.caller.key_id, call.address)
            )
            await check_sees(call.caller, self._engine, job_id)
            channel = await self._channels.subscribe(job_id, wake)
            cleanup.callback(self._channels.unsubscribe, channel, wake)
            if channel.is_over and after >= channel.last_published:
                # Everything was sent. A browser does not reconnect after 204.
                return Reply(204)
            watcher = Watcher(channel, channel.first(min(after, channel.last_published)))
            slot.end = watcher.end
            return self._watched(watcher, cleanup.pop_all().close)

    async def events(self, call: HubRequest[EventsQuery]) -> Reply | Response:
        self._check_open()
        wanted = EventFilter(call.data, _scope(call.caller, call.data))
        watcher = Watcher(
            self._fleet, FeedEntry("resync", {"reason": "begin: read the lists first"}).sse, wanted
        )
        with ExitStack() as cleanup:
            slot = cleanup.enter_context(
                self._connection_limits.held("stream", call.caller.key_id, call.address)
            )
            slot.end = watcher.end
            self._fleet.subscribe(watcher.wake)
            cleanup.callback(self._fleet.unsubscribe, watcher.wake)
            return self._watched(watcher, cleanup.pop_all().close)

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
                watcher.keep_alive()
            elif watcher.ticks > _STALLED_BEATS:
                watcher.drop()
        if self._watchers:
            self._timer = asyncio.get_running_loop().call_later(self._beat_s, self._tick)


def _scope(caller: Caller, query: EventsQuery) -> TenantId | None:
    """A key of one tenant sees only the jobs of that tenant."""
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
