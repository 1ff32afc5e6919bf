"""The workers' door over one WebSocket: the calls of `http.py`, for any number of slots on a single connection.

Every call carries a number and its answer brings it back. A connection that is lost fails what waits on it with a
`Fault`, as HTTP does; whoever calls next connects anew, in pauses that grow. Leases live at the hub and outlive the
connection. Files, and what is too large for a message, go over HTTP as before.

A proxy on the way may take less than a hub does, and closes the connection for what is larger. What it closed for is
sent over HTTP, and so is what is as large from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.net.reachability import WrongAddress, not_a_hub
from comfyfleet.tracing import traceparent
from comfyfleet.wire import websocket
from comfyfleet.wire.problems import KINDS, refusal_in
from comfyfleet.worker.settings import AgentSettings, Backoff
from comfyfleet.worker.transports.http import ANSWER_S, LEFT_FOR, HttpWorkerApi, no_key, unreached

_log = logging.getLogger(__name__)

_TYPES = {kind.route.removeprefix("worker_"): type_ for type_, kind in websocket.AGENT_KINDS.items()}
_PARKING = frozenset({"poll", "commands"})
_LARGEST_ANSWER_BYTES = 256 * 1024 * 1024
_PING_S = 15.0
"""A hub that answers no ping for half of it is gone, whatever the network says."""
_CLOSE_S = 2.0
_TRIES = AgentSettings(backoff_cap_s=2.0)
"""How soon after a connection another one is tried, until a call is answered."""
_ALWAYS_TAKEN_BYTES = 16 * 1024
"""Smaller messages are never what a connection was closed for."""
_LOSSES_WITH_LARGE = 2
_LOSSES_WITH_POLLS = 5
"""So many connections in a row end without a reason, and what waited on them is sent over HTTP."""
_LOST = "the connection to the hub was lost"
_ENCODER = msgspec.json.Encoder()
_ANSWER = msgspec.json.Decoder(websocket.AgentAnswer)


class _TooLarge(Fault):
    """The connection was closed for the size of a message: this call's, or the answer to it."""


