"""A multiplexing client: one connection, one write per turn of the event loop, answers in order.

It reconnects and repeats unanswered calls in their old order. So it makes only repeatable calls: reads, and
functions that remember their answer by request id.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import hiredis

from comfyfleet.model.errors import Fault
from comfyfleet.stores.redis.address import RedisAddress

Argument = str | bytes | int | float
Send = Callable[..., Awaitable[object]]

_packed: Callable[[tuple[Argument, ...]], bytes] = cast("Any", hiredis.pack_command)

# How many calls go as one.
_AT_ONCE = 32
# Errors about the server's state, not the call: another connection may work.
_PASSING = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")


class RedisServerError(Fault):
    """The server's error. `code` is its first word."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0]


_BACKOFF_S = (0.05, 2.0)
"""The first and the longest pause between two tries to connect."""


class _Call:
    """`packed` is empty until it is decided whether the call goes alone or in the `parts` of a joint call."""

    __slots__ = ("answer", "arguments", "began", "name", "packed", "parts", "slot", "time")

    def __init__(
        self,
        packed: bytes,
        answer: asyncio.Future[object] | None,
        began: float,
        slot: int | None = None,
        name: str = "",
        time: str = "",
        arguments: tuple[Argument, ...] = (),
    ) -> None:
        self.packed = packed
        self.answer = answer
        self.began = began
        self.slot = slot
        self.name = name
        self.time = time
        self.arguments = arguments
        self.parts: list[_Call] = []

    def settle(self, answer: object) -> None:
        if self.answer is not None:
            if not self.answer.done():
                _settle(self.answer, answer)
        elif isinstance(answer, list):
            for part, each in zip(self.parts, answer, strict=True):
                part.settle(each)
        else:
            for part in self.parts:
                part.settle(answer)


class _Wire(asyncio.Protocol):
    """One connection: bytes out, parsed answers in."""

    def __init__(
        self,
        take: Callable[[_Wire, object], None],
        lost: Callable[[_Wire], None],
        on_bytes: Callable[[], None],
    ) -> None:
        self._on_answer = take
        self._lost = lost
        self._on_bytes = on_bytes
        self._reader = hiredis.Reader()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not False:
            self._on_answer(self, answer)
        self._on_bytes()

    def connection_lost(self, _: Exception | None) -> None:
        self.transport = None
        self._lost(self)


