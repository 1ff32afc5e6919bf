"""Hostile bodies to every route and over the WebSocket, without a key and with one of every role: nobody else waits for
them, and none takes more memory than a few times what its route allows.

The bodies are made from the table of routes, so a new route is covered as soon as it stands there. The hub runs in a
process of its own, with its default bound scaled down where every route is tried, and as it is for the dearest ones.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from tests.hub._hostile import Hostile, bodies, dearest, few, forms, send, values

from comfyfleet.hub.http.limits import HubLimits
from comfyfleet.model.access import Role
from comfyfleet.wire.route import LARGE_BYTES, Route
from comfyfleet.wire.routes import ROUTES
from comfyfleet.wire.websocket import AGENT_KINDS, AGENT_MESSAGE_BYTES, AGENT_PROTOCOL

LAG_S = 0.1
MEMORY_TIMES = 4
BESIDE_BYTES = 16 * 1024 * 1024
"""What a process takes now and then whatever is asked of it."""
TRIES = 4

SCALED = 160 * 1024
"""Beyond what is read on the event loop."""
FORM_BYTES = 4 * 1024 * 1024
"""Of the file in a form: far more than the memory that its route may take."""
BY_NAME = {route.name: route for route in ROUTES}


class TooMuch(AssertionError):
    """The hub was kept from its work, or took too much memory."""


class HostileHub:
    """A hub in a process of its own, and what a piece of work made it do."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, keys: dict[str, str]) -> None:
        self._process = process
        self.url = url
        self.keys = keys

    async def _ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(what.encode() + b"\n")
        answer: dict[str, Any] = msgspec.json.decode(await self._process.stdout.readline())
        return answer

    async def check(
        self, what: str, limit: int, work: Callable[[], Awaitable[object]], tries: int = TRIES
    ) -> None:
        """A machine may be busy: what is wrong is wrong every time."""
        found: list[dict[str, Any]] = []
        most = MEMORY_TIMES * limit + BESIDE_BYTES
        while len(found) < tries:
            await self._ask("begin")
            await work()
            found.append(await self._ask("end"))
            if found[-1]["lag_s"] <= LAG_S and found[-1]["grown_bytes"] <= most:
                return
        raise TooMuch(f"{what}, which may have {limit} bytes: {found}")


@asynccontextmanager
async def hostile_hub(limits: HubLimits, max_open_bytes: int) -> AsyncIterator[HostileHub]:
    given = msgspec.json.encode(limits).decode(), str(max_open_bytes)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.hub._hostile_hub", *given, stdin=-1, stdout=-1
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        first = msgspec.json.decode(await process.stdout.readline())
        yield HostileHub(process, first["url"], first["keys"])
    finally:
        process.stdin.close()
        await process.wait()


def generous(**more: Any) -> HubLimits:
    """With nothing in the way but the bounds of bodies."""
    return HubLimits(requests_per_s=1e6, burst=1_000_000, max_wait_s=0.01, **more)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scaled() -> AsyncIterator[HostileHub]:
    bounds = {"max_body_bytes": SCALED, "max_unpacked_bytes": SCALED, "max_frame_bytes": AGENT_MESSAGE_BYTES}
    # What was accepted is small altogether: a list of it is no body.
    async with hostile_hub(generous(**bounds), 2 * SCALED) as hub:
        yield hub


Attack = tuple[Role | None, Hostile]


async def attack(hub: HostileHub, route: Route, limit: int, every: Sequence[Attack]) -> None:
    """All of them under one measurement; if that finds something, one by one."""
    try:
        await hub.check(route.name, limit, lambda: _send_all(hub, route, every), tries=1)
    except TooMuch:
        for role, hostile in every:
            what = f"{hostile.name} to {route.name} of {role}"
            await hub.check(what, limit, partial(_send_all, hub, route, [(role, hostile)]))