class WebSocketWorkerApi(HttpWorkerApi):
    """An async context manager; closing twice is harmless. One serves any number of agents."""

    def __init__(
        self,
        url: str | Sequence[str],
        key: str | None = None,
        *,
        answer_s: float = ANSWER_S,
        trust: ssl.SSLContext | None = None,
        spool: Path | None = None,
    ) -> None:
        super().__init__(url, key, answer_s=answer_s, trust=trust, spool=spool)
        self._line: _Line | None = None
        self._connecting: asyncio.Task[_Line] | None = None
        self._calls = 0
        self._backoff = Backoff(_TRIES)
        self._again_at = 0.0
        self._largest = websocket.AGENT_MESSAGE_BYTES
        self._losses_with_large = 0
        self._losses_with_polls = 0
        """Connections lost without a reason, since there was such an answer, while a large message or polls waited."""
        self._polls_over_http = False
        """An answer to a poll holds a job, which may be of any size."""

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        line, self._line = self._line, None
        if line is not None:
            await line.close()
        await super().close()

    async def _send(self, name: str, body: msgspec.Struct, wait_s: float = 0.0) -> bytes | None:
        type_ = _TYPES.get(name)
        if type_ is None or (name == "poll" and self._polls_over_http):
            return await super()._send(name, body, wait_s)
        self._calls += 1
        call_id, content = self._calls, msgspec.Raw(_ENCODER.encode(body))
        frame = _ENCODER.encode(websocket.AgentCall(type_, call_id, content, traceparent()))
        if len(frame) > self._largest:
            return await super()._send(name, body, wait_s)
        line = await self._connected()
        try:
            answer = await line.ask(name, call_id, frame, wait_s + self._answer_s)
        except _TooLarge:
            self._send_less(len(frame))
            # Reports may be repeated, and a poll keeps its id.
            return await super()._send(name, body, wait_s)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise unreached(error, self._url) from error
        if len(frame) > _ALWAYS_TAKEN_BYTES:
            self._losses_with_large = 0
        if name == "poll":
            self._losses_with_polls = 0
        self._backoff.reset()
        self._again_at = 0.0
        if answer.type == websocket.ERROR:
            raise refusal_in(answer.status, bytes(answer.body))
        return None if answer.status == 204 else bytes(answer.body)

    def _lost(self, largest: int, has_polls: bool) -> None:
        """Where a proxy hangs up in the middle of a message, nothing says why. Networks and restarts do so too,
        but not at each large message or each job."""
        if largest > _ALWAYS_TAKEN_BYTES:
            self._losses_with_large += 1
            if self._losses_with_large >= _LOSSES_WITH_LARGE:
                self._send_less(largest)
        elif has_polls:
            self._losses_with_polls += 1
            if self._losses_with_polls >= _LOSSES_WITH_POLLS:
                self._send_less(0)

    def _send_less(self, size: int) -> None:
        """A message of this size ended its connection; if it is small, the answer to it did."""
        if size > _ALWAYS_TAKEN_BYTES:
            self._losses_with_large = 0
            self._largest = min(self._largest, max(_ALWAYS_TAKEN_BYTES, size // 2))
            what = f"a message of {size} bytes: what has more than {self._largest} goes over HTTP from now on"
        elif not self._polls_over_http:
            self._polls_over_http = True
            what = "the size of an answer: jobs are asked for over HTTP from now on"
        else:
            return
        _log.warning(
            "the WebSocket to %s was closed for %s. A proxy on the way takes smaller messages than the hub",
            self._url,
            what,
        )

    async def _connected(self) -> _Line:
        if self._line is not None and self._line.is_open:
            return self._line
        now = asyncio.get_running_loop().time()
        if self._connecting is None or (self._connecting.done() and now >= self._again_at):
            # One attempt for all who wait, owned by none of them: the first to give up must not fail the rest.
            # And one for all who come soon after: a hub that turns us away is not asked by each slot for itself.
            self._again_at = now + self._backoff.next_s()
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(_look_at)
        await asyncio.wait({connecting := self._connecting})
        if connecting.cancelled():
            raise Fault(f"the connection to the hub at {self._url} was closed while it was opened")
        return connecting.result()

    async def _connect(self) -> _Line:
        """To the hub that was asked last, else to the next one that answers."""
        if self._line is not None:
            await self._line.close()
            self._line = None
        for left in reversed(range(len(self._urls))):
            url = self._url
            try:
                self._line = await self._connect_to(url)
                return self._line
            except Refusal as refusal:
                if refusal.code in LEFT_FOR:
                    self._leave(url)
                raise
            except Fault:
                self._leave(url)
                if not left:
                    raise
        raise AssertionError("there is a hub")

    async def _connect_to(self, url: str) -> _Line:
        try:
            async with asyncio.timeout(self._answer_s):
                connection = await self._opened().ws_connect(
                    f"{url}/hub",
                    protocols=(websocket.AGENT_PROTOCOL,),
                    heartbeat=_PING_S,
                    max_msg_size=_LARGEST_ANSWER_BYTES,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                )
        except aiohttp.WSServerHandshakeError as error:
            raise await self._unwelcome(url, error) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise unreached(error, url) from error
        if connection.protocol != websocket.AGENT_PROTOCOL:
            await connection.close()
            raise Fault(f"what answers at {url}/hub knows no agents: use HTTP, or a newer hub")
        return _Line(connection, self._lost)

    async def _unwelcome(self, url: str, error: aiohttp.WSServerHandshakeError) -> Refusal | Fault:
        told = f"the hub at {url} opens no WebSocket for us ({error.status})"
        if self._has_no_key and KINDS[RefusalCode.UNAUTHENTICATED].status == error.status:
            return no_key(url)
        for code in (RefusalCode.UNAUTHENTICATED, RefusalCode.NOT_ALLOWED):
            if KINDS[code].status == error.status:
                return Refusal(code, f"{told}: {KINDS[code].title}")
        found = await not_a_hub(self._opened(), url, error.status)
        return found if isinstance(found, WrongAddress) else Fault(told)


class _Line:
    """One connection and who waits on it."""

    def __init__(
        self, connection: aiohttp.ClientWebSocketResponse, on_lost: Callable[[int, bool], None]
    ) -> None:
        """`on_lost` is told of an end without a reason: the size of the largest message that had no answer, and whether
        polls had none."""
        self._connection = connection
        self._on_lost = on_lost
        self._is_leaving = False
        self._waiting: dict[int, asyncio.Future[websocket.AgentAnswer]] = {}
        self._sizes: dict[int, int] = {}
        """Of what was sent by those who wait."""
        self._polls: set[int] = set()
        self._chores: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._reading = asyncio.create_task(self._read())

    @property
    def is_open(self) -> bool:
        return not self._is_over and not self._connection.closed

    async def ask(self, name: str, call_id: int, frame: bytes, within_s: float) -> websocket.AgentAnswer:
        if not self.is_open:
            raise Fault(_LOST)
        answer: asyncio.Future[websocket.AgentAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[call_id], self._sizes[call_id] = answer, len(frame)
        if name == "poll":
            self._polls.add(call_id)
        try:
            try:
                # Returns once there is room on the way: whoever has much to say waits here.
                await self._connection.send_str(frame.decode())
            except (aiohttp.ClientError, OSError):
                # It was closed meanwhile. Why is read from what the other side said last.
                await asyncio.wait({answer}, timeout=_CLOSE_S)
                if not answer.done():
                    raise
            else:
                await asyncio.wait({answer}, timeout=within_s)
        finally:
            del self._waiting[call_id], self._sizes[call_id]
            self._polls.discard(call_id)
            if answer.done():
                # Looked at, also where whoever asked is gone: otherwise a lost connection is logged for each of them.
                answer.exception()
            elif name in _PARKING and self.is_open:
                self._withdraw(call_id)
        if not answer.done():
            raise TimeoutError(f"no answer within {within_s:g} s")
        return answer.result()

    def _withdraw(self, request_id: int) -> None:
        """Says that a slot is not idle any more; whoever asked for it has no time to wait until that is said."""
        call = websocket.AgentCall(websocket.WITHDRAW, request_id)
        task = asyncio.create_task(self._connection.send_str(_ENCODER.encode(call).decode()))
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        task.add_done_callback(_look_at)

    async def close(self) -> None:
        self._is_leaving = True
        for task in self._chores:
            task.cancel()
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._connection.close()
        await asyncio.wait({self._reading, *self._chores})

    async def _read(self) -> None:
        try:
            async for message in self._connection:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._hear(message.data.encode())
        finally:
            self._is_over = True
            is_size = self._connection.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
            largest = max(self._sizes.values(), default=0)
            if not is_size and not self._is_leaving:
                self._on_lost(largest, bool(self._polls))
            for call_id, answer in self._waiting.items():
                if answer.done():
                    continue
                # The largest message, or the answer to a small one.
                is_blamed = is_size and (largest <= _ALWAYS_TAKEN_BYTES or self._sizes[call_id] == largest)
                answer.set_exception((_TooLarge if is_blamed else Fault)(_LOST))

    def _hear(self, frame: bytes) -> None:
        try:
            said = _ANSWER.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        answer = self._waiting.get(said.request_id)
        if answer is not None and not answer.done():
            answer.set_result(said)


def _look_at(task: asyncio.Task[Any]) -> None:
    """What became of it is told to whoever waits, if anybody does."""
    if not task.cancelled():
        task.exception()
