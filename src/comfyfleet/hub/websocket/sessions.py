"""The WebSocket at `/hub`: authentication, and the messages of callers and monitors.

`workers.py` handles the messages of workers, `agents.py` the subprotocol of agents, `connection.py` reads and
writes. A message that is not valid gets an `error` answer; a slow reader loses progress events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from comfyfleet.engine.engine import Engine
from comfyfleet.hub.audit.log import AuditLog
from comfyfleet.hub.files.job_files import JobInputFiles
from comfyfleet.hub.http.body import PIECE_BYTES, BodyLimit, BodyReader, LargeBodies
from comfyfleet.hub.http.credentials import Authenticator, check_sees, owner_of
from comfyfleet.hub.http.limits import ConnectionLimits, HubLimits, RequestRate
from comfyfleet.hub.http.pipeline import handlers_in, problem_of, token_in
from comfyfleet.hub.streams.feed import EventFilter, FeedEntry, FleetFeed
from comfyfleet.hub.streams.job_channels import JobChannel, JobChannels
from comfyfleet.hub.websocket import workers
from comfyfleet.hub.websocket.agents import AgentSession, Identify
from comfyfleet.hub.websocket.connection import WebSocketChannel
from comfyfleet.hub.websocket.workers import WebSocketWorkers
from comfyfleet.hub.worker_protocol import WorkerHandlers
from comfyfleet.model.access import AuditEntry, Caller
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import JobId, TenantId, parse_traceparent
from comfyfleet.wire import answers, bodies, websocket
from comfyfleet.wire.problems import problem_response
from comfyfleet.wire.progress import EventsQuery
from comfyfleet.wire.status_names import StatusDialect, status_name

_LOG = logging.getLogger(__name__)

LegacyWebsocket = Literal["on", "warn", "off"]
PATH = "/hub"
_MOVED = "callers and monitors use HTTP and Server-Sent Events: see docs/moving-to-sse.md"
_MAX_SUBSCRIPTIONS = 1_000
_ENCODER = msgspec.json.Encoder()
_MESSAGE = msgspec.json.Decoder(dict[str, Any])

Made = TypeVar("Made")


class WebSocketServer:
    def __init__(
        self,
        engine: Engine,
        channels: JobChannels,
        fleet: FleetFeed,
        credentials: Authenticator,
        limits: HubLimits,
        audit: AuditLog,
        connection_limits: ConnectionLimits,
        inputs: JobInputFiles,
        workers: WorkerHandlers,
        bodies: LargeBodies,
        legacy: LegacyWebsocket = "on",
    ) -> None:
        self.engine = engine
        self.workers = workers
        self.bodies = bodies
        most = limits.max_frame_bytes
        self.bound = BodyLimit(most, most, limits.max_depth, in_parts=False)
        self.audit = audit
        self.inputs = inputs
        self.channels = channels
        self.fleet = fleet
        self.limits = limits
        self.legacy = legacy
        self.rate = RequestRate(limits.requests_per_s, limits.burst, time.monotonic)
        self._credentials = credentials
        self._connection_limits = connection_limits
        self._agent_handlers = handlers_in(workers)
        self._sessions: dict[WebSocketSession | AgentSession, None] = {}
        self._warned: dict[str, None] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._sessions)

    def close(self) -> None:
        self._is_closed = True
        for session in self._sessions:
            session.close()

    def warn(self, caller: Caller, kind: str) -> None:
        """Logs once for each key."""
        if caller.key_id not in self._warned and len(self._warned) < 10_000:
            self._warned[caller.key_id] = None
            _LOG.warning("key %s still sends %r over the WebSocket: %s", caller.key_id, kind, _MOVED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "websocket.connect"
        headers: Mapping[str, str] = Headers(scope=scope)
        client = scope.get("client")
        address = client[0] if client else ""
        try:
            if scope["path"].rstrip("/") != PATH:
                raise Refusal(RefusalCode.NOT_FOUND, f"the WebSocket is at {PATH}")
            if self._is_closed:
                raise Refusal(RefusalCode.UNAVAILABLE, "the hub is stopping; try again")
            identify = partial(self._credentials.caller, headers, address, token_in(scope))
            caller = await identify()
            cleanup = ExitStack()
            slot = cleanup.enter_context(self._connection_limits.held("socket", caller.key_id, address))
        except (Refusal, Fault) as error:
            await _refuse(scope, error, send)
            return
        session: WebSocketSession | AgentSession
        with cleanup:
            if websocket.AGENT_PROTOCOL in scope.get("subprotocols", ()):
                await send({"type": "websocket.accept", "subprotocol": websocket.AGENT_PROTOCOL})
                session = AgentSession(
                    self._agent_handlers,
                    identify,
                    address,
                    self.limits,
                    self.rate,
                    self._connection_limits,
                    self.bodies,
                    scope,
                    send,
                )
            else:
                await send({"type": "websocket.accept"})
                session = WebSocketSession(self, identify, caller, address, send)
            self._sessions[session] = None
            # 1008 is a policy violation.
            slot.end = partial(session.close, 1008, "the key is no longer valid")
            try:
                await session.run(receive)
            finally:
                self._sessions.pop(session, None)


class WebSocketSession:
    def __init__(
        self, hub: WebSocketServer, identify: Identify, caller: Caller, address: str, send: Send
    ) -> None:
        self._hub = hub
        self._identify = identify
        self.caller = caller
        self._address = address
        self._line = WebSocketChannel(send, self._send_events)
        self.close = self._line.close
        self._subscribed: dict[JobId, tuple[JobChannel, int]] = {}
        self._monitor: tuple[EventFilter, int] | None = None
        self._workers = WebSocketWorkers(
            hub.engine,
            hub.inputs,
            caller,
            hub.limits.max_wait_s,
            self.send_message,
            hub.workers.check_files,
            hub.workers.keyed,
        )

    async def run(self, receive: Receive) -> None:
        try:
            await self._line.run(receive, self._on_message)
        finally:
            await self._workers.close()
            for job_id in list(self._subscribed):
                self._unsubscribe(job_id)
            self._hub.fleet.unsubscribe(self._line.wake)

    def send_message(self, message: dict[str, Any]) -> None:
        self._line.answer(_ENCODER.encode(message))

    async def _send_events(self) -> None:
        for job_id, (channel, position) in list(self._subscribed.items()):
            if channel.head > position:
                self._subscribed[job_id] = (channel, channel.head)
                for entry in channel.after(position):
                    await self._put(entry)
            if (
                channel.is_over
                and not channel.is_closed
                and self._subscribed.get(job_id, (channel, -1))[1] == channel.head
            ):
                self._unsubscribe(job_id)
        await self._write_monitor()

    async def _write_monitor(self) -> None:
        fleet = self._hub.fleet
        if self._monitor is None or fleet.head == self._monitor[1]:
            return
        wanted, position = self._monitor
        self._monitor = (wanted, fleet.head)
        if fleet.lost > position:
            await self._line.put(b'{"type":"resync","reason":"too slow: events were left out"}')
        for entry in fleet.after(position):
            if wanted(entry):
                await self._put(entry)

    async def _put(self, entry: FeedEntry) -> None:
        if message := _encoded(entry):
            await self._line.put(message)

    async def _on_message(self, frame: bytes) -> None:
        message: dict[str, Any] = {}
        try:
            self._hub.rate.take(self.caller.key_id)
            with BodyReader(self._hub.bodies, self._hub.bound, self.caller.key_id) as reading:
                message = await reading.checked(_MESSAGE, frame)
                await self._identify()
                await self._do(message, is_large=len(frame) > PIECE_BYTES)
        except Exception as error:
            self._send_error(error, message)

    def _send_error(self, error: Exception, message: dict[str, Any]) -> None:
        problem = problem_of(error, _LOG, f"a message of kind {message.get('type')!r}").body
        answer = {
            "type": "error",
            "code": problem["code"],
            "message": problem.get("detail", ""),
            "problem": problem,
        }
        if isinstance(kind := message.get("type"), str):
            answer["request"] = kind
        self._answer(answer, message, job_id=message.get("job_id"))

    def _answer(self, answer: dict[str, Any], message: dict[str, Any], **more: Any) -> None:
        """Repeats the ids by which the sender knows its message."""
        for name, value in (
            *more.items(),
            *((name, message.get(name)) for name in ("request_id", "message_id")),
        ):
            if isinstance(value, str | int):
                answer.setdefault(name, value)
        self.send_message(answer)

    async def _do(self, message: dict[str, Any], *, is_large: bool) -> None:
        name = message.get("type")
        name = websocket.ALIASES.get(name, name) if isinstance(name, str) else None
        kind = None if name is None else websocket.KINDS.get(name)
        if name is None or kind is None:
            known = ", ".join(websocket.KINDS)
            raise Refusal(RefusalCode.INVALID_REQUEST, f"a message has a 'type', one of {known}")
        if self.caller.role not in kind.roles:
            raise Refusal(
                RefusalCode.NOT_ALLOWED, f"a key of role {self.caller.role.value!r} may not send {name!r}"
            )
        if kind.is_old:
            if self._hub.legacy == "off":
                raise Refusal(RefusalCode.NOT_ALLOWED, f"this hub no longer serves {name!r}: {_MOVED}")
            if self._hub.legacy == "warn":
                self._hub.warn(self.caller, name)
        body = websocket.read(name, message)
        if kind.is_old:
            answer = await self._old(name, body, message, is_large=is_large)
        else:
            answer = await self._workers.handle(name, body)
        if answer is not None:
            self._answer(answer, message)

    async def _old(
        self, name: str, body: Any, message: dict[str, Any], *, is_large: bool
    ) -> dict[str, Any] | None:
        engine = self._hub.engine
        match name:
            case "submit_job":
                trace = message.get("traceparent")
                trace = parse_traceparent(trace) if isinstance(trace, str) else None
                asked = bodies.submission(body, owner_of(body, self.caller), traceparent=trace)
                submitted = await self._audited(
                    name,
                    lambda: self._hub.inputs.submit(asked, is_large=is_large),
                    lambda made: made.job_id,
                )
                status = status_name(submitted.phase, StatusDialect.SOCKET)
                self._answer({"type": "job_submitted", "job_id": submitted.job_id, "status": status}, message)
                # Old callers expect events of their job without a subscription.
                await self._subscribe(submitted.job_id)
                return None
            case "subscribe_monitor":
                await self._begin_monitor(body)
                return None
            case "unsubscribe_monitor":
                self._monitor = None
                self._hub.fleet.unsubscribe(self._line.wake)
                return {"type": "monitor_unsubscribed"}
        if name in workers.COMMANDS:
            entry = self._entry(name, getattr(body, "worker_id", ""))
            return await self._hub.audit.operation(
                entry, lambda: workers.run_command(engine, name, body), lambda _: None
            )
        job_id = JobId(body.job_id)
        match name:
            case "subscribe_progress":
                await self._subscribe(job_id)
                return None
            case "unsubscribe_progress":
                self._unsubscribe(job_id)
                return {"type": "unsubscribed", "job_id": job_id}
        await self._check_mine(job_id)
        change: dict[str, Callable[[JobId], Awaitable[object]]] = {
            "cancel_job": lambda job_id: engine.cancel(job_id, body.reason),
            "retry_job": engine.retry,
            "pause_job": engine.pause,
            "resume_job": engine.resume,
        }
        await self._audited(name, lambda: change[name](job_id), lambda _: job_id)
        view = await engine.get(job_id)
        now = answers.job_details(view)
        return {
            "type": "job_updated",
            "job_id": job_id,
            "status": status_name(view.dispatch.phase, StatusDialect.SOCKET),
            "is_paused": now.is_paused,
            "cancel_requested": now.cancel_requested,
            "pause_requested": now.pause_requested,
            "retry_requested": now.retry_requested,
        }

    async def _audited(
        self, action: str, change: Callable[[], Awaitable[Made]], target: Callable[[Made], str]
    ) -> Made:
        return await self._hub.audit.job_change(self._entry(action), change, target)

    def _entry(self, action: str, target: str = "") -> AuditEntry:
        caller = self.caller
        return AuditEntry(
            0.0, caller.key_id, caller.role, action, target, tenant=caller.tenant, address=self._address
        )

    async def _check_mine(self, job_id: JobId) -> None:
        await check_sees(self.caller, self._hub.engine, job_id)

    async def _subscribe(self, job_id: JobId) -> None:
        if job_id in self._subscribed:
            return
        if len(self._subscribed) >= _MAX_SUBSCRIPTIONS:
            raise Refusal(
                RefusalCode.TOO_LARGE, f"a connection watches at most {_MAX_SUBSCRIPTIONS} jobs at a time"
            )
        await self._check_mine(job_id)
        channel = await self._hub.channels.subscribe(job_id, self._line.wake)
        now = channel.facts[-1].value if channel.is_over and channel.facts else channel.progress
        if (answer := websocket.message_of(now)) is not None:
            self.send_message(answer)
        if channel.is_over:
            self._hub.channels.unsubscribe(channel, self._line.wake)
        else:
            self._subscribed[job_id] = (channel, channel.head)

    def _unsubscribe(self, job_id: JobId) -> None:
        if (known := self._subscribed.pop(job_id, None)) is not None:
            self._hub.channels.unsubscribe(known[0], self._line.wake)

    async def _begin_monitor(self, body: websocket.Monitor) -> None:
        query = EventsQuery(body.job_id, body.worker_id, body.tenant, body.kind, body.metadata)
        if body.tenant is not None and not self.caller.sees(TenantId(body.tenant)):
            raise Refusal(RefusalCode.NOT_ALLOWED, f"this key does not see the tenant {body.tenant!r}")
        fleet = self._hub.fleet
        fleet.subscribe(self._line.wake)
        self._monitor = (EventFilter(query, self.caller.scope), fleet.head)
        snapshot: dict[str, Any] = {"type": "monitor_subscribed"}
        if self.caller.scope is None:
            # Events tell only of changes, so a monitor needs the initial state.
            snapshot["stats"] = await self._hub.engine.stats()
            snapshot["workers"] = [
                {"worker_id": worker.worker_id, "is_offline": worker.is_offline, "slots": worker.slots}
                for worker in await self._hub.engine.workers()
            ]
        self.send_message(snapshot)


def _encoded(entry: FeedEntry) -> bytes:
    """The WebSocket frame of an event, encoded once for all connections."""
    if entry.message is None:
        answer = websocket.message_of(entry.value)
        entry.message = b"" if answer is None else _ENCODER.encode(answer)
    return entry.message


async def _refuse(scope: Scope, error: Refusal | Fault, send: Send) -> None:
    answered = problem_response(error)
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:120]})
        return
    headers = {"content-type": "application/problem+json", **answered.headers()}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "websocket.http.response.start", "status": answered.status, "headers": raw})
    await send({"type": "websocket.http.response.body", "body": _ENCODER.encode(answered.body)})
