"""Who stays too long or comes too often, over real sockets: slow requests, and places that are taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from tests.hub._hub import HubRig, running_hub
from tests.hub._watching import register, watching
from tests.worker._scripted import until

from comfyfleet.hub.http.connections import Connection
from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.model.access import Role

HASTY = HubLimits(request_s=0.3, min_bytes_per_s=100_000, beat_s=0.4)

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def wire(rig: HubRig, first: bytes = b"") -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rpartition(":")[2]))
    try:
        writer.write(first)
        yield reader, writer
    finally:
        writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Until the hub closes."""
    async with asyncio.timeout(60):
        return await reader.read()


async def trickle_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """What the hub said last may be lost: it closes while more is on the way."""
    reading = asyncio.create_task(rest(reader))
    while not reading.done():
        writer.write(b"x")
        await asyncio.sleep(0.02)
    error = reading.exception()
    assert error is None or isinstance(error, ConnectionError), error


def post(rig: HubRig) -> bytes:
    return (
        b"POST /api/jobs HTTP/1.1\r\nhost: h\r\ncontent-length: 100000\r\n"
        b"authorization: Bearer " + rig.keys[Role.ADMIN].encode() + b"\r\n\r\n{"
    )


# answers


class _Recording:
    """A transport, and what was written to it call by call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_head_and_body_of_an_answer_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[_Recording] = []
    made: Any = Connection.connection_made

    def recorded(connection: Connection, transport: asyncio.Transport) -> None:
        seen.append(_Recording(transport))
        made(connection, seen[-1])

    monkeypatch.setattr(Connection, "connection_made", recorded)
    async with running_hub() as rig:
        assert (await rig.get("/health")).status == 200
        assert (await rig.get("/nowhere")).code == "not_found"
    answers = [answer for each in seen for answer in each.written]
    assert len(answers) == 2
    for answer, status in zip(answers, (b"200", b"404"), strict=True):
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        assert f"content-length: {len(body)}".encode() in head and body.startswith(b"{")


async def test_a_connection_goes_on_after_an_answer_unless_it_was_asked_to_end() -> None:
    first = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\nHEAD /health HTTP/1.1\r\nhost: h\r\n\r\n"
    last = b"GET /nowhere HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n"
    async with running_hub() as rig, wire(rig, first + last) as (reader, _):
        answers = (await rest(reader)).split(b"HTTP/1.1 ")[1:]
    heads, bodies = zip(*(each.split(b"\r\n\r\n") for each in answers), strict=True)
    assert [head[:3] for head in heads] == [b"200", b"405", b"404"]
    assert [b"connection: close" in head for head in heads] == [False, False, True]
    assert [bool(body) for body in bodies] == [True, False, True]


# slow requests


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"GET /health HTTP/1.1\r\nhost: ",
        b"GET /health HTTP/1.1\r\nhost: h\r\n\r\nGET /health HTTP/1.1\r\n",
    ],
    ids=["nothing at all", "half a head", "half a second one"],
)
async def test_a_request_that_does_not_come_whole_is_not_waited_for(first: bytes) -> None:
    async with running_hub(limits=HASTY) as rig, wire(rig, first) as (reader, _):
        assert b"HTTP/1.1 408 Request Timeout" in await rest(reader)


async def test_a_head_that_trickles_is_given_up_however_lively_it_is() -> None:
    first = b"GET /health HTTP/1.1\r\nhost: "
    async with running_hub(limits=HASTY) as rig, wire(rig, first) as (reader, writer):
        await trickle_until_closed(reader, writer)


async def test_a_blank_line_behind_an_answer_is_no_way_to_stay() -> None:
    async with (
        running_hub(limits=HASTY) as rig,
        wire(rig, b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n") as line,
    ):
        reader, writer = line
        await reader.readuntil(b"}")
        writer.write(b"\r\n")
        assert b" 408 " in await rest(reader)


async def test_a_head_has_a_bound() -> None:
    first = b"GET /health HTTP/1.1\r\nhost: h\r\n"
    async with running_hub() as rig:
        async with wire(rig, first + b"x: y\r\n" * 9_000 + b"\r\n") as (reader, _):
            assert b" 200 " in await reader.readline()
        for endless in (b"x: y\r\n" * 11_000, b"x" * 66_000):
            async with wire(rig, first + endless) as (reader, _):
                assert (await rest(reader)).startswith(b"HTTP/1.1 431")


async def test_a_body_that_trickles_is_given_up_and_others_are_served_meanwhile() -> None:
    async with running_hub(limits=HASTY) as rig, wire(rig, post(rig)) as (reader, writer):
        await until(lambda: rig.hub.in_flight)
        assert (await rig.get("/health")).status == 200
        await trickle_until_closed(reader, writer)
        await until(lambda: not rig.hub.in_flight)


async def test_a_body_that_nobody_reads_is_not_waited_for_either() -> None:
    refused = b"POST /api/jobs HTTP/1.1\r\nhost: h\r\ncontent-length: 100000\r\n\r\n{"
    async with running_hub(limits=HASTY) as rig, wire(rig, refused) as (reader, writer):
        assert (await reader.readline()).startswith(b"HTTP/1.1 401")
        await trickle_until_closed(reader, writer)


async def poured(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: bytes, most: int) -> int:
    """How much of it, over and over, was sent until the hub closed."""
    sent = 0
    reading = asyncio.create_task(rest(reader))
    try:
        async with asyncio.timeout(60):
            while sent < most and not reading.done():
                writer.write(what)
                sent += len(what)
                await writer.drain()
    except ConnectionError:
        pass
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return sent


@pytest.mark.parametrize("path", ["/api/jobs", "/api/files"])
@pytest.mark.parametrize("role", [None, Role.VIEWER])
async def test_of_a_body_that_was_refused_no_end_is_read(
    path: str, role: Role | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However quickly it comes: whoever needs no key for it must not keep the hub busy."""
    most = 4 * 1024 * 1024
    monkeypatch.setattr("comfyfleet.hub.http.connections.MAX_UNREAD_BYTES", most)
    async with running_hub() as rig:
        key = "" if role is None else f"authorization: Bearer {rig.keys[role]}\r\n"
        head = f"POST {path} HTTP/1.1\r\nhost: h\r\n{key}content-type: multipart/form-data; boundary=x\r\n"
        for more in ("transfer-encoding: chunked", "content-length: 100000000000"):
            async with wire(rig, f"{head}{more}\r\n\r\n".encode()) as (reader, writer):
                assert (await reader.readline()).split()[1] in (b"401", b"403")
                piece = b"x" * 65_536
                piece = b"10000\r\n%s\r\n" % piece if "chunked" in more else piece
                assert most / 2 <= await poured(reader, writer, piece, 20 * most) < 10 * most
        assert (await rig.get("/health")).status == 200