class RedisClient:
    """`greet` runs on each new connection before calls are repeated."""

    def __init__(
        self,
        address: RedisAddress,
        client_id: str,
        greet: Callable[[Send], Awaitable[None]] | None = None,
        *,
        patience_s: float = 30.0,
        silence_s: float = 10.0,
    ) -> None:
        self.client_id = client_id
        self._address = address
        self._meta = f"{address.prefix}meta"
        self._greet = greet
        self._patience_s = patience_s
        self._silence_s = silence_s
        self._wire: _Wire | None = None
        self._is_ready = False
        self._is_closed = False
        self._sent: deque[_Call] = deque()
        self._unsent: deque[_Call] = deque()
        self._greetings: deque[asyncio.Future[object]] = deque()
        self._is_flushing = False
        self._free_slots: list[int] = []
        self._slots = 0
        self._numbers = 0
        self._connecting: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._trouble = "it has not answered yet"
        self._quiet_since = 0.0

    # calls

    async def call(self, *arguments: Argument) -> object:
        """For repeatable commands, such as reads."""
        return await self._submit(_packed(arguments), None)

    async def function(
        self, name: str, *arguments: Argument, time: str = "", is_reading: bool = False
    ) -> object:
        """Calls a library function. A writing call gets a request id: a repeat gets the same answer."""
        if is_reading:
            return await self._submit(
                _packed(("FCALL", f"cf1_{name}", 1, self._meta, "", "", time, *arguments)), None
            )
        slot = self._slot()
        return await self._submit(self._request(slot, name, time, arguments), slot)

    def joined(self, name: str, *arguments: Argument, time: str = "") -> asyncio.Future[object]:
        """As `function`, but joinable: such calls of one turn of the event loop go as one."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()
        return self._wait(_Call(b"", answer, loop.time(), None, name, time, arguments), answer)

    def _slot(self) -> int:
        # The server keeps one answer per slot, because a slot serves one call at a time.
        if self._free_slots:
            return self._free_slots.pop()
        self._slots += 1
        return self._slots - 1

    def _request(self, slot: int, name: str, time: str, arguments: Sequence[Argument]) -> bytes:
        self._numbers += 1
        request = f"{self.client_id}:{slot}"
        return _packed(("FCALL", f"cf1_{name}", 1, self._meta, request, self._numbers, time, *arguments))

    def _submit(self, packed: bytes, slot: int | None) -> asyncio.Future[object]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[object] = loop.create_future()
        return self._wait(_Call(packed, answer, loop.time(), slot), answer)

    def _wait(self, call: _Call, answer: asyncio.Future[object]) -> asyncio.Future[object]:
        if self._is_closed:
            answer.set_exception(Fault("the Redis store is closed"))
            return answer
        self._unsent.append(call)
        loop = asyncio.get_running_loop()
        if not self._is_flushing and self._is_ready:
            self._is_flushing = True
            loop.call_soon(self._flush)
        if self._watch is None:
            self._watch = loop.call_later(self._silence_s / 8, self._check_timeouts)
        return answer

    def _flush(self) -> None:
        self._is_flushing = False
        wire = self._wire
        if not self._is_ready or wire is None or wire.transport is None or not self._unsent:
            return
        if not self._sent:
            self._quiet_since = asyncio.get_running_loop().time()
        calls = self._packed_calls()
        wire.transport.write(b"".join([call.packed for call in calls]))
        self._sent.extend(calls)
        self._unsent.clear()

    def _packed_calls(self) -> list[_Call]:
        """Packs calls in order, and joins up to `_AT_ONCE` joinable ones, so that none waits long for others."""
        calls: list[_Call] = []
        group: list[_Call] = []
        for call in self._unsent:
            is_joining = not call.packed and (not group or group[0].time == call.time)
            if group and (not is_joining or len(group) == _AT_ONCE):
                calls.append(self._together(group))
                group = []
            if call.packed:
                calls.append(call)
            else:
                group.append(call)
        if group:
            calls.append(self._together(group))
        return calls

    def _together(self, group: list[_Call]) -> _Call:
        first, slot = group[0], self._slot()
        if len(group) == 1:
            first.packed, first.slot = self._request(slot, first.name, first.time, first.arguments), slot
            return first
        arguments: list[Argument] = []
        for call in group:
            arguments += (call.name, len(call.arguments), *call.arguments)
        joint = _Call(self._request(slot, "many", first.time, arguments), None, first.began, slot)
        joint.parts = group
        return joint

    def _on_answer(self, wire: _Wire, answer: object) -> None:
        if wire is not self._wire:
            return
        if self._greetings:
            greeting = self._greetings.popleft()
            if not greeting.done():
                _settle(greeting, answer)
            return
        if isinstance(answer, Exception) and str(answer).startswith(_PASSING):
            # The call stays first in the line to repeat.
            self._trouble = str(answer)
            self._drop(wire)
            return
        call = self._sent.popleft()
        if call.slot is not None:
            self._free_slots.append(call.slot)
        call.settle(answer)

    def _hear(self) -> None:
        self._quiet_since = asyncio.get_running_loop().time()

    # the connection

    async def connect(self) -> None:
        """Fails at once if no server answers."""
        try:
            await self._connect()
        except (OSError, Fault) as error:
            await self.close()
            if isinstance(error, Fault):
                raise
            raise Fault(
                f"no Redis answers at {self._address.name} ({str(error) or type(error).__name__}): "
                "start it, or correct the URL of the store"
            ) from error

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        address = self._address
        async with asyncio.timeout(self._silence_s):
            _, wire = await loop.create_connection(
                lambda: _Wire(self._on_answer, self._lose, self._hear),
                address.host,
                address.port,
                ssl=address.tls(),
            )
            self._wire = wire
            if address.password is not None:
                user = () if address.username is None else (address.username,)
                await self._greeting("AUTH", *user, address.password)
            if address.database:
                await self._greeting("SELECT", address.database)
            if self._greet is not None:
                await self._greet(self._greeting)
        if self._wire is not wire:
            raise ConnectionResetError("the connection was lost as soon as it was set up")
        self._is_ready = True
        self._flush()

    def _greeting(self, *arguments: Argument) -> asyncio.Future[object]:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if self._wire is None or self._wire.transport is None:
            answer.set_exception(ConnectionResetError("the connection was lost while it was set up"))
            return answer
        self._greetings.append(answer)
        self._wire.transport.write(_packed(arguments))
        return answer

    def _drop(self, wire: _Wire) -> None:
        """Whatever arrives on it later is no answer to any call."""
        if wire.transport is not None:
            wire.transport.abort()
        self._lose(wire)

    def _lose(self, wire: _Wire) -> None:
        if wire is not self._wire:
            return
        self._wire, was_ready = None, self._is_ready
        self._is_ready = False
        # Repeat unanswered calls before sending new ones.
        self._unsent.extendleft(reversed(self._sent))
        self._sent.clear()
        while self._greetings:
            greeting = self._greetings.popleft()
            if not greeting.done():
                greeting.set_exception(ConnectionResetError("the connection was lost while it was set up"))
        if was_ready and not self._is_closed:
            self._connecting = asyncio.get_running_loop().create_task(self._reconnect())

    async def _reconnect(self) -> None:
        delay, longest = _BACKOFF_S
        while True:
            try:
                await self._connect()
                return
            except (OSError, Fault) as error:
                self._trouble = str(error) or type(error).__name__
                if self._wire is not None:
                    wire, self._wire = self._wire, None
                    self._greetings.clear()
                    self._drop(wire)
            await asyncio.sleep(delay)
            delay = min(delay * 2, longest)

    def _check_timeouts(self) -> None:
        """Ends calls that waited too long, and replaces a silent connection."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._watch = None
        if self._is_ready and self._wire is not None and self._sent:
            is_silent = self._quiet_since + self._silence_s < now
            if is_silent:
                self._trouble = "it was silent"
            # The answer to an abandoned call may still arrive; it must not match another call.
            if is_silent or self._sent[0].began + self._patience_s < now:
                self._drop(self._wire)
        while self._unsent and self._unsent[0].began + self._patience_s < now:
            call = self._unsent.popleft()
            if call.slot is not None:
                # A late copy finds a higher number in the slot, and does nothing.
                self._free_slots.append(call.slot)
            call.settle(
                Fault(
                    f"the Redis at {self._address.name} did not answer for {self._patience_s:g} s "
                    f"({self._trouble}): the call may have taken effect; check before you repeat it"
                )
            )
        if self._sent or self._unsent:
            self._watch = loop.call_later(self._silence_s / 8, self._check_timeouts)

    async def close(self) -> None:
        self._is_closed = True
        self._is_ready = False
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._connecting is not None:
            self._connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._connecting
            self._connecting = None
        wire, self._wire = self._wire, None
        if wire is not None:
            self._drop(wire)
        for call in (*self._sent, *self._unsent):
            call.settle(Fault("the Redis store was closed before this call was answered"))
        self._sent.clear()
        self._unsent.clear()
        # The transport closes in the next turn of the event loop.
        await asyncio.sleep(0)


def _settle(future: asyncio.Future[object], answer: object) -> None:
    if isinstance(answer, Exception):
        future.set_exception(answer if isinstance(answer, Fault) else RedisServerError(str(answer)))
    else:
        future.set_result(answer)
