"""The worker API over one WebSocket: the calls of `http.py` for any number of slots on a single connection.

A lost connection fails its open calls with a `Fault`; the next call connects again, in growing pauses. Files
and large messages go over HTTP: a proxy may accept less than the hub and close the connection.
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
"""A hub that does not answer a ping within half of this time is gone."""
_CLOSE_S = 2.0
_TRIES = AgentSettings(backoff_cap_s=2.0)
"""The pauses between connections until a call is answered."""
_ALWAYS_TAKEN_BYTES = 16 * 1024
"""A message of at most this size never causes a connection to be closed."""
_LOSSES_WITH_LARGE = 2
_LOSSES_WITH_POLLS = 5
"""After this many connections in a row that end without a reason, the calls that waited on them use HTTP."""
_LOST = "the connection to the hub was lost"
_ENCODER = msgspec.json.Encoder()
_ANSWER = msgspec.json.Decoder(websocket.AgentAnswer)


class _TooLarge(Fault):
    """The connection was closed because this message, or its answer, was too large."""


class WebSocketWorkerApi(HttpWorkerApi):
    """An async context manager that any number of agents can share. It can be closed twice."""

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
        self._socket: _Socket | None = None
        self._connecting: asyncio.Task[_Socket] | None = None
        self._calls = 0
        self._backoff = Backoff(_TRIES)
        self._again_at = 0.0
        self._largest = websocket.AGENT_MESSAGE_BYTES
        self._losses_with_large = 0
        self._losses_with_polls = 0
        """Connections in a row that were lost without a reason while a large message or a poll waited."""
        self._polls_over_http = False
        """The answer to a poll contains a job of any size."""

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()
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
        socket = await self._connected()
        try:
            answer = await socket.ask(name, call_id, frame, wait_s + self._answer_s)
        except _TooLarge:
            self._send_less(len(frame))
            # Reports are idempotent, and a poll keeps its id.
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
        """A proxy that hangs up gives no reason. Networks and restarts also break connections, but not at
        each large message or each job."""
        if largest > _ALWAYS_TAKEN_BYTES:
            self._losses_with_large += 1
            if self._losses_with_large >= _LOSSES_WITH_LARGE:
                self._send_less(largest)
        elif has_polls:
            self._losses_with_polls += 1
            if self._losses_with_polls >= _LOSSES_WITH_POLLS:
                self._send_less(0)

    def _send_less(self, size: int) -> None:
        """A message of this size ended its connection; if it is small, its answer did."""
        if size > _ALWAYS_TAKEN_BYTES:
            self._losses_with_large = 0
            self._largest = min(self._largest, max(_ALWAYS_TAKEN_BYTES, size // 2))
            what = (
                f"a message of {size} bytes: messages of more than {self._largest} go over HTTP from now on"
            )
        elif not self._polls_over_http:
            self._polls_over_http = True
            what = "the size of an answer: polls go over HTTP from now on"
        else:
            return
        _log.warning(
            "the WebSocket to %s was closed because of %s. A proxy accepts smaller messages than the hub",
            self._url,
            what,
        )

    async def _connected(self) -> _Socket:
        if self._socket is not None and self._socket.is_open:
            return self._socket
        now = asyncio.get_running_loop().time()
        if self._connecting is None or (self._connecting.done() and now >= self._again_at):
            # All waiting calls share one attempt: the first to give up must not fail the rest.
            # Calls that follow soon share it too, so that not every slot asks a hub that refuses.
            self._again_at = now + self._backoff.next_s()
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(_retrieve_exception)
        await asyncio.wait({connecting := self._connecting})
        if connecting.cancelled():
            raise Fault(f"the connection to the hub at {self._url} was closed while it was opened")
        return connecting.result()

    async def _connect(self) -> _Socket:
        """Connects to the hub of the last call, or to the next one that answers."""
        if self._socket is not None:
            await self._socket.close()
            self._socket = None
        for left in reversed(range(len(self._urls))):
            url = self._url
            try:
                self._socket = await self._connect_to(url)
                return self._socket
            except Refusal as refusal:
                if refusal.code in LEFT_FOR:
                    self._leave(url)
                raise
            except Fault:
                self._leave(url)
                if not left:
                    raise
        raise AssertionError("there is a hub")

    async def _connect_to(self, url: str) -> _Socket:
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
            raise await self._handshake_error(url, error) from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise unreached(error, url) from error
        if connection.protocol != websocket.AGENT_PROTOCOL:
            await connection.close()
            raise Fault(f"{url}/hub does not support agents: use HTTP, or a newer hub")
        return _Socket(connection, self._lost)

    async def _handshake_error(self, url: str, error: aiohttp.WSServerHandshakeError) -> Refusal | Fault:
        message = f"the hub at {url} refused the WebSocket ({error.status})"
        if self._has_no_key and KINDS[RefusalCode.UNAUTHENTICATED].status == error.status:
            return no_key(url)
        for code in (RefusalCode.UNAUTHENTICATED, RefusalCode.NOT_ALLOWED):
            if KINDS[code].status == error.status:
                return Refusal(code, f"{message}: {KINDS[code].title}")
        found = await not_a_hub(self._opened(), url, error.status)
        return found if isinstance(found, WrongAddress) else Fault(message)


class _Socket:
    """One connection and the calls that wait on it."""

    def __init__(
        self, connection: aiohttp.ClientWebSocketResponse, on_lost: Callable[[int, bool], None]
    ) -> None:
        """`on_lost` is called for an end without a reason, with the size of the largest unanswered message
        and whether polls were unanswered."""
        self._connection = connection
        self._on_lost = on_lost
        self._is_leaving = False
        self._waiting: dict[int, asyncio.Future[websocket.AgentAnswer]] = {}
        self._sizes: dict[int, int] = {}
        """The message sizes of the waiting calls."""
        self._polls: set[int] = set()
        self._background: set[asyncio.Task[None]] = set()
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
                # Returns once the send buffer has space: callers of large messages wait here.
                await self._connection.send_str(frame.decode())
            except (aiohttp.ClientError, OSError):
                # The connection was closed meanwhile. The reader finds the reason in the last frame.
                await asyncio.wait({answer}, timeout=_CLOSE_S)
                if not answer.done():
                    raise
            else:
                await asyncio.wait({answer}, timeout=within_s)
        finally:
            del self._waiting[call_id], self._sizes[call_id]
            self._polls.discard(call_id)
            if answer.done():
                # Retrieved even if the caller is gone: otherwise asyncio logs each lost connection.
                answer.exception()
            elif name in _PARKING and self.is_open:
                self._withdraw(call_id)
        if not answer.done():
            raise TimeoutError(f"no answer within {within_s:g} s")
        return answer.result()

    def _withdraw(self, request_id: int) -> None:
        """Tells the hub that the slot is not idle any more. The caller does not wait for it."""
        call = websocket.AgentCall(websocket.WITHDRAW, request_id)
        task = asyncio.create_task(self._connection.send_str(_ENCODER.encode(call).decode()))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(_retrieve_exception)

    async def close(self) -> None:
        self._is_leaving = True
        for task in self._background:
            task.cancel()
        with contextlib.suppress(aiohttp.ClientError, OSError):
            await self._connection.close()
        await asyncio.wait({self._reading, *self._background})

    async def _read(self) -> None:
        try:
            async for message in self._connection:
                if message.type is aiohttp.WSMsgType.TEXT:
                    self._receive(message.data.encode())
        finally:
            self._is_over = True
            is_size = self._connection.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
            largest = max(self._sizes.values(), default=0)
            if not is_size and not self._is_leaving:
                self._on_lost(largest, bool(self._polls))
            for call_id, answer in self._waiting.items():
                if answer.done():
                    continue
                # The cause is the largest message, or the answer to a small one.
                is_blamed = is_size and (largest <= _ALWAYS_TAKEN_BYTES or self._sizes[call_id] == largest)
                answer.set_exception((_TooLarge if is_blamed else Fault)(_LOST))

    def _receive(self, frame: bytes) -> None:
        try:
            answered = _ANSWER.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        answer = self._waiting.get(answered.request_id)
        if answer is not None and not answer.done():
            answer.set_result(answered)


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieves the exception, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