async def test_a_body_that_is_refused_may_be_sent_to_its_end_where_that_is_near() -> None:
    async with running_hub() as rig:
        head = b"POST /api/jobs HTTP/1.1\r\nhost: h\r\ncontent-length: 3000000\r\n\r\n"
        async with wire(rig, head) as (reader, writer):
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            writer.write(b"x" * 3_000_000 + b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
            assert b"HTTP/1.1 200 OK" in await rest(reader)


@pytest.mark.parametrize(
    ("first", "around"),
    [
        (b"1;", b"x" * 65_536),
        (b"", b"1;%b\r\nx\r\n" % (b"x" * 2_000)),
        # Trailers, which the server would gather.
        (b"0\r\n", b"x: y\r\n" * 1_000),
    ],
    ids=["an endless name", "long names", "trailers"],
)
@pytest.mark.parametrize("role", [None, Role.ADMIN])
async def test_what_stands_around_the_chunks_of_a_body_has_a_bound(
    first: bytes, around: bytes, role: Role | None
) -> None:
    async with running_hub() as rig:
        key = "" if role is None else f"authorization: Bearer {rig.keys[role]}\r\n"
        head = f"POST /api/jobs HTTP/1.1\r\nhost: h\r\n{key}transfer-encoding: chunked\r\n\r\n".encode()
        async with wire(rig, head + first) as (reader, writer):
            assert await poured(reader, writer, around, 80_000_000) < 40_000_000


async def test_a_body_in_chunks_of_one_byte_is_a_body() -> None:
    async with running_hub() as rig:
        head = f"POST /api/jobs HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {rig.keys[Role.ADMIN]}\r\n"
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in b" " * 60_000 + b"{}")
        async with wire(rig, f"{head}transfer-encoding: chunked\r\n\r\n".encode() + body + b"0\r\n\r\n") as (
            reader,
            _,
        ):
            async with asyncio.timeout(60):
                assert (await reader.readline()).startswith(b"HTTP/1.1 400")


