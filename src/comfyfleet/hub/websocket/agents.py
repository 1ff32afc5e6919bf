"""Agents over one WebSocket: the worker API as over HTTP. A message is a call; its answer repeats its number.

`hub/worker_protocol.py` handles the calls. This module limits them: parked polls wait beside other calls, and a
connection that sends too fast is not read. Leases outlive the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from comfyfleet import tracing
from comfyfleet.hub.http.body import PIECE_BYTES, BodyLimit, BodyReader, LargeBodies, parse
from comfyfleet.hub.http.limits import ConnectionLimits, HubLimits, RequestRate
from comfyfleet.hub.http.pipeline import Handler, HubRequest, Reply, problem_of
from comfyfleet.hub.websocket.connection import WebSocketChannel
from comfyfleet.model.access import Caller
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.ids import parse_traceparent
from comfyfleet.wire import websocket
from comfyfleet.wire.problems import problem_response
from comfyfleet.wire.route import Route
from comfyfleet.wire.routes import WORKER as WORKER_ROUTES

_LOG = logging.getLogger(__name__)

Identify = Callable[[], Awaitable[Caller]]
"""Returns the caller, if the key is still valid."""

_MAX_PARKED = 2_048
_MAX_AT_WORK = 64
_ENCODER = msgspec.json.Encoder()
_CALL = msgspec.json.Decoder(websocket.AgentCall)
_ROUTES: dict[str, Route] = {route.name: route for route in WORKER_ROUTES}
_BODIES: dict[str, msgspec.json.Decoder[Any]] = {
    kind.route: msgspec.json.Decoder(_ROUTES[kind.route].decodes) for kind in websocket.AGENT_KINDS.values()
}


class AgentSession:
    """One connection for any number of slots and workers."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        identify: Identify,
        address: str,
        limits: HubLimits,
        rate: RequestRate,
        connection_limits: ConnectionLimits,
        bodies: LargeBodies,
        scope: Scope,
        send: Send,
    ) -> None:
        self._handlers = handlers
        self._identify = identify
        self._address = address
        self._connection_limits = connection_limits
        self._limits = limits
        self._bodies = bodies
        self._rate = rate
        self._scope = scope
        self._line = WebSocketChannel(send)
        self.close = self._line.close
        self._parked: dict[int, asyncio.Task[None]] = {}
        self._at_work: set[asyncio.Task[None]] = set()

    async def run(self, receive: Receive) -> None:
        try:
            await self._line.run(receive, self._on_message)
        finally:
            # A parked poll is an idle slot and ends with its connection. A report is completed, though
            # nobody reads the answer.
            for task in list(self._parked.values()):
                task.cancel()
            if under_way := {*self._parked.values(), *self._at_work}:
                await asyncio.wait(under_way)

    def _send(self, type_: str, request_id: int, status: int, body: Any) -> None:
        message = {"type": type_, "request_id": request_id, "status": status}
        self._line.answer(_ENCODER.encode(message if body is None else message | {"body": body}))

    async def _on_message(self, frame: bytes) -> None:
        try:
            if len(frame) > self._limits.max_frame_bytes:
                raise Refusal(
                    RefusalCode.TOO_LARGE, f"a message has at most {self._limits.max_frame_bytes} bytes"
                )
            # The body is checked later, when the number of the call is known.
            request: websocket.AgentCall = parse(_CALL, frame)
        except Refusal as refusal:
            # The number of the call is unknown.
            self._send(websocket.ERROR, 0, problem_response(refusal).status, problem_response(refusal).body)
            return
        if request.type == websocket.WITHDRAW:
            if (parked := self._parked.get(request.request_id)) is not None:
                parked.cancel()
            return
        task = asyncio.ensure_future(self._answer(request))
        kind = websocket.AGENT_KINDS.get(request.type)
        if kind is not None and _ROUTES[kind.route].is_long_poll and request.request_id not in self._parked:
            self._parked[request.request_id] = task
            task.add_done_callback(lambda _: self._parked.pop(request.request_id, None))
        else:
            self._at_work.add(task)
            task.add_done_callback(self._at_work.discard)
            while len(self._at_work) >= _MAX_AT_WORK:
                await asyncio.wait(self._at_work, return_when=asyncio.FIRST_COMPLETED)

    async def _answer(self, request: websocket.AgentCall) -> None:
        if (trace := parse_traceparent(request.traceparent)) is not None:
            tracing.bind_log_fields(traceparent=trace)
        try:
            reply = await self._handled(request)
        except Exception as error:
            answered = problem_of(error, _LOG, f"a message of kind {request.type!r}")
        else:
            type_ = websocket.AGENT_KINDS[request.type].answered
            if type_ == "job_assigned" and reply.status == 204:
                type_ = websocket.NO_JOB
            self._send(type_, request.request_id, reply.status, reply.body)
            return
        self._send(websocket.ERROR, request.request_id, answered.status, answered.body)

    async def _handled(self, request: websocket.AgentCall) -> Reply:
        # With each call, as over HTTP: a revoked key loses access on open connections too.
        caller = await self._identify()
        self._rate.take(caller.key_id)
        kind = websocket.AGENT_KINDS.get(request.type)
        if kind is None:
            known = ", ".join(websocket.AGENT_KINDS)
            raise Refusal(RefusalCode.INVALID_REQUEST, f"a message has a 'type', one of {known}")
        route = _ROUTES[kind.route]
        if caller.role not in route.roles:
            raise Refusal(
                RefusalCode.NOT_ALLOWED,
                f"a key of role {caller.role.value!r} may not send {request.type!r}",
            )
        if route.is_long_poll and len(self._parked) > _MAX_PARKED:
            raise Refusal(
                RefusalCode.UNAVAILABLE, f"a connection waits for at most {_MAX_PARKED} answers at a time"
            )
        call: HubRequest[Any] = HubRequest(route, self._scope, _nothing, {})
        call.caller = caller
        call.is_large = len(request.body) > PIECE_BYTES
        with BodyReader(self._bodies, BodyLimit.of(route, self._limits), caller.key_id) as reading:
            call.data = await reading.checked(_BODIES[kind.route], bytes(request.body))
            if not route.is_long_poll:
                return await self._run(call)
        # A parked poll counts as one over HTTP does.
        with self._connection_limits.held("poll", caller.key_id, self._address):
            return await self._run(call)

    async def _run(self, call: HubRequest[Any]) -> Reply:
        reply = await self._handlers[call.route.name](call)
        assert isinstance(reply, Reply), "worker handlers return values"
        return reply


async def _nothing() -> dict[str, Any]:
    raise AssertionError("a call over a socket has its body in the message")
