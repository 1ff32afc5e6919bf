"""Agents over one WebSocket: the workers' door as over HTTP, each message a call, each answer with its call's
number.

What a call means is `hub/workers.py`'s. Here is how many there may be at a time: a parked poll waits beside
the others, and whoever sends faster than is answered is not read from. Leases outlive the connection.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from comfyfleet import tracing
from comfyfleet.hub.http.body import PIECE_BYTES, BodyLimit, BodyReader, LargeBodies, parse
from comfyfleet.hub.http.limits import ConnectionLimits, HubLimits, RequestRate
from comfyfleet.hub.http.pipeline import Handler, HubRequest, Reply
from comfyfleet.hub.websocket.connection import WebSocketChannel
from comfyfleet.model.access import Caller
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import parse_traceparent
from comfyfleet.wire import websocket
from comfyfleet.wire.problems import answer_to
from comfyfleet.wire.route import Route
from comfyfleet.wire.routes import WORKER as WORKER_ROUTES

_LOG = logging.getLogger(__name__)

Identify = Callable[[], Awaitable[Caller]]
"""Who speaks, if their key is still good."""

_MAX_PARKED = 2_048
_MAX_AT_WORK = 64
_ENCODER = msgspec.json.Encoder()
_CALL = msgspec.json.Decoder(websocket.AgentCall)
_ROUTES: dict[str, Route] = {route.name: route for route in WORKER_ROUTES}
_BODIES: dict[str, msgspec.json.Decoder[Any]] = {
    kind.route: msgspec.json.Decoder(_ROUTES[kind.route].decodes) for kind in websocket.AGENT_KINDS.values()
}


class AgentSession:
    """One connection, which may serve any number of slots and workers."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        identify: Identify,
        address: str,
        limits: HubLimits,
        rate: RequestRate,
        places: ConnectionLimits,
        bodies: LargeBodies,
        scope: Scope,
        send: Send,
    ) -> None:
        self._handlers = handlers
        self._identify = identify
        self._address = address
        self._places = places
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
            await self._line.run(receive, self._hear)
        finally:
            # A parked poll is an idle slot, and ends with its connection. What is being written down is: a report
            # whose answer nobody reads is a report all the same.
            for task in list(self._parked.values()):
                task.cancel()
            if under_way := {*self._parked.values(), *self._at_work}:
                await asyncio.wait(under_way)

    def _tell(self, type_: str, request_id: int, status: int, body: Any) -> None:
        told = {"type": type_, "request_id": request_id, "status": status}
        self._line.answer(_ENCODER.encode(told if body is None else told | {"body": body}))

    # what is asked for

    async def _hear(self, frame: bytes) -> None:
        try:
            if len(frame) > self._limits.max_frame_bytes:
                raise Refusal(
                    RefusalCode.TOO_LARGE, f"a message has at most {self._limits.max_frame_bytes} bytes"
                )
            # Its body is checked when it is read: who is to be told what is wrong with it is known by then.
            said: websocket.AgentCall = parse(_CALL, frame)
        except Refusal as refusal:
            # Nobody can be told which call it was.
            self._tell(websocket.ERROR, 0, answer_to(refusal).status, answer_to(refusal).body)
            return
        if said.type == websocket.WITHDRAW:
            if (parked := self._parked.get(said.request_id)) is not None:
                parked.cancel()
            return
        task = asyncio.ensure_future(self._answer(said))
        kind = websocket.AGENT_KINDS.get(said.type)
        if kind is not None and _ROUTES[kind.route].parks and said.request_id not in self._parked:
            self._parked[said.request_id] = task
            task.add_done_callback(lambda _: self._parked.pop(said.request_id, None))
        else:
            self._at_work.add(task)
            task.add_done_callback(self._at_work.discard)
            while len(self._at_work) >= _MAX_AT_WORK:
                await asyncio.wait(self._at_work, return_when=asyncio.FIRST_COMPLETED)

    async def _answer(self, said: websocket.AgentCall) -> None:
        if (trace := parse_traceparent(said.traceparent)) is not None:
            tracing.note(traceparent=trace)
        try:
            reply = await self._handled(said)
        except (Refusal, Fault) as error:
            answered = answer_to(error)
        except Exception as error:
            incident = secrets.token_hex(8)
            _LOG.exception("incident %s: a message of kind %r failed", incident, said.type)
            answered = answer_to(error, incident=incident)
        else:
            type_ = websocket.AGENT_KINDS[said.type].answered
            if type_ == "job_assigned" and reply.status == 204:
                type_ = websocket.NO_JOB
            self._tell(type_, said.request_id, reply.status, reply.body)
            return
        self._tell(websocket.ERROR, said.request_id, answered.status, answered.body)

    async def _handled(self, said: websocket.AgentCall) -> Reply:
        # With each call, as over HTTP: a key that is revoked opens nothing more, on a line that is open neither.
        caller = await self._identify()
        self._rate.take(caller.key_id)
        kind = websocket.AGENT_KINDS.get(said.type)
        if kind is None:
            known = ", ".join(websocket.AGENT_KINDS)
            raise Refusal(RefusalCode.INVALID_REQUEST, f"a message has a 'type', one of {known}")
        route = _ROUTES[kind.route]
        if caller.role not in route.roles:
            raise Refusal(
                RefusalCode.NOT_ALLOWED,
                f"a key of role {caller.role.value!r} may not send {said.type!r}",
            )
        if route.parks and len(self._parked) > _MAX_PARKED:
            raise Refusal(
                RefusalCode.UNAVAILABLE, f"a connection waits for at most {_MAX_PARKED} answers at a time"
            )
        call: HubRequest[Any] = HubRequest(route, self._scope, _nothing, {})
        call.caller = caller
        call.is_large = len(said.body) > PIECE_BYTES
        with BodyReader(self._bodies, BodyLimit.of(route, self._limits), caller.key_id) as reading:
            call.given = await reading.checked(_BODIES[kind.route], bytes(said.body))
            if not route.parks:
                return await self._run(call)
        # A poll that is parked here takes a place as one over HTTP does.
        with self._places.held("poll", caller.key_id, self._address):
            return await self._run(call)

    async def _run(self, call: HubRequest[Any]) -> Reply:
        reply = await self._handlers[call.route.name](call)
        assert isinstance(reply, Reply), "the workers' door answers with values"
        return reply


async def _nothing() -> dict[str, Any]:
    raise AssertionError("what a call over a socket brings came with it")