async def test_a_slow_body_that_moves_is_taken() -> None:
    async with running_hub(limits=HubLimits(request_s=0.2, min_bytes_per_s=100)) as rig:

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield b" " * 1_000
                await asyncio.sleep(0.1)
            yield b"{}"

        headers = {"authorization": f"Bearer {rig.keys[Role.ADMIN]}"}
        async with rig.session.post(f"{rig.url}/api/jobs", data=pieces(), headers=headers) as response:
            assert (await response.json())["code"] == "invalid_request"


async def test_whoever_takes_nothing_of_an_answer_is_let_go() -> None:
    async with running_hub(limits=HubLimits(stalled_s=0.3)) as rig:
        many = b"GET /openapi.json HTTP/1.1\r\nhost: h\r\n\r\n" * 300
        async with wire(rig, many) as (_, writer), asyncio.timeout(60):
            with pytest.raises(ConnectionError):
                while True:
                    writer.write(b"\r\n")
                    await writer.drain()
                    await asyncio.sleep(0.02)


async def test_streams_parked_polls_and_sockets_may_rest() -> None:
    async with running_hub(limits=HASTY) as rig:
        await register(rig)
        headers = {"authorization": f"Bearer {rig.keys[Role.ADMIN]}"}
        polling = asyncio.create_task(parked(rig))
        async with (
            watching(rig, "/api/events") as stream,
            rig.session.ws_connect(f"{rig.url}/hub", headers=headers) as socket,
        ):
            while stream.comments < 3:
                # Each comes after a longer rest than a request has to arrive.
                line = await stream.response.content.readline()
                stream.comments += line.startswith(b":")
            await socket.send_json({"type": "ping"})
            assert (await socket.receive_json())["type"] == "pong"
            assert not polling.done()
        polling.cancel()


# so many connections


async def test_connections_are_bounded_before_anybody_is_known() -> None:
    async with running_hub(limits=HubLimits(max_connections=3)) as rig, AsyncExitStack() as stack:
        for _ in range(3):
            reader, writer = await stack.enter_async_context(
                wire(rig, b"GET /health/live HTTP/1.1\r\nhost: h\r\n\r\n")
            )
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        async with wire(rig) as (refused, _):
            answer = await rest(refused)
            assert answer.startswith(b"HTTP/1.1 503") and b"retry-after: 5" in answer
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(60):
            while (await rig.get("/health/live")).status != 200:
                await asyncio.sleep(0.01)


async def test_one_address_does_not_take_every_connection() -> None:
    one = HubLimits(max_connections_per_address=1)
    async with running_hub(limits=one) as rig, wire(rig), wire(rig) as (refused, _):
        answer = await rest(refused)
        assert answer.startswith(b"HTTP/1.1 429") and b"retry-after: 5" in answer


# places


async def parked(rig: HubRig, key: str | None = None, poll_id: str = "1") -> Any:
    body = {"worker_id": "gpu-a", "poll_id": poll_id, "wait_s": 30}
    return await rig.post("/api/worker/poll", body, role=Role.WORKER, key=key)


async def stays(rig: HubRig, kind: str, stack: AsyncExitStack) -> None:
    """Takes a place for as long as the stack."""
    headers = {"authorization": f"Bearer {rig.keys[Role.ADMIN]}"}
    match kind:
        case "stream":
            await stack.enter_async_context(watching(rig, "/api/events"))
        case "socket":
            await stack.enter_async_context(rig.session.ws_connect(f"{rig.url}/hub", headers=headers))
        case _:
            polling = asyncio.create_task(parked(rig, rig.keys[Role.ADMIN]))
            stack.callback(polling.cancel)
            await until(lambda: rig.engine.idle_slots)


