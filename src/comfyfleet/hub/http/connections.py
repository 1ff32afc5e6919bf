"""Connections before authentication: how many there may be, and how long a request may take to arrive.

uvicorn waits without end for an incomplete request and for a client that reads nothing, and it parses all
that has arrived at once. This module ends slow connections and lets others take their turn. It subclasses
uvicorn's protocol because no public setting bounds these (docs/decisions/0054). `limits.py`
bounds the connections of each key.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from functools import partial
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from comfyfleet.hub.http.limits import HubLimits, subtract
from comfyfleet.hub.http.uvicorn_logging import UvicornLogger
from comfyfleet.wire.route import LARGE_BYTES

ANSWER = "comfyfleet.answer"
"""Scope key of a function that writes head and body at once. Other servers do not set it."""

_POLL_S = 1.0
_RESERVED_FILES = 128
"""File descriptors reserved for the store, files and logs."""
_STEP_BYTES = 2 * 1024
"""About a hundred requests without headers."""
_TURN_S = 0.005
MAX_UNREAD_BYTES = LARGE_BYTES
"""Of a body that arrives after its request was answered."""
_CHUNK_OVERHEAD = 16
"""Each byte of a body may be a chunk with a length and two line ends."""
_MAX_PIPELINED = 16
"""Pipelined requests of one connection."""


class Connections:
    """All open connections. Between `start` and `close` it ends those that are too slow."""

    def __init__(self, limits: HubLimits) -> None:
        self.limits = limits
        self.most = min(limits.max_connections, _connection_capacity())
        self.open: set[Connection] = set()
        self.by_address: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        look_s = min(_POLL_S, self.limits.request_s / 4)
        self._timer = asyncio.get_running_loop().call_later(look_s, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        # First, so that an error below does not end the timer.
        self.start()
        now = asyncio.get_running_loop().time()
        for connection in list(self.open):
            connection.check_timeouts(now)


def _connection_capacity() -> float:
    """Keeps file descriptors free: without one, the process cannot reach its store."""
    try:
        import resource
    except ModuleNotFoundError:
        # Only Unix has this limit.
        return float("inf")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return float("inf") if files == resource.RLIM_INFINITY else max(1, files - _RESERVED_FILES)


class Connection(HttpToolsProtocol):
    def __init__(
        self,
        connections: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = UvicornLogger(self.logger)  # type: ignore[assignment]
        self._all = connections
        self._arriving_since: float | None = None
        self._received = 0
        self._in_body = 0
        self._unread = 0
        """Bytes of the body that arrived after the answer."""
        self._is_in_head = True
        self._stuck_since: float | None = None
        self._unanswered: deque[RequestResponseCycle] = deque()
        """Requests before the last one that are not answered yet."""
        self._unparsed = bytearray()
        """Bytes that have arrived and are not parsed yet."""
        self._next_turn: asyncio.Handle | None = None
        self._body_left = 0
        """Bytes still to come, by the Content-Length of the current body."""
        self._is_upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limits, address = self._all.limits, self._address
        is_full = len(self.connections) > self._all.most
        if is_full or self._all.by_address[address] >= limits.max_connections_per_address:
            # It closes at once, so it does not count.
            self._end("503 Service Unavailable" if is_full else "429 Too Many Requests", "retry-after: 5\r\n")
            return
        self._all.open.add(self)
        self._all.by_address[address] += 1
        self._arriving_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._unparsed.clear()
        super().connection_lost(exc)
        # uvicorn notifies only the last request; an earlier stream would keep writing.
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()

    def handle_websocket_upgrade(self) -> None:
        cycle = cast(RequestResponseCycle | None, self.cycle)
        if cycle is not None and not cycle.response_complete:
            # The connection still belongs to the earlier answer.
            self._end("400 Bad Request")
            return
        self._leave()
        self._is_upgraded = True
        self.transport.resume_reading()
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        if self._unparsed:
            # uvicorn resumed reading; it does not know of the bytes that wait here.
            self._unparsed += data
            self.transport.pause_reading()
        elif len(data) <= _STEP_BYTES:
            self._read(data)
        else:
            self._unparsed += data
            self._parse_for_a_while()

    def _parse_for_a_while(self) -> None:
        self._next_turn = None
        until = self.loop.time() + _TURN_S
        while self._unparsed and not self._is_upgraded and not self.transport.is_closing():
            if len(self.pipeline) >= _MAX_PIPELINED or self.loop.time() > until:
                self.transport.pause_reading()
                if len(self.pipeline) < _MAX_PIPELINED:
                    self._next_turn = self.loop.call_soon(self._parse_for_a_while)
                # Otherwise `on_response_complete` continues.
                return
            size = max(_STEP_BYTES, self._body_left)
            step = bytes(self._unparsed[:size])
            del self._unparsed[:size]
            self._read(step)
        self._unparsed.clear()
        if not self._is_upgraded and not self.transport.is_closing() and not self.flow.read_paused:
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unparsed and self._next_turn is None and len(self.pipeline) < _MAX_PIPELINED:
            self._next_turn = self.loop.call_soon(self._parse_for_a_while)

    def on_body(self, body: bytes) -> None:
        self._body_left = max(0, self._body_left - len(body))
        self._in_body += len(body)
        cycle = cast(RequestResponseCycle | None, self.cycle)
        if cycle is not None and cycle.response_complete:
            # Nobody reads it. A little may pass, because the client may read the answer only after sending.
            self._unread += len(body)
            if self._unread > MAX_UNREAD_BYTES:
                self.transport.close()
        super().on_body(body)

    def _read(self, data: bytes) -> None:
        cycle = cast(RequestResponseCycle | None, self.cycle)
        if self._arriving_since is None and (cycle is None or cycle.response_complete):
            # Blank lines before a request also end the idle time.
            self._begin()
        self._received += len(data)
        super().data_received(data)
        # The parser would collect a head, chunk headers or trailers without end.
        most = self._all.limits.max_head_bytes
        if not self._is_in_head:
            most += most + _CHUNK_OVERHEAD * self._in_body
        if self._received - self._in_body > most:
            self._end("431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._arriving_since is None:
            self._begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._body_left = _length_in(self.headers)
        before = cast(RequestResponseCycle | None, self.cycle)
        super().on_headers_complete()
        if self.cycle is not before:
            self.scope[ANSWER] = partial(_answer, self.cycle)  # type: ignore[literal-required]
        if before is not None and not before.response_complete:
            while self._unanswered and self._unanswered[0].response_complete:
                self._unanswered.popleft()
            self._unanswered.append(before)

    def on_message_complete(self) -> None:
        self._arriving_since = None
        super().on_message_complete()

    def check_timeouts(self, now: float) -> None:
        limits = self._all.limits
        if self._arriving_since is not None:
            # A large body on a slow line may take long, but it must progress.
            allowed_s = limits.request_s + self._received / limits.min_bytes_per_s
            if now - self._arriving_since > allowed_s:
                self._end("408 Request Timeout")
                return
        if not self.flow.write_paused:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since > limits.stalled_s:
            self.transport.abort()

    def _begin(self) -> None:
        self._arriving_since, self._received, self._is_in_head = self.loop.time(), 0, True
        self._in_body = self._unread = 0

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _end(self, status: str, header: str = "") -> None:
        self._arriving_since = None
        cycle = cast(RequestResponseCycle | None, self.cycle)
        if cycle is None or cycle.response_complete or not cycle.response_started:
            answer = f"HTTP/1.1 {status}\r\n{header}connection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(answer.encode())
        self.transport.close()

    def _leave(self) -> None:
        if self in self._all.open:
            self._all.open.discard(self)
            subtract(self._all.by_address, self._address)


def _length_in(headers: list[tuple[bytes, bytes]]) -> int:
    """The length of the body, which the parser has validated; 0 if there is none."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


async def _answer(
    cycle: RequestResponseCycle, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    """Like the cycle's `send` with both messages of an answer. The pipeline supplies all headers."""
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    assert not cycle.response_started, "a request is answered once"
    parts = [STATUS_LINE[status]]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
    if cycle.scope["method"] != "HEAD":
        parts.append(body)
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"".join(parts))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
