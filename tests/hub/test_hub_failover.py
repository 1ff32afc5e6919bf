"""A worker and a caller that know two hubs on one store: whichever is there is enough, and no job runs twice."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from tests.acceptance._process import CLI, read_until, started
from tests.hub._hub import HubRig, graph, running_hub
from tests.servers.redis_fixtures import some_server, with_prefix

from comfyfleet.client.client import FleetClient
from comfyfleet.hub.http.server import HubServerSettings
from comfyfleet.model.access import Role
from comfyfleet.model.calls import LeasedJob
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.worker.agent import Agent, AgentSettings
from comfyfleet.worker.connectors.simulated import Reporter, SimulatedConnector
from comfyfleet.worker.transports.http import HttpWorkerApi
from comfyfleet.worker.transports.websocket import WebSocketWorkerApi


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with some_server() as url:
        yield url


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class Pair:
    """Two hubs on one store, each of which can go and come back at its address."""

    def __init__(self, store_url: str) -> None:
        self._store_url = store_url
        self._ports = {"a": free_port(), "b": free_port()}
        self._lives: dict[str, AsyncExitStack] = {}
        self.keys: dict[Role, str] = {}

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports.values()]

    def port(self, name: str) -> int:
        return self._ports[name]

    async def come(self, name: str) -> HubRig:
        life = self._lives[name] = AsyncExitStack()
        settings = HubServerSettings(port=self._ports[name], graceful_s=0.1)
        rig = await life.enter_async_context(running_hub(settings, store_url=self._store_url))
        self.keys = self.keys or rig.keys
        return rig

    async def go(self, name: str) -> None:
        await self._lives.pop(name).aclose()

    async def close(self) -> None:
        for name in list(self._lives):
            await self.go(name)


@pytest_asyncio.fixture
async def pair(server: str) -> AsyncIterator[Pair]:
    pair = Pair(with_prefix(server))
    yield pair
    await pair.close()


class Runs:
    """What the worker was given; each run waits until it is told to end."""

    def __init__(self) -> None:
        self.attempts: list[str] = []
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, job: LeasedJob, report: Reporter) -> JobResult:
        self.attempts.append(job.attempt_id)
        self.began.set()
        await self.may_end.wait()
        return JobResult({"9": {"text": [job.attempt_id]}})


@pytest.mark.parametrize("transport", [HttpWorkerApi, WebSocketWorkerApi])
async def test_a_worker_and_a_caller_go_to_the_hub_that_answers_and_nothing_is_lost_or_run_twice(
    pair: Pair, transport: type[HttpWorkerApi]
) -> None:
    runs = Runs()
    await pair.come("b")  # A is down from the start.
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(transport(pair.urls, pair.keys[Role.WORKER]))
        agent = Agent(api, WorkerId("gpu"), [SimulatedConnector(behaviour=runs)])
        await stack.enter_async_context(agent)
        client = await stack.enter_async_context(FleetClient(pair.urls, pair.keys[Role.ADMIN]))
        async with asyncio.timeout(60):
            first = await client.submit(graph())
            assert (await client.wait(first.id)).status == "completed"

        # B goes in the middle of a run, while A is back; then A goes and B is back.
        for leaves, stays in (("b", "a"), ("a", "b")):
            runs.began.clear()
            runs.may_end.clear()
            job = await client.submit(graph())
            async with asyncio.timeout(60):
                await runs.began.wait()
                rig = await pair.come(stays)
                waiting = asyncio.create_task(client.wait(job.id))
                await pair.go(leaves)
                # Another one is taken at the hub that is left, before the run that began at the other has ended.
                beside = await client.submit(graph(), priority=-1)
                assert (await client.get(job.id)).status == "leased"
                runs.may_end.set()
                assert (await waiting).status == "completed"
                assert (await client.wait(beside.id)).status == "completed"
            for ended in (await client.get(job.id), await client.get(beside.id)):
                assert (ended.attempts, len(ended.history), ended.worker_id) == (1, 1, "gpu")
            (worker,) = (await rig.get("/api/workers")).body["workers"]
            assert (worker["id"], worker["failed"]) == ("gpu", 0)
    assert len(runs.attempts) == len(set(runs.attempts)) == 5


async def test_a_submission_whose_answer_was_lost_is_one_job_at_the_other_hub(pair: Pair) -> None:
    await pair.come("b")
    dropped: list[bytes] = []

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dropped.append(await reader.read(65536))
        writer.close()

    port = int(pair.urls[0].rpartition(":")[2])
    async with (
        await asyncio.start_server(swallow, "127.0.0.1", port),
        FleetClient(pair.urls, pair.keys[Role.ADMIN]) as client,
    ):
        job = await client.submit(graph())
        assert dropped and b"idempotency-key" in dropped[0].lower()
        assert [each.id for each in (await client.jobs()).jobs] == [job.id]
        assert client.url == pair.urls[1]


PAGE = b"<!doctype html><title>It works</title>"


@asynccontextmanager
async def page(port: int, status: str) -> AsyncIterator[None]:
    """A web server, a proxy in front of a hub that is gone, or a ComfyUI."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            asked = await reader.read(1 << 20)
            told, kind, text = status, "text/html", PAGE
            if status == "comfyui":
                told, kind, text = "405 Method Not Allowed", "text/plain", b"405: Method Not Allowed"
                if b" /system_stats " in asked:
                    told, kind, text = "200 OK", "application/json", b'{"system": {}, "devices": []}'
            head = f"HTTP/1.1 {told}\r\nContent-Type: {kind}\r\nContent-Length: {len(text)}\r\n"
            writer.write(head.encode() + b"Connection: close\r\n\r\n" + text)
            await writer.drain()
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", port):
        yield


