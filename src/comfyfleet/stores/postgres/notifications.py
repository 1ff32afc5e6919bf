"""Hints between processes over LISTEN and NOTIFY: waiting jobs, a changed table, commands for a worker.

A hint may be lost; polling finds everything. It is sent after its change, and many changes share one, because
NOTIFY in a transaction serializes all commits of a database. Only the listening connection keeps a state;
behind a transaction pooler it gets nothing, and nothing depends on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from uuid import uuid4

import msgspec
import psycopg

from comfyfleet.model.calls import Command
from comfyfleet.model.errors import ComfyFleetError
from comfyfleet.model.ids import WorkerId
from comfyfleet.stores.postgres.connections import ConnectionPool

CHANNEL = "comfyfleet_waiting"
TABLE = "comfyfleet_table"
COMMANDS = "comfyfleet_commands"
_NOTIFY = "SELECT pg_notify(%s, %s)"
MIN_GAP_S = 0.02
MAX_RETRY_S = 5.0

_log = logging.getLogger(__name__)

OnCommand = Callable[[WorkerId, Command], None]
# A notification has less than 8000 bytes.
_MAX_REASON = 1000


class _WorkerCommand(msgspec.Struct, frozen=True):
    worker_id: WorkerId
    command: Command
    sender: str


_commands = msgspec.json.Decoder(_WorkerCommand)


class Notifications:
    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._sender_id = uuid4().hex
        self._listeners: list[Callable[[], None]] = []
        self._command_listeners: list[OnCommand] = []
        self._learners: list[Callable[[], None]] = []
        self._sender: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._due: set[str] = set()
        """Channels to notify."""
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._read()

    def listen(
        self,
        wake: Callable[[], None],
        on_command: OnCommand | None = None,
        on_new_class: Callable[[], None] | None = None,
    ) -> None:
        self._listeners.append(wake)
        if on_new_class is not None:
            self._learners.append(on_new_class)
        if on_command is not None:
            self._command_listeners.append(on_command)
        self._read()

    def _read(self) -> None:
        if self._is_open and self._listeners and self._reader is None:
            self._reader = asyncio.create_task(self._keep_reading(), name="comfyfleet-postgres-hints")

    def notify(self, channel: str = CHANNEL) -> None:
        """Hints that something may wait or is new. Sent at once, or with others a moment later."""
        self._due.add(channel)
        if self._is_open and (self._sender is None or self._sender.done()):
            self._sender = asyncio.create_task(self._send(), name="comfyfleet-postgres-notify")

    def notify_all(self) -> None:
        """Also wakes this process, which ignores its own notifications."""
        self.notify()
        self._wake()

    async def notify_worker(self, worker_id: WorkerId, command: Command) -> None:
        command = msgspec.structs.replace(command, reason=command.reason[:_MAX_REASON])
        text = msgspec.json.encode(_WorkerCommand(worker_id, command, self._sender_id)).decode()

        await self._pool.execute((_NOTIFY, (COMMANDS, text)))

    async def _send(self) -> None:
        while self._due:
            due, self._due = self._due, set()
            try:
                await self._pool.execute(*((_NOTIFY, (channel, self._sender_id)) for channel in due))
            except ComfyFleetError as error:
                _log.debug("a hint was not sent: %s", error)
            await asyncio.sleep(MIN_GAP_S)

    async def _keep_reading(self) -> None:
        delay_s = 0.1
        while True:
            try:
                connection = await self._pool.connect()
                async with connection:
                    for channel in (CHANNEL, COMMANDS, TABLE):
                        await connection.execute(f"LISTEN {channel}")
                    delay_s = 0.1
                    # Notifications from before LISTEN are lost: look once.
                    self._wake()
                    async for notice in connection.notifies():
                        if notice.channel == COMMANDS:
                            self._handle_command(notice.payload)
                        elif notice.payload == self._sender_id:
                            continue
                        elif notice.channel == TABLE:
                            self._relearn()
                        else:
                            self._wake()
            except (psycopg.Error, ComfyFleetError) as error:
                _log.debug("listening for hints was interrupted: %s", error)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, MAX_RETRY_S)

    def _handle_command(self, text: str) -> None:
        try:
            message = _commands.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            # A newer version's, or invalid: the worker learns of the command with its next heartbeat.
            _log.debug("a command cannot be decoded: %r", error)
            return
        if message.sender != self._sender_id:
            for on_command in self._command_listeners:
                on_command(message.worker_id, message.command)

    def _relearn(self) -> None:
        for relearn in self._learners:
            relearn()

    def _wake(self) -> None:
        for wake in self._listeners:
            wake()

    async def close(self) -> None:
        self._is_open = False
        for task in (self._sender, self._reader):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._sender = self._reader = None
