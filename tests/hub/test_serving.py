"""A hub on a port: TLS, a taken port, the end, the log, and what a restart on a durable store keeps."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from tests.hub._hub import hub_in_process, running_hub, submission
from tests.worker._scripted import until

from comfyfleet.client.client import FleetClient
from comfyfleet.hub.http.server import HubServer, HubServerSettings
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import WorkerId
from comfyfleet.worker.transports.http import HttpWorkerApi


async def test_a_hub_serves_tls_by_certificate_files(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate of this test, is not installed")
    certificate, key = tmp_path / "hub.pem", tmp_path / "hub.key"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    await asyncio.to_thread(
        subprocess.run,
        [*make, "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    settings = HubServerSettings(port=0, certificate_file=str(certificate), key_file=str(key))
    async with hub_in_process() as rig, HubServer(rig.hub, settings) as serving:
        assert serving.url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=str(certificate))
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{serving.url}/health", ssl=trusted) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await session.get(f"{serving.url}/health")
        plain = serving.url.replace("https:", "http:")
        async with FleetClient(plain, patience_s=0.1) as client:
            with pytest.raises(Fault, match=r"Is it https:// there\?"):
                await client.stats()
        async with HttpWorkerApi(plain, "cfk_x") as api:
            with pytest.raises(Fault, match=r"cannot reach the hub at http://.* Is it https:// there\?"):
                await api.unregister(WorkerId("gpu"), "stopped")


async def test_a_taken_port_is_named() -> None:
    async with running_hub() as rig, hub_in_process() as other:
        port = int(rig.url.rpartition(":")[2])
        with pytest.raises(Fault, match=f"cannot listen on 127.0.0.1:{port}"):
            await HubServer(other.hub, HubServerSettings(port=port)).__aenter__()


async def test_an_address_of_another_machine_is_no_matter_of_the_port() -> None:
    async with hub_in_process() as other:
        # A network for documentation: no machine has its addresses.
        with pytest.raises(Fault, match=r"203\.0\.113\.1 is no address of this machine"):
            await HubServer(other.hub, HubServerSettings(host="203.0.113.1", port=0)).__aenter__()


async def test_a_connection_that_is_kept_alive_does_not_keep_the_hub_from_ending() -> None:
    async with hub_in_process() as rig, aiohttp.ClientSession() as session:
        serving = HubServer(rig.hub, HubServerSettings(port=0, graceful_s=600))
        async with serving, session.get(f"{serving.url}/health") as response:
            await response.read()
            async with asyncio.timeout(60):
                await serving.close()
                await serving.close()
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{serving.url}/health")


async def test_connections_do_not_wait_for_a_packet_to_fill() -> None:
    # Two writes an answer and delayed acknowledgements cost 40 ms a request where Nagle's algorithm is left on.
    async with hub_in_process() as rig, HubServer(rig.hub, HubServerSettings(port=0)) as serving:
        _, writer = await asyncio.open_connection("127.0.0.1", serving.port)
        try:
            assert serving._server is not None
            await until(lambda: serving._server and serving._server.server_state.connections)
            (connection,) = serving._server.server_state.connections
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        finally:
            writer.close()


async def test_every_request_leaves_a_line_that_names_its_key_and_not_its_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with hub_in_process() as rig:
        with caplog.at_level(logging.INFO, "comfyfleet.access"):
            await rig.get("/api/jobs/nobody?token=hidden", headers={"x-request-id": "abc"})
        (record,) = [each for each in caplog.records if each.name == "comfyfleet.access"]
        line = record.getMessage()
        assert line.startswith("GET /api/jobs/nobody 404") and "request=abc" in line
        key = next(iter(rig.keys.values()))
        assert key.split("_")[1] in line
        assert "hidden" not in line and key.split("_")[2] not in line


async def test_a_restart_on_a_durable_store_loses_no_job_and_no_idempotency_key(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/fleet.db"
    key = {"Idempotency-Key": "order-1"}
    async with hub_in_process(store_url=url) as rig:
        made = await rig.post("/api/jobs", submission(metadata={"user": "42"}), headers=key)
        assert made.status == 201
        await rig.post(f"/api/jobs/{made.body['id']}/pause")
    async with hub_in_process(store_url=url) as rig:
        again = await rig.post("/api/jobs", submission(metadata={"user": "42"}), headers=key)
        assert (again.status, again.body["id"]) == (200, made.body["id"])
        differs = await rig.post("/api/jobs", submission(), headers=key)
        assert differs.code == "duplicate_differs"
        (job,) = (await rig.get("/api/jobs?metadata[user]=42")).body["jobs"]
        assert job["id"] == made.body["id"]
        assert (await rig.get(f"/api/jobs/{job['id']}")).body["is_paused"]


async def test_a_second_port_serves_the_same_for_those_who_expect_the_socket_there() -> None:
    async with (
        running_hub(is_open=True) as rig,
        HubServer(rig.hub, HubServerSettings(port=0, ws_port=0)) as serving,
        aiohttp.ClientSession() as session,
    ):
        assert serving.ws_port not in (None, serving.port)
        for port in (serving.port, serving.ws_port):
            async with session.ws_connect(f"ws://127.0.0.1:{port}/hub") as socket:
                assert not socket.closed
            async with session.get(f"http://127.0.0.1:{port}/health") as response:
                assert response.status == 200
