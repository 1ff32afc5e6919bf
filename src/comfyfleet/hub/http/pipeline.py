"""Takes a request through authentication, role check, bounds and decoding to its handler; encodes the answer.

It knows the route table, not what handlers do. A handler returns a `Reply`, or an ASGI response (a stream, a
file) that is sent unchanged. Every error becomes a problem document.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import random
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from comfyfleet import tracing
from comfyfleet.hub import html
from comfyfleet.hub.audit.log import AuditLog
from comfyfleet.hub.files.uploads import is_form
from comfyfleet.hub.http.body import PIECE_BYTES, BodyLimit, BodyReader, JsonDecoder, LargeBodies
from comfyfleet.hub.http.connections import ANSWER
from comfyfleet.hub.http.credentials import Authenticator
from comfyfleet.hub.http.limits import (
    ClientDisconnected,
    ConnectionLimits,
    ConnectionSlot,
    HubLimits,
    RequestRate,
)
from comfyfleet.hub.http.router import RouteMatch, Router, read_query
from comfyfleet.model.access import AuditEntry, Caller, Role
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import parse_traceparent
from comfyfleet.wire.bodies import RawSubmitBody, SubmitDecoder
from comfyfleet.wire.problems import CONTENT_TYPE, ProblemAnswer, problem_response
from comfyfleet.wire.route import Route

_LOG = logging.getLogger(__name__)
_ACCESS = logging.getLogger("comfyfleet.access")

_HUNG_UP = 499
"""Status in the access log if the client left before the answer."""

_PACK_FROM_BYTES = 16 * 1024
_PACK_IN_THREAD_FROM_BYTES = 256 * 1024
"""Compressing this much takes milliseconds, so it runs in a thread."""
_BLANK_BYTES = 64
_REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}")
_NOBODY = Caller(Role.VIEWER, "nobody")
_ENCODER = msgspec.json.Encoder()

G = TypeVar("G")


class HubRequest(Generic[G]):
    """One request for a handler. `data` is its body, or its query if it has no body."""

    __slots__ = (
        "caller",
        "data",
        "headers",
        "is_large",
        "parameters",
        "receive",
        "request_id",
        "route",
        "scope",
    )

    def __init__(self, route: Route, scope: Scope, receive: Receive, parameters: dict[str, str]) -> None:
        self.route = route
        self.scope = scope
        self.receive = receive
        self.parameters = parameters
        self.headers = _headers(scope)
        self.request_id = _request_id(self.headers)
        self.caller = _NOBODY
        self.is_large = False
        """Whether processing `data` would block the event loop."""
        self.data: G

    def take(self) -> G:
        """Hands over `data`, so that the caller can free a large body as soon as it is decoded."""
        given = self.data
        del self.data
        return given

    @property
    def traceparent(self) -> str | None:
        return parse_traceparent(self.headers.get("traceparent"))

    @property
    def address(self) -> str:
        client = self.scope.get("client")
        return client[0] if client else ""


class Reply(msgspec.Struct, frozen=True, gc=False):
    status: int = 200
    body: Any = None
    headers: dict[str, str] | None = None
    content_type: str = "application/json"
    created_id: str | None = None
    """The id of the object that was created, for the audit log."""


Handler = Callable[[HubRequest[Any]], Awaitable["Reply | Response"]]
OnAnswered = Callable[[str, int, float], None]
"""Called after each request with its route, status and duration in seconds."""


class RequestPipeline:
    def __init__(
        self,
        routes: tuple[Route, ...],
        handlers: Mapping[str, Handler],
        credentials: Authenticator,
        limits: HubLimits,
        audit: AuditLog,
        connection_limits: ConnectionLimits,
        answered: OnAnswered,
        bodies: LargeBodies,
        faulted: Callable[[], None] = lambda: None,
    ) -> None:
        """`faulted` is called after each fault of a request."""
        _check_bound(routes, handlers)
        self._bodies = bodies
        self._faulted = faulted
        self._bounds = {route.name: BodyLimit.of(route, limits) for route in routes}
        self._audit = audit
        self._connection_limits = connection_limits
        self._answered = answered
        self._paths = Router(routes)
        self._handlers = handlers
        self._credentials = credentials
        self._limits = limits
        self._rate = RequestRate(limits.requests_per_s, limits.burst, time.monotonic)
        self._decoders: dict[str, JsonDecoder] = {
            route.name: SubmitDecoder()
            if route.decodes is RawSubmitBody
            else msgspec.json.Decoder(route.decodes)
            for route in routes
            if route.decodes is not None
        }
        self._in_flight = 0
        self._parked: set[Callable[[], None]] = set()
        """Functions that end the parked requests."""
        self._is_closing = False

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def close(self) -> None:
        """Answers parked and later requests with `unavailable`."""
        self._is_closing = True
        for end in self._parked:
            end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._paths.find(scope["method"], _raw_path(scope))
        if not isinstance(found, RouteMatch):
            await _send_no_route(scope, found, send)
            self._answered("none", 405 if found else 404, 0.0)
            return
        started = time.perf_counter()
        call: HubRequest[Any] = HubRequest(found.route, scope, receive, found.parameters)
        tracing.begin(request_id=call.request_id)
        if (trace := call.traceparent) is not None:
            tracing.bind_log_fields(traceparent=trace)
        if (job_id := found.parameters.get("job_id")) is not None:
            tracing.bind_log_fields(job_id=job_id)
        self._in_flight += 1
        try:
            status = await self._answer(call, send)
        except ClientDisconnected:
            status = _HUNG_UP
        finally:
            self._in_flight -= 1
        seconds = time.perf_counter() - started
        self._answered(found.route.name, status, seconds)
        if _ACCESS.isEnabledFor(logging.INFO):
            _ACCESS.info(
                "%s %s %d %.1f ms request=%s key=%s",
                scope["method"],
                scope["path"],
                status,
                seconds * 1000,
                call.request_id,
                call.caller.key_id,
            )

    async def _answer(self, call: HubRequest[Any], send: Send) -> int:
        try:
            reply = await self._handled(call)
        except ClientDisconnected:
            raise
        except Exception as error:
            if isinstance(error, Fault):
                self._faulted()
                _LOG.warning("request %s failed: %s", call.request_id, error)
            what = f"{call.route.method} {call.scope['path']} (request {call.request_id})"
            answered = problem_of(error, _LOG, what, call.request_id)
        else:
            if isinstance(reply, Response):
                reply.headers["x-request-id"] = call.request_id
                await reply(call.scope, call.receive, send)
                return reply.status_code
            await _send_reply(call, reply, send)
            return reply.status
        if call.route.is_page and "text/html" in call.headers.get("accept", ""):
            await _send_refusal_page(answered, call.request_id, call.scope, send)
        else:
            await _send_problem(answered, call.request_id, call.scope, send)
        return answered.status

    async def _handled(self, call: HubRequest[Any]) -> Reply | Response:
        route, limits = call.route, self._limits
        if self._in_flight > limits.max_in_flight:
            raise Refusal(
                RefusalCode.UNAVAILABLE, f"the hub has {limits.max_in_flight} requests in progress; try again"
            )
        if route.roles:
            token = token_in(call.scope) if route.takes_token else None
            caller = call.caller = await self._credentials.caller(
                call.headers, call.address, token, is_page=route.is_page
            )
            self._rate.take(caller.key_id)
            if caller.role not in route.roles:
                allowed = ", ".join(sorted(role.value for role in route.roles))
                raise Refusal(
                    RefusalCode.NOT_ALLOWED,
                    f"a key of role {caller.role.value!r} may not do this; allowed roles: {allowed}",
                )
        else:
            self._rate.take(call.address)
        if route.takes_form and is_form(call.headers):
            assert route.decodes is not None, "a route with a form also takes a body"
            call.data = route.decodes()
        elif route.body is not None:
            key_id = call.caller.key_id if route.roles else call.address
            with BodyReader(self._bodies, self._bounds[route.name], key_id) as reading:
                call.data = await self._body(call, reading)
                if not route.is_long_poll:
                    return await self._run(call)
        elif route.query is not None:
            call.data = read_query(call.scope["query_string"], route.query)
        return await self._run(call)

    async def _run(self, call: HubRequest[Any]) -> Reply | Response:
        route = call.route
        handler = self._handlers[route.name]
        if route.audited is not None:
            return await self._audited(call, handler)
        if not route.is_long_poll:
            return await handler(call)
        if self._is_closing:
            raise Refusal(RefusalCode.UNAVAILABLE, "the hub is stopping; try again")
        with self._connection_limits.held("poll", call.caller.key_id, call.address) as slot:
            return await self._attend(call, slot, handler(call))

    async def _audited(self, call: HubRequest[Any], handler: Handler) -> Reply | Response:
        caller, route = call.caller, call.route
        entry = AuditEntry(
            0.0,
            caller.key_id,
            caller.role if route.roles else None,
            route.name,
            "/".join(call.parameters.values()),
            caller.tenant,
            call.request_id,
            call.address,
        )
        note = self._audit.operation if route.roles else self._audit.log_success
        if route.audited == "jobs":
            note = self._audit.job_change
        return await note(entry, lambda: handler(call), _made)

    async def _body(self, call: HubRequest[Any], reading: BodyReader) -> Any:
        body = await reading.read(call.receive, call.headers)
        if call.route.is_body_optional and len(body) <= _BLANK_BYTES and not body.strip():
            body = b"{}"
        call.is_large = len(body) > PIECE_BYTES
        return await reading.decode(self._decoders[call.route.name], body)

    async def _attend(
        self, call: HubRequest[Any], slot: ConnectionSlot, work: Awaitable[Reply | Response]
    ) -> Reply | Response:
        """Runs a parked request, and ends it with its connection or its key."""
        task, is_ended = asyncio.current_task(), False
        assert task is not None, "a request is served in a task"

        def end(_: object = None) -> None:
            nonlocal is_ended
            if not is_ended:
                is_ended = True
                task.cancel()

        slot.end = end
        watch = asyncio.ensure_future(until_disconnected(call.receive))
        watch.add_done_callback(end)
        self._parked.add(end)
        try:
            return await work
        except asyncio.CancelledError:
            if not is_ended:
                raise
            task.uncancel()
            if watch.done():
                raise ClientDisconnected from None
            if self._is_closing:
                raise Refusal(RefusalCode.UNAVAILABLE, "the hub is stopping; try again") from None
            raise Refusal(RefusalCode.UNAUTHENTICATED, "the key is no longer valid") from None
        finally:
            # A disconnect from here on must not cancel the task.
            is_ended = True
            self._parked.discard(end)
            watch.cancel()


def handlers_in(*owners: object) -> dict[str, Handler]:
    """The public methods that take a `call`, by name: a method serves the route that has its name."""
    found: dict[str, Handler] = {}
    for owner in owners:
        for name, method in vars(type(owner)).items():
            if not name.startswith("_") and "call" in getattr(method, "__annotations__", ()):
                assert name not in found, f"two handlers are named {name}"
                found[name] = getattr(owner, name)
    return found


def _check_bound(routes: tuple[Route, ...], handlers: Mapping[str, Handler]) -> None:
    """Every route has a handler and every handler a route, with the same body type."""
    names = {route.name for route in routes}
    assert names == handlers.keys(), f"routes and handlers differ in {sorted(names ^ handlers.keys())}"
    for route in routes:
        takes = get_type_hints(handlers[route.name])["call"].__args__[0]
        given = next((kind for kind in (route.decodes, route.query) if kind is not None), type(None))
        assert takes is given, f"the handler of {route.name} takes {takes}, the table says {given}"


def _made(reply: Reply | Response) -> str | None:
    return reply.created_id if isinstance(reply, Reply) else None


def problem_of(error: Exception, log: logging.Logger, what: str, request_id: str = "") -> ProblemAnswer:
    """The problem document of an error. An unexpected error is logged under an incident number."""
    incident = ""
    if not isinstance(error, Refusal | Fault):
        incident = secrets.token_hex(8)
        log.error("incident %s: %s failed", incident, what, exc_info=error)
    return problem_response(error, request_id, incident)


async def until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _raw_path(scope: Scope) -> str:
    raw: bytes | None = scope.get("raw_path")
    # Some servers leave the query in the raw path.
    return scope["path"] if raw is None else raw.partition(b"?")[0].decode("latin-1")


def _headers(scope: Scope) -> dict[str, str]:
    # Names are in lower case. The first of several equal names counts.
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


def _request_id(headers: Mapping[str, str]) -> str:
    given = headers.get("x-request-id", "")
    # No secret, so a fast generator is enough.
    return given if given and _REQUEST_ID.fullmatch(given) else f"{random.getrandbits(64):016x}"


def token_in(scope: Scope) -> str | None:
    for part in scope["query_string"].decode("latin-1").split("&"):
        name, _, value = part.partition("=")
        if name == "token":
            return str(value)
    return None


async def _send_reply(call: HubRequest[Any], reply: Reply, send: Send) -> None:
    headers = [(b"x-request-id", call.request_id.encode("latin-1"))]
    body = b""
    if reply.body is not None:
        body = reply.body if isinstance(reply.body, bytes) else _ENCODER.encode(reply.body)
        headers.append((b"content-type", reply.content_type.encode("latin-1")))
    if len(body) >= _PACK_FROM_BYTES and "gzip" in call.headers.get("accept-encoding", ""):
        is_large = len(body) >= _PACK_IN_THREAD_FROM_BYTES
        body = await asyncio.to_thread(gzip.compress, body, 1) if is_large else gzip.compress(body, 1)
        headers += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
    for name, value in (reply.headers or {}).items():
        headers.append((name.encode("latin-1"), value.encode("latin-1")))
    await _send(call.scope, send, reply.status, headers, body)


async def _send_problem(answered: ProblemAnswer, request_id: str, scope: Scope, send: Send) -> None:
    headers = [(b"content-type", CONTENT_TYPE.encode())]
    if request_id:
        headers.append((b"x-request-id", request_id.encode("latin-1")))
    headers += [(name.encode(), value.encode()) for name, value in answered.headers().items()]
    await _send(scope, send, answered.status, headers, _ENCODER.encode(answered.body))


async def _send_refusal_page(answered: ProblemAnswer, request_id: str, scope: Scope, send: Send) -> None:
    fields = {"content-type": "text/html; charset=utf-8", "x-request-id": request_id}
    fields |= {**html.HEADERS, **answered.headers()}
    if "www-authenticate" in fields:
        # The browser then asks for the key, sends it with each request and keeps it out of the URL.
        fields["www-authenticate"] = (
            'Basic realm="ComfyFleet: any user name, and a key as password", charset="UTF-8"'
        )
    headers = [(name.encode(), value.encode("latin-1")) for name, value in fields.items()]
    await _send(scope, send, answered.status, headers, html.refusal_page(answered).encode())


async def _send_no_route(scope: Scope, methods: tuple[str, ...], send: Send) -> None:
    """Answers an unknown path, or a method that the path does not allow."""
    path, request_id = scope["path"], _request_id(_headers(scope))
    if not methods:
        answered = problem_response(
            Refusal(RefusalCode.NOT_FOUND, f"there is nothing at {path!r}"), request_id
        )
        await _send_problem(answered, request_id, scope, send)
        return
    allow = ", ".join(methods)
    message = f"{path!r} does not allow {scope['method']}; it allows {allow}"
    body = problem_response(Refusal(RefusalCode.INVALID_REQUEST, message), request_id).body | {"status": 405}
    headers = [(b"content-type", CONTENT_TYPE.encode()), (b"allow", allow.encode())]
    headers.append((b"x-request-id", request_id.encode("latin-1")))
    await _send(scope, send, 405, headers, b"" if scope["method"] == "HEAD" else _ENCODER.encode(body))


async def _send(
    scope: Scope, send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    if status != 204:
        headers.append((b"content-length", str(len(body)).encode()))
    if (answer := scope.get(ANSWER)) is not None:
        await answer(status, headers, body)
        return
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
