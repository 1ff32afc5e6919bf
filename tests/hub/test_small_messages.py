"""An agent on a WebSocket behind a proxy that takes smaller messages than the hub."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.hub._hub import HubRig, graph, running_hub
from tests.worker._scripted import quick, until

from comfyfleet.model.access import Role
from comfyfleet.model.calls import Completion, Poll, RegisterWorker
from comfyfleet.model.ids import PollId, WorkerId
from comfyfleet.model.job import JobResult
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.wire.websocket import AGENT_PROTOCOL
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.simulated import SimulatedConnector
from comfyfleet.worker.transports.websocket import WebSocketWorkerApi

GPU = WorkerId("gpu-a")
OFFER = RegisterWorker(GPU, Capabilities((Service("comfyui"),)), slots=8)
LIMIT = 64 * 1024
LARGE = "x" * 200_000


def large_graph() -> dict[str, Any]:
    workflow = graph()
    workflow["1"]["inputs"]["text"] = LARGE
    return workflow


class Proxy:
    """Passes everything on, and closes a WebSocket for a message that is too large: in words (1009) or without any."""

    def __init__(self, hub: str, says_why: bool) -> None:
        self.hub = hub
        self.says_why = says_why
        self.sockets = 0
        self.closed_for_size = 0
        self.url = ""
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/hub", self._socket)
        app.router.add_route("*", "/{path:.*}", self._request)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with aiohttp.ClientSession(auto_decompress=False) as self._session:
                yield self
        finally:
            await runner.cleanup()

    async def _request(self, request: web.Request) -> web.Response:
        assert self._session is not None
        # What it was packed with is undone by reading it.
        headers = {
            name: value
            for name, value in _passed(request.headers).items()
            if name.lower() != "content-encoding"
        }
        async with self._session.request(
            request.method,
            self.hub + request.path_qs,
            data=await request.read(),
            headers=headers,
        ) as answer:
            return web.Response(
                status=answer.status, body=await answer.read(), headers=_passed(answer.headers)
            )

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        assert self._session is not None
        self.sockets += 1
        near = web.WebSocketResponse(protocols=(AGENT_PROTOCOL,), max_msg_size=0)
        await near.prepare(request)
        headers = {"authorization": request.headers["authorization"]}
        async with self._session.ws_connect(
            f"{self.hub}/hub", protocols=(AGENT_PROTOCOL,), headers=headers, max_msg_size=0
        ) as far:
            ways = {
                asyncio.create_task(self._pass_on(request, near, near, far)),
                asyncio.create_task(self._pass_on(request, near, far, near)),
            }
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            await near.close()
        return near

    async def _pass_on(
        self,
        request: web.Request,
        near: web.WebSocketResponse,
        source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
        target: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    ) -> None:
        async for message in source:
            if len(message.data) > LIMIT:
                self.closed_for_size += 1
                if self.says_why:
                    await near.close(code=aiohttp.WSCloseCode.MESSAGE_TOO_BIG)
                elif request.transport is not None:
                    request.transport.abort()
                return
            await target.send_str(message.data)


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    dropped = {"host", "content-length", "transfer-encoding", "connection", "keep-alive"}
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


@asynccontextmanager
async def behind_a_proxy(says_why: bool = True) -> AsyncIterator[tuple[HubRig, Proxy, WebSocketWorkerApi]]:
    async with (
        running_hub() as rig,
        Proxy(rig.url, says_why).running() as proxy,
        WebSocketWorkerApi(proxy.url, rig.keys[Role.WORKER]) as api,
    ):
        yield rig, proxy, api


async def test_a_message_that_the_proxy_does_not_take_goes_over_http_and_so_do_those_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with behind_a_proxy() as (rig, proxy, api):
        await api.register(OFFER)
        for number in range(3):
            job_id = await rig.submit()
            job = await api.poll(Poll(GPU, PollId(str(number)), 5))
            assert job is not None
            result = JobResult(outputs={"9": {"text": [LARGE]}})
            await api.complete(Completion(job.ref, result))
            kept = (await rig.get(f"/api/jobs/{job_id}/result")).body["result"]
            assert kept["outputs"] == result.outputs
        # The first was closed for; from then on it is known.
        assert (proxy.closed_for_size, proxy.sockets) == (1, 2)
    (told,) = (record.getMessage() for record in caplog.records if "proxy" in record.getMessage())
    assert "over HTTP" in told


async def test_a_job_that_the_proxy_does_not_let_through_is_asked_for_over_http_under_the_same_lease() -> (
    None
):
    async with behind_a_proxy() as (rig, proxy, api):
        await api.register(OFFER)
        polling = asyncio.create_task(api.poll(Poll(GPU, PollId("1"), 60)))
        await until(lambda: rig.engine._matcher.idle_slots == 1)
        job_id = await rig.submit(workflow=large_graph())
        job = await asyncio.wait_for(polling, 60)
        assert job is not None and job.job_id == job_id
        assert LARGE in str(job.workflow)
        attempts = (await rig.get(f"/api/jobs/{job_id}")).body["history"]
        assert len(attempts) <= 1, "it was leased once"
        await api.complete(Completion(job.ref, JobResult()))
        assert proxy.closed_for_size == 1
        for number in (2, 3):
            await rig.submit(workflow=large_graph())
            assert await api.poll(Poll(GPU, PollId(str(number)), 5)) is not None
        assert proxy.closed_for_size == 1


async def test_jobs_that_a_proxy_drops_without_a_reason_are_asked_for_over_http_in_the_end() -> None:
    async with behind_a_proxy(says_why=False) as (rig, proxy, api):
        connector = SimulatedConnector()
        async with Agent(api, GPU, [connector], quick(slots=1)):
            job_id = await rig.submit(workflow=large_graph())
            async with asyncio.timeout(60):
                while (await rig.get(f"/api/jobs/{job_id}/result")).status == 202:
                    await asyncio.sleep(0.02)
        assert (connector.run_count, proxy.closed_for_size) == (1, 5)


@pytest.mark.parametrize("says_why", [True, False])
async def test_an_agent_behind_it_ends_every_job_large_or_small(says_why: bool) -> None:
    """Without a reason too: a large message that was lost twice goes over HTTP."""

    async def big(*_: object) -> JobResult:
        return JobResult(outputs={"9": {"text": [LARGE]}})

    async with behind_a_proxy(says_why) as (rig, proxy, api):
        connector = SimulatedConnector(behaviour=big)
        async with Agent(api, GPU, [connector], quick(slots=2)):
            jobs = [await rig.submit() for _ in range(6)]
            async with asyncio.timeout(60):
                for job_id in jobs:
                    while (answer := await rig.get(f"/api/jobs/{job_id}/result")).status == 202:
                        await asyncio.sleep(0.02)
                    assert answer.body["result"]["outputs"]["9"]["text"] == [LARGE]
        assert connector.run_count == len(jobs), "none ran twice"
        assert proxy.closed_for_size <= 4
