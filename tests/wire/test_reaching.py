"""An address that cannot be used is told with its cause and the next step: of a ComfyUI server, and of a hub."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tests.hub._hub import running_hub
from tests.outbound._names import certificate
from tests.worker._comfyui import tuned
from tests.worker._scripted import no_http

from comfyfleet.client.client import FleetClient
from comfyfleet.model.errors import Fault, Refusal
from comfyfleet.model.ids import WorkerId
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.transports.http import HttpWorkerApi
from comfyfleet.worker.transports.websocket import WebSocketWorkerApi

CLOSED = "http://127.0.0.1:9"
NO_NAME = "http://no-such-host.invalid:8188"


@asynccontextmanager
async def answering(status: int, text: str = "", trust: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server that answers everything alike."""

    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(status=status, text=text)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=trust)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"{'http' if trust is None else 'https'}://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def defect_of(url: str) -> str:
    async with ComfyUI(url, tuned(verify_tls=True)) as server:
        assert not await server.check_health()
        assert server.defect is not None
        # Hubs are told of it, and their callers: they are not to know where the server is.
        assert server.address.host not in server.defect and str(server.address.port) not in server.defect
        return server.defect


async def test_a_comfyui_server_that_cannot_be_used_is_told_with_the_cause(tmp_path: Path) -> None:
    assert "connection refused. Is ComfyUI running there" in await defect_of(CLOSED)
    assert "the host name is unknown" in await defect_of(NO_NAME)
    for status in (401, 403):
        async with answering(status) as url:
            assert f"refuses our key or password (status {status})" in await defect_of(url)
    async with answering(502) as url:
        assert "an error (status 502)" in await defect_of(url)
    async with answering(200, "<html>") as url:
        assert "is not ComfyUI (status 200)" in await defect_of(url)
        assert "Is it http:// there?" in await defect_of(url.replace("http:", "https:"))
    async with no_http() as url:
        assert "does not speak HTTP" in await defect_of(url)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*await asyncio.to_thread(certificate, tmp_path, "elsewhere.example"))
    async with answering(200, trust=context) as url:
        assert "certificate is not trusted" in await defect_of(url)
        assert "Is it https:// there?" in await defect_of(url.replace("https:", "http:"))


async def test_the_address_of_a_hub_given_as_a_comfyui_server_is_told_as_that() -> None:
    async with running_hub() as rig:
        assert "a ComfyFleet hub answers there, not ComfyUI" in await defect_of(rig.url)


async def test_the_address_of_a_comfyui_server_given_as_a_hub_is_told_as_that() -> None:
    async with FakeComfyUI() as fake:
        words = f"a ComfyUI server answers at {fake.url}, not a hub. Give it with --server"
        # At once: to try again changes nothing.
        async with FleetClient(fake.url, "cfk_x", patience_s=600) as client:
            with pytest.raises(Fault, match=words):
                await client.stats()
            with pytest.raises(Fault, match=words):
                await client.submit({"1": {"class_type": "A", "inputs": {}}})
        # It has lists of jobs of its own, in which an empty one looks like ours.
        async with FleetClient(fake.url, "cfk_x", patience_s=600) as client:
            with pytest.raises(Fault, match=words):
                await client.jobs()
        for kind in (HttpWorkerApi, WebSocketWorkerApi):
            async with kind(fake.url, "cfk_x") as api:
                with pytest.raises(Fault, match=words):
                    await api.unregister(WorkerId("gpu"), "stopped")


async def test_a_hub_that_cannot_be_used_is_told_with_the_cause() -> None:
    for url, words in (
        (CLOSED, "connection refused. Is the hub running there"),
        (NO_NAME, "the host name is unknown"),
    ):
        async with FleetClient(url, patience_s=0) as client:
            with pytest.raises(Fault, match=f"cannot reach the hub at {url}: {words}"):
                await client.stats()
        for kind in (HttpWorkerApi, WebSocketWorkerApi):
            async with kind(url) as api:
                with pytest.raises(Fault, match=f"cannot reach the hub at {url}: {words}"):
                    await api.unregister(WorkerId("gpu"), "stopped")
    async with answering(404) as url, FleetClient(url, patience_s=0) as client:
        with pytest.raises(Fault, match=r"is not a ComfyFleet hub \(status 404\)"):
            await client.stats()
    async with running_hub() as rig, HttpWorkerApi(rig.url, "cfk_wrong") as api:
        with pytest.raises(Refusal, match="key"):
            await api.unregister(WorkerId("gpu"), "stopped")
