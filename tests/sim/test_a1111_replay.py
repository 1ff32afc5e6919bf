"""The fake A1111 server is faithful: recorded conversations, played against it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from tests.sim._a1111_replay import A1111Replay, settings_for, trace_names

from comfyfleet.testing.fake_a1111 import A1111Faults, FakeA1111
from comfyfleet.testing.fake_comfyui import HandClock

COMPARED = {"01": 16, "02": 9, "03": 18, "04": 10, "05": 4, "06": 5}
"""At least this many answers of each recording are compared."""


@asynccontextmanager
async def replay_of(name: str, faults: A1111Faults | None = None) -> AsyncIterator[A1111Replay]:
    clock = HandClock()
    async with (
        FakeA1111(settings_for(name), clock=clock, faults=faults) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.timeout(60),
    ):
        yield A1111Replay(name, server, clock, session)


@pytest.mark.parametrize("name", trace_names())
async def test_the_fake_answers_what_the_recorded_server_answered(name: str) -> None:
    async with replay_of(name) as replay:
        differences = await replay.play()
    assert not differences, "\n".join(differences)
    assert replay.compared >= COMPARED[name[:2]]


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("01-run-progress-and-queue", A1111Faults(fail_runs=1)),
        ("02-interrupt", A1111Faults(drop_pictures=1)),
        ("03-errors", A1111Faults(garbage_paths=["/internal"])),
        ("04-models-and-options", A1111Faults(is_starting=True)),
    ],
)
async def test_a_wrong_answer_makes_the_replay_fail(name: str, faults: A1111Faults) -> None:
    async with replay_of(name, faults) as replay:
        try:
            differences = await replay.play()
        except ValueError:
            differences = ["an answer is not JSON"]
    assert differences


async def test_a_server_with_forty_waiting_requests_is_deaf_until_enough_have_run() -> None:
    clock = HandClock()
    settings = msgspec.structs.replace(settings_for("05"), threads=3)
    async with (
        FakeA1111(settings, clock=clock) as server,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.timeout(60),
    ):
        url = f"{server.url}/sdapi/v1/txt2img"
        requests = [asyncio.create_task(session.post(url, json={"steps": 10})) for _ in range(3)]
        while server.requests.get("/sdapi/v1/txt2img", 0) < 3:
            await asyncio.sleep(0.001)
        ping = asyncio.create_task(session.get(f"{server.url}/internal/ping"))
        while server.requests.get("/internal/ping", 0) < 1:
            await asyncio.sleep(0.001)
        await clock.advance_to(0.9)
        await asyncio.sleep(0)
        assert not ping.done()
        await clock.advance_to(1.1)
        assert (await ping).status == 200
        await clock.advance_to(5.0)
        assert [(await request).status for request in requests] == [200, 200, 200]