async def _send_all(hub: HostileHub, route: Route, every: Iterable[Attack]) -> None:
    for role, hostile in every:
        key = None if role is None else hub.keys[role.value]
        answer = await send(hub.url, route, hostile, hostile.body(), key)
        is_full = answer.status == 503 and b"queue_full" in answer.content
        assert is_full or 200 <= answer.status < 500, (route.name, role, hostile.name, answer)
        if route.roles and role not in route.roles:
            assert answer.status in (401, 403), (route.name, role, hostile.name, answer)


def bound(route: Route) -> int:
    return min(SCALED, route.max_bytes)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", BY_NAME)
async def test_no_body_stops_the_hub(scaled: HostileHub, name: str) -> None:
    route = BY_NAME[name]
    every: list[Attack] = [(role, each) for role in (None, *Role) for each in few(bound(route))]
    if route.body is not None:
        every += [(_whoever_may(route), each) for each in bodies(route, bound(route))]
    if route.takes_form:
        every += [(role, each) for role in (None, *Role) for each in forms(FORM_BYTES)]
    await attack(scaled, route, bound(route), every)


def _whoever_may(route: Route) -> Role | None:
    if Role.TENANT in route.roles:
        return Role.TENANT
    return sorted(route.roles)[-1] if route.roles else None


# over the WebSocket


async def _say(hub: HostileHub, role: Role, protocol: str | None, size: int, names: Iterable[str]) -> None:
    """Each value as a whole message, and in messages that say what they are."""
    made = values(size)
    said = [b"@", b'{"type":"submit_job","payload":{"1":{"class_type":"A","inputs":{"x":@}}}}']
    said += [b'{"type":"%s","job_id":"x","result":@}' % kind.encode() for kind in ("complete_job", "ping")]
    if protocol is not None:
        said = [b'{"type":"%s","request_id":1,"body":@}' % kind.encode() for kind in AGENT_KINDS]
    headers = {"authorization": f"Bearer {hub.keys[role.value]}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.ws_connect(
            f"{hub.url}/hub", protocols=(protocol,) if protocol else (), compress=15, max_msg_size=0
        ) as line,
    ):
        for name in names:
            for each in said:
                await line.send_str(each.replace(b"@", made[name]()).decode())
                answer = msgspec.json.decode((await line.receive(60)).data)
                while not line.closed and answer["type"] not in ("error", "pong", "job_submitted"):
                    answer = msgspec.json.decode((await line.receive(60)).data)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("protocol", [None, AGENT_PROTOCOL])
async def test_no_frame_stops_the_hub(scaled: HostileHub, protocol: str | None) -> None:
    for role in Role:
        work = partial(_say, scaled, role, protocol, SCALED, values(SCALED))
        await scaled.check(f"{protocol} of {role}", SCALED, work)


# full size

DEAREST = ("submit", "worker_complete")


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_no_body_of_the_full_size_stops_the_hub() -> None:
    """With the default bounds. What is accepted is worked on, and kept, in the presence of everybody else."""
    async with hostile_hub(generous(), 2**40) as hub:
        for name in DEAREST:
            route = BY_NAME[name]
            every: list[Attack] = [(_whoever_may(route), each) for each in dearest(route, LARGE_BYTES)]
            await attack(hub, route, LARGE_BYTES, every)
        size = HubLimits().max_frame_bytes
        work = partial(_say, hub, Role.TENANT, None, size - 4_096, ["a wide string", "small objects"])
        await hub.check("a frame", size, work)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("before", [b"", b"POST /api/jobs HTTP/1.1\r\ncontent-length: 1\r\n\r\n1"])
async def test_no_number_of_requests_behind_one_another_stops_the_hub(
    scaled: HostileHub, before: bytes
) -> None:
    host, port = scaled.url.removeprefix("http://").split(":")
    count = 14_000

    async def flood() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(before + b"GET / HTTP/1.1\r\n\r\n" * count)
        found, tail = 0, b""
        async with asyncio.timeout(60):
            while found < count + bool(before):
                piece = tail + await reader.read(1 << 20)
                assert piece != tail, f"the hub ended the connection after {found} answers"
                found += piece.count(b"HTTP/1.1 ")
                tail = piece[-8:]
        writer.close()

    await scaled.check(f"{count} requests on one connection", SCALED, flood)
