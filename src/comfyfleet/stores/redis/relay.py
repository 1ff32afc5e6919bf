"""What engines on this server say to each other: one channel, read on the connection that hears the hints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from comfyfleet.model.fact import Fact, FactKind, News, NewsKind, RunNote
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.stores.redis.codec import as_list
from comfyfleet.stores.redis.dispatches import as_bytes

CHANNEL = "channel:news"
HINTS = "channel:hub:events"
_KEEP_S = 3600
_NOTES_KEPT = 100
_WATCHED_S = 15


class _Run(msgspec.Struct, frozen=True):
    """What a worker without an engine did, as the library tells it."""

    event: str
    job_id: JobId
    worker_id: WorkerId
    lease: int
    round: int
    timestamp: float
    number: int = 0
    """Of a fact. News has none."""
    data: dict[str, Any] = {}


_run = msgspec.json.Decoder(_Run)


class RedisRelay:
    """`me` stands before each message, so that nobody hears himself. `call` is for what may be sent twice."""

    def __init__(self, call: Callable[..., Awaitable[object]], prefix: str, me: str) -> None:
        self._call = call
        self._prefix = prefix
        self._me = me.encode() + b" "
        self._hear: Callable[[bytes], None] | None = None
        self._hear_run: Callable[[Fact | News], None] | None = None

    def listen(self, hear: Callable[[bytes], None], hear_run: Callable[[Fact | News], None]) -> None:
        self._hear = hear
        self._hear_run = hear_run

    def heard(self, message: bytes) -> None:
        if self._hear is not None and not message.startswith(self._me):
            self._hear(message.partition(b" ")[2])

    def heard_run(self, message: bytes) -> None:
        if self._hear_run is None:
            return
        run = _run.decode(message)
        if run.number:
            kind = FactKind(run.event)
            self._hear_run(Fact(run.job_id, run.number, kind, run.timestamp, run.round, run.data or None))
        else:
            news = NewsKind(run.event)
            self._hear_run(News(run.job_id, news, run.timestamp, run.worker_id, run.lease, run.data))

    async def watch(self) -> None:
        await self._call("SET", self._prefix + "watched", "1", "EX", _WATCHED_S)

    async def say(self, message: bytes) -> None:
        await self._call("PUBLISH", self._prefix + CHANNEL, self._me + message)

    async def announce(self, message: bytes) -> None:
        await self._call("PUBLISH", self._prefix + HINTS, message)

    async def keep_progress(self, job_id: JobId, note: RunNote) -> None:
        if note.progress is not None:
            await self._call("SET", f"{self._prefix}job:{job_id}:progress", note.progress, "EX", _KEEP_S)
        stream = f"{self._prefix}progress:{job_id}"
        told = ["worker_id", note.worker_id or "", "timestamp", repr(note.at), "status", note.status]
        if note.percentage is not None:
            told += ["percentage", f"{note.percentage:g}"]
        if note.message is not None:
            told += ["message", note.message]
        await self._call(
            "XADD", stream, "MAXLEN", "~", _NOTES_KEPT, "*", "progress", note.progress or b"{}", *told
        )
        await self._call("EXPIRE", stream, _KEEP_S)

    async def kept_progress(self, job_ids: Sequence[JobId]) -> list[bytes | None]:
        if not job_ids:
            return []
        found = await self._call("MGET", *(f"{self._prefix}job:{job_id}:progress" for job_id in job_ids))
        return [None if text is None else as_bytes(text) for text in as_list(found)]
