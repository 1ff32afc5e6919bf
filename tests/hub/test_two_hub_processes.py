"""Two hubs on one Redis as real processes: submitted at one, run by a worker of the other, watched at the first."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tests.acceptance._process import CLI, picture_workflow, read_until, started
from tests.hub._watching import Stream
from tests.servers.redis_fixtures import own_server
from tests.servers.redis_proxy import CuttingProxy
from tests.servers.redis_server import RedisServer


class HubProcess:
    """Somebody who asks it."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        async with self._session.request(method, self.url + path, json=body) as response:
            assert response.status < 300, await response.text()
            return None if response.status == 204 else await response.json()

    async def call(self, name: str, **body: Any) -> Any:
        return await self.ask("POST", f"/api/worker/{name}", body)

    async def submit(self) -> str:
        return str((await self.ask("POST", "/api/jobs", {"payload": {"workflow": picture_workflow()}}))["id"])

    @asynccontextmanager
    async def watching(self, job_id: str) -> AsyncIterator[Stream]:
        async with self._session.get(f"{self.url}/api/jobs/{job_id}/progress") as response:
            assert response.status == 200
            yield Stream(response)


class Two:
    def __init__(self, proxy: CuttingProxy, folder: Path, programs: ExitStack) -> None:
        self.proxy = proxy
        self._folder = folder
        self._programs = programs
        self.a: HubProcess
        self.b: HubProcess

    async def start(self, *arguments: str, until: str) -> tuple[subprocess.Popen[str], str]:
        env = {"COMFYFLEET_DATA": str(self._folder / str(id(arguments))), "REDIS_URL": "", "HUB_PORT": ""}
        process = self._programs.enter_context(started(*CLI, *arguments, env=env))
        lines = await asyncio.to_thread(read_until, process, lambda line: until in line)
        return process, lines[-1]

    async def hub(self, session: aiohttp.ClientSession) -> HubProcess:
        store = f"redis://127.0.0.1:{self.proxy.port}/0"
        _, line = await self.start("hub", "--open", "--port", "0", "--store", store, until="answers at")
        return HubProcess(line.split()[-1], session)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with own_server(is_durable=False) as server:
        yield server


@pytest_asyncio.fixture
async def two(server: RedisServer, tmp_path: Path) -> AsyncIterator[Two]:
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(CuttingProxy(server.port))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        programs = ExitStack()
        # In a thread: whoever leaves says so to Redis, and the proxy must be there to pass it on.
        stack.push_async_callback(asyncio.to_thread, programs.close)
        two = Two(proxy, tmp_path, programs)
        two.a, two.b = await asyncio.gather(two.hub(session), two.hub(session))
        yield two


async def test_a_worker_of_one_hub_runs_what_was_submitted_and_is_watched_at_the_other(two: Two) -> None:
    worker = ("worker", "--hub", two.b.url, "--simulated", "0.2", "--name", "gpu-b")
    await two.start(*worker, until=": online")
    job_id = await two.a.submit()
    async with two.a.watching(job_id) as stream:
        assert (await stream.until("leased")).data["data"]["worker_id"] == "gpu-b"
        assert (await stream.rest())[-1].kind == "completed"
        assert [each.id for each in stream.facts] == [1, 2, 3]


async def test_the_same_poll_at_the_other_hub_gets_the_same_lease(two: Two) -> None:
    services = {"services": ["comfyui"]}
    await two.b.call("register", worker_id="gpu-c", capabilities=services)
    job_id = await two.a.submit()
    given = await two.b.call("poll", worker_id="gpu-c", poll_id="once", wait_s=10)
    again = await two.a.call("poll", worker_id="gpu-c", poll_id="once", wait_s=0)
    assert given["job"]["id"] == job_id
    assert again["lease"] == given["lease"]
    await two.a.call("complete", lease=again["lease"], result={"outputs": {}})
    assert (await two.b.ask("GET", f"/api/jobs/{job_id}"))["status"] == "completed"


async def test_lost_wake_ups_lose_no_job_and_no_fact(two: Two) -> None:
    """That they cost a second at most is shown with time wound by hand, in tests/engine/test_several_engines.py."""
    await two.b.call("register", worker_id="gpu-d", capabilities={"services": ["comfyui"]})
    polling = asyncio.create_task(two.b.call("poll", worker_id="gpu-d", poll_id="parked", wait_s=30))
    while (await two.b.ask("GET", "/api/stats"))["idle_slots"] == 0:
        await asyncio.sleep(0.01)
    two.proxy.drops_messages = True
    job_id = await two.a.submit()
    async with two.a.watching(job_id) as stream:
        given = await polling
        assert given["job"]["id"] == job_id
        await stream.until("leased")
        await two.b.call("complete", lease=given["lease"], result={"outputs": {}})
        assert (await stream.rest())[-1].kind == "completed"
        assert [each.id for each in stream.facts] == [1, 2, 3]
    assert two.proxy.dropped > 0, "a message that nobody lost proves nothing"