async def refused(rig: HubRig, kind: str) -> tuple[int, str, str]:
    """Status, code and when to come again."""
    headers = {"authorization": f"Bearer {rig.keys[Role.ADMIN]}"}
    if kind == "socket":
        # As a plain request, so that the body of the refusal can be read.
        upgrade = {
            "connection": "Upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
        }
        async with rig.session.get(f"{rig.url}/hub", headers=headers | upgrade) as response:
            return (
                response.status,
                (await response.json(content_type=None))["code"],
                response.headers["retry-after"],
            )
    if kind == "stream":
        answer = await rig.get("/api/events")
    else:
        answer = await parked(rig, rig.keys[Role.ADMIN], "2")
    return answer.status, answer.code, answer.headers["retry-after"]


@pytest.mark.parametrize("kind", ["stream", "socket", "poll"])
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (HubLimits(max_streams=1, max_sockets=1, max_parked=1), (503, "unavailable", "5")),
        (HubLimits(max_held_per_key=1), (429, "rate_limited", "5")),
        (HubLimits(max_held_per_address=1), (429, "rate_limited", "5")),
    ],
    ids=["in all", "of one key", "from one address"],
)
async def test_places_are_bounded_and_one_that_is_given_back_is_free(
    kind: str, limits: HubLimits, expected: tuple[int, str, str]
) -> None:
    async with running_hub(limits=limits) as rig:
        await register(rig)
        async with AsyncExitStack() as stack:
            await stays(rig, kind, stack)
            assert await refused(rig, kind) == expected
            # Whoever does not stay is served.
            assert (await rig.get("/api/stats")).status == 200
        await until(lambda: not any(rig.hub.connection_limits.counts().values()))
        async with AsyncExitStack() as stack:
            await stays(rig, kind, stack)


async def test_a_key_that_took_all_it_may_leaves_room_for_another() -> None:
    async with running_hub(limits=HubLimits(max_held_per_key=1)) as rig, AsyncExitStack() as stack:
        await stays(rig, "stream", stack)
        assert (await refused(rig, "socket"))[0] == 429, "of every kind together"
        async with watching(rig, "/api/events", role=Role.VIEWER):
            pass


async def test_a_stream_that_is_refused_for_another_reason_keeps_no_place() -> None:
    async with running_hub(limits=HubLimits(max_streams=1)) as rig:
        for path in ("/api/jobs/nobody/progress", "/api/events?tenant=other"):
            for _ in range(2):
                assert (await rig.get(path, role=Role.TENANT)).status in (403, 404)
        assert not any(rig.hub.connection_limits.counts().values())


@pytest.mark.parametrize(
    "second",
    [
        b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n",
        b"GET /hub HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
    ],
    ids=["plain", "upgrade"],
)
async def test_a_stream_with_a_request_behind_it_ends_with_its_connection(second: bytes) -> None:
    async with running_hub(limits=HASTY) as rig:
        key = rig.keys[Role.ADMIN].encode()
        first = b"GET /api/events HTTP/1.1\r\nhost: h\r\nauthorization: Bearer " + key + b"\r\n\r\n"
        async with wire(rig, first) as (reader, writer):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            writer.write(second)
        await until(lambda: not rig.hub.in_flight)
        assert not any(rig.hub.connection_limits.counts().values())


def test_the_limits_of_connections_hold_what_the_limits_of_places_promise() -> None:
    usual = HubLimits()
    assert usual.max_connections >= max(usual.max_streams, usual.max_sockets, usual.max_parked)
    assert usual.max_connections_per_address >= usual.max_held_per_address >= usual.max_held_per_key


async def test_requests_behind_one_another_are_read_a_few_at_a_time_and_all_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead: list[int] = []
    read = Connection.on_headers_complete

    def note(self: Connection) -> None:
        read(self)
        ahead.append(len(self.pipeline))

    monkeypatch.setattr(Connection, "on_headers_complete", note)
    body = b'{"payload": {}}'
    posts = b"POST /api/jobs HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    async with running_hub() as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write((b"GET / HTTP/1.1\r\n\r\n" * 50 + posts) * 100)
        found = b""
        async with asyncio.timeout(60):
            while found.count(b"HTTP/1.1 ") < 5_100:
                piece = await reader.read(1 << 20)
                assert piece, "the hub ended the connection"
                found += piece
        writer.close()
    assert len(ahead) == 5_100
    assert max(ahead) < 200, "each of them takes memory, and the time of others"
