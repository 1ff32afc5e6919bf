"""Hints from other processes, and messages between engines, on one subscription with its own connection.

A lost hint costs a moment, never a job. The channel determines what a message means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from comfyfleet.model.calls import Action, Command
from comfyfleet.model.fact import Fact, FactKind, ProgressEvent, ProgressKind, RunSnapshot
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.stores.redis.address import RedisAddress
from comfyfleet.stores.redis.codec import as_list
from comfyfleet.stores.redis.dispatches import as_bytes

PEER_CHANNEL = "channel:news"
EVENT_CHANNEL = "channel:hub:events"
COMMANDS = "channel:workers:all"
_KEEP_S = 3600
_NOTES_KEPT = 100
_WATCHED_S = 15


class _Run(msgspec.Struct, frozen=True):
    """An action of a direct worker, as the library publishes it."""

    event: str
    job_id: JobId
    worker_id: WorkerId
    lease: int
    round: int
    timestamp: float
    number: int = 0
    """Facts are numbered; progress has 0."""
    data: dict[str, Any] = {}


_run = msgspec.json.Decoder(_Run)


class RedisPeerChannel:
    """`me` precedes each message, so that the sender ignores it. `call` may repeat commands."""

    def __init__(self, call: Callable[..., Awaitable[object]], prefix: str, me: str) -> None:
        self._call = call
        self._prefix = prefix
        self._me = me.encode() + b" "
        self._hear: Callable[[bytes], None] | None = None
        self._hear_run: Callable[[Fact | ProgressEvent], None] | None = None

    def listen(
        self, on_message: Callable[[bytes], None], on_run_event: Callable[[Fact | ProgressEvent], None]
    ) -> None:
        self._hear = on_message
        self._hear_run = on_run_event

    def handle_message(self, message: bytes) -> None:
        if self._hear is not None and not message.startswith(self._me):
            self._hear(message.partition(b" ")[2])

    def handle_run_message(self, message: bytes) -> None:
        if self._hear_run is None:
            return
        run = _run.decode(message)
        if run.number:
            kind = FactKind(run.event)
            self._hear_run(Fact(run.job_id, run.number, kind, run.timestamp, run.round, run.data or None))
        else:
            progress = ProgressKind(run.event)
            self._hear_run(
                ProgressEvent(run.job_id, progress, run.timestamp, run.worker_id, run.lease, run.data)
            )

    async def watch(self) -> None:
        await self._call("SET", self._prefix + "watched", "1", "EX", _WATCHED_S)

    async def publish(self, message: bytes) -> None:
        await self._call("PUBLISH", self._prefix + PEER_CHANNEL, self._me + message)

    async def announce(self, message: bytes) -> None:
        await self._call("PUBLISH", self._prefix + EVENT_CHANNEL, message)

    async def save_progress(self, job_id: JobId, snapshot: RunSnapshot) -> None:
        if snapshot.progress is not None:
            await self._call("SET", f"{self._prefix}job:{job_id}:progress", snapshot.progress, "EX", _KEEP_S)
        stream = f"{self._prefix}progress:{job_id}"
        fields = [
            "worker_id",
            snapshot.worker_id or "",
            "timestamp",
            repr(snapshot.at),
            "status",
            snapshot.status,
        ]
        if snapshot.percentage is not None:
            fields += ["percentage", f"{snapshot.percentage:g}"]
        if snapshot.message is not None:
            fields += ["message", snapshot.message]
        await self._call(
            "XADD", stream, "MAXLEN", "~", _NOTES_KEPT, "*", "progress", snapshot.progress or b"{}", *fields
        )
        await self._call("EXPIRE", stream, _KEEP_S)

    async def load_progress(self, job_ids: Sequence[JobId]) -> list[bytes | None]:
        if not job_ids:
            return []
        found = await self._call("MGET", *(f"{self._prefix}job:{job_id}:progress" for job_id in job_ids))
        return [None if text is None else as_bytes(text) for text in as_list(found)]


_LOG = logging.getLogger(__name__)

_PAUSE_S = 1.0
# From direct workers. Any other message on this channel names a class with waiting jobs.
_FROM_WORKERS = (b"worker", b"report")
# A class was added to the table; the sender follows.
_TABLE = b"table "
# A fleet event, for readers that are not engines.
_EVENT = b"{"
# An action of a direct worker. Any other message on this channel is a command.
_RUN = b'{"event":'

OnCommand = Callable[[WorkerId, Command], None]


class _WorkerCommand(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    action: Action
    job_id: str = ""
    lease: int = 0
    reason: str = ""
    sender: str = msgspec.field(default="", name="from")


_commands = msgspec.json.Decoder(_WorkerCommand)


class PubSubListener:
    """Ignores commands and classes from `me`."""

    def __init__(
        self,
        address: RedisAddress,
        me: str,
        wake: Callable[[], None],
        wake_for_workers: Callable[[], None],
        on_command: OnCommand | None,
        on_new_class: Callable[[], None] | None,
        on_peer_message: Callable[[bytes], None],
        hear_run: Callable[[bytes], None],
    ) -> None:
        self._address = address
        self._me = me
        self._wake = wake
        self._wake_for_workers = wake_for_workers
        self._hear = on_command
        self._relearn = on_new_class
        self._on_peer_message = on_peer_message
        self._hear_run = hear_run
        self._task: asyncio.Task[None] | None = None
        self.is_listening = asyncio.Event()

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="redis hints")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError):
                await self._listen()
            self.is_listening.clear()
            await asyncio.sleep(_PAUSE_S)

    async def _listen(self) -> None:
        address = self._address
        # By default the client library repeats commands and times out blocking reads.
        redis = Redis(
            host=address.host,
            port=address.port,
            db=address.database,
            username=address.username,
            password=address.password,
            ssl=address.is_tls,
            ssl_ca_certs=address.authority,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_keepalive=True,
        )
        try:
            async with redis.pubsub() as subscription:
                channels = (COMMANDS, PEER_CHANNEL, EVENT_CHANNEL)
                await subscription.subscribe(*(address.prefix + channel for channel in channels))
                async for message in subscription.listen():
                    if message["type"] == "message":
                        try:
                            self._handle(message["channel"], message["data"])
                        except Exception as error:
                            # Clients may publish anything; the listener goes on.
                            _LOG.info("a message on %r cannot be decoded: %r", message["channel"], error)
                    elif message["type"] == "subscribe" and message["channel"].endswith(
                        EVENT_CHANNEL.encode()
                    ):
                        self.is_listening.set()
                        # Messages from before the subscription are lost.
                        self._wake()
                        self._wake_for_workers()
        finally:
            await redis.aclose()

    def _handle(self, channel: bytes, text: bytes) -> None:
        if channel.endswith(PEER_CHANNEL.encode()):
            self._on_peer_message(text)
        elif channel.endswith(COMMANDS.encode()):
            if text.startswith(_RUN):
                self._hear_run(text)
            else:
                self._handle_command(text)
        else:
            self._handle_hint(text)

    def _handle_hint(self, what: bytes) -> None:
        if what in _FROM_WORKERS:
            self._wake_for_workers()
        elif what.startswith(_EVENT):
            return
        elif not what.startswith(_TABLE):
            self._wake()
        elif self._relearn is not None and what != _TABLE + self._me.encode():
            self._relearn()

    def _handle_command(self, text: bytes) -> None:
        try:
            command = _commands.decode(text)
        except msgspec.DecodeError:
            # A newer version's, or invalid: the worker learns of the command with its next heartbeat.
            return
        if self._hear is not None and command.sender != self._me:
            job_id = JobId(command.job_id) if command.job_id else None
            self._hear(command.worker_id, Command(command.action, job_id, command.lease, command.reason))