def somebody_else(what: str, port: int) -> AbstractAsyncContextManager[object]:
    if what == "hub of another fleet":
        return running_hub(HubServerSettings(port=port, graceful_s=0.1))
    return page(port, what)


OTHERS = ["502 Bad Gateway", "404 Not Found", "200 OK", "comfyui", "hub of another fleet"]


@pytest.mark.parametrize("transport", [HttpWorkerApi, WebSocketWorkerApi])
@pytest.mark.parametrize("what", OTHERS)
async def test_a_worker_passes_over_an_address_where_somebody_else_answers(
    pair: Pair, what: str, transport: type[HttpWorkerApi]
) -> None:
    await pair.come("b")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(somebody_else(what, pair.port("a")))
        client = await stack.enter_async_context(FleetClient(pair.urls[1], pair.keys[Role.ADMIN]))
        api = await stack.enter_async_context(transport(pair.urls, pair.keys[Role.WORKER]))
        await stack.enter_async_context(
            Agent(api, WorkerId("gpu"), [SimulatedConnector()], AgentSettings(backoff_cap_s=0.1))
        )
        job = await client.submit(graph())
        assert (await client.wait(job.id, 60)).status == "completed"


@pytest.mark.parametrize("what", OTHERS[:-1])
async def test_a_caller_passes_over_an_address_where_somebody_else_answers(pair: Pair, what: str) -> None:
    await pair.come("b")
    async with (
        somebody_else(what, pair.port("a")),
        FleetClient(pair.urls, pair.keys[Role.ADMIN]) as client,
    ):
        job = await client.submit(graph())
        assert (await client.get(job.id)).status == "queued"
        assert client.url == pair.urls[1]


async def test_a_caller_whose_key_one_hub_does_not_know_is_told_and_goes_back_to_the_other(
    pair: Pair,
) -> None:
    await pair.come("b")
    async with (
        somebody_else("hub of another fleet", pair.port("a")),
        FleetClient(pair.urls, pair.keys[Role.ADMIN]) as client,
    ):
        with pytest.raises(Refusal) as refused:
            await client.jobs()
        assert refused.value.code is RefusalCode.UNAUTHENTICATED
        assert (await client.jobs()).jobs == ()


@pytest.mark.parametrize("what", OTHERS[1:-1])
async def test_where_nobody_is_a_hub_the_caller_is_told_so(pair: Pair, what: str) -> None:
    async with (
        somebody_else(what, pair.port("a")),
        somebody_else(what, pair.port("b")),
        FleetClient(pair.urls, patience_s=0.2) as client,
    ):
        with pytest.raises(Fault, match="ComfyUI server answers at" if what == "comfyui" else "not a Comfy"):
            await client.jobs()


async def test_where_no_hub_answers_the_caller_is_told_within_its_patience(pair: Pair) -> None:
    async with FleetClient(pair.urls, patience_s=0.2) as client:
        with pytest.raises(Fault, match="cannot reach the hub at"):
            await client.jobs()


async def test_a_hub_that_is_killed_is_left_by_a_worker_that_was_named_both(
    server: str, tmp_path: Path
) -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    store = with_prefix(server)

    def hub(port: int) -> tuple[str, ...]:
        return (
            *CLI,
            "hub",
            "--open",
            "--port",
            str(port),
            "--store",
            store,
            "--data",
            str(tmp_path / str(port)),
        )

    named = [word for url in urls for word in ("--hub", url)]
    worker = (*CLI, "worker", *named, "--data", str(tmp_path / "w"), "--simulated", "0.01", "--name", "gpu")
    with started(*hub(ports[1])) as second, started(*worker) as program:
        await asyncio.to_thread(read_until, second, lambda line: "answers at" in line)
        await asyncio.to_thread(read_until, program, lambda line: ": online" in line)
        async with FleetClient(urls) as client:
            assert (await client.wait((await client.submit(graph())).id, 60)).status == "completed"
            with started(*hub(ports[0])) as first:
                await asyncio.to_thread(read_until, first, lambda line: "answers at" in line)
                second.send_signal(signal.SIGKILL)
                second.wait()
                job = await client.submit(graph())
                assert (await client.wait(job.id, 60)).status == "completed"
                assert [(each.id, each.status.value) for each in await client.workers()] == [("gpu", "idle")]
                assert (await client.get(job.id)).attempts == 1
