"""What the connector finds out about a server, how it reaches it, and how it places files there."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from PIL import Image
from tests.worker._comfyui import (
    QUICK,
    Attempt,
    answers,
    eventually,
    leased,
    picture,
    server_and_connector,
    slow,
    tuned,
)
from tests.worker._scripted import no_http

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import FailureKind, ServiceFailed
from comfyfleet.model.job import Attachment
from comfyfleet.model.worker import Gpu
from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.connectors.comfyui import ComfyUI, server_id
from comfyfleet.worker.connectors.comfyui.inventory import BootWatch, combo_models, read_machine
from comfyfleet.worker.connectors.comfyui.settings import parse_address


@pytest.mark.parametrize(
    ("url", "name", "base"),
    [
        ("http://gpu-a:8188", "gpu-a:8188", "http://gpu-a:8188"),
        ("http://gpu-a:8188/", "gpu-a:8188", "http://gpu-a:8188"),
        ("gpu-a:8188", "gpu-a:8188", "http://gpu-a:8188"),
        ("https://gpu-a/comfy/", "gpu-a:443", "https://gpu-a/comfy"),
        ("http://user:p%40ss@gpu-a:1/x", "gpu-a:1", "http://gpu-a:1/x"),
        ("http://[::1]:8188", "[::1]:8188", "http://[::1]:8188"),
    ],
)
def test_an_address_gives_an_id_and_a_base_without_secrets(url: str, name: str, base: str) -> None:
    assert server_id(url) == name
    assert parse_address(url).base == base
    assert parse_address(url).websocket == f"ws{base[4:]}/ws"


def test_credentials_are_read_from_the_address() -> None:
    address = parse_address("http://me:p%40ss@gpu-a:1")
    assert (address.user, address.password) == ("me", "p@ss")


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "file:///etc"])
def test_an_address_that_cannot_be_reached_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="ComfyUI server"):
        parse_address(url)


@asynccontextmanager
async def admission_control(fake: FakeComfyUI) -> AsyncIterator[int]:
    """A proxy in front of the fake: a path prefix, a password, a key in a header. Gives its port."""

    async def forward(request: web.Request) -> web.StreamResponse:
        expected = "Basic " + base64.b64encode(b"me:p@ss").decode()
        if request.headers.get("Authorization") != expected or request.headers.get("X-Key") != "k":
            return web.Response(status=401)
        target = f"{fake.url}{request.path.removeprefix('/comfy')}"
        query = request.query_string
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await _forward_socket(request, f"{target}?{query}")
        async with aiohttp.ClientSession() as session:
            skip = ("host", "authorization", "content-length")
            headers = {key: value for key, value in request.headers.items() if key.lower() not in skip}
            content = await request.read()
            async with session.request(
                request.method, f"{target}?{query}", data=content or None, headers=headers
            ) as answer:
                body = await answer.read()
                return web.Response(status=answer.status, body=body, content_type=answer.content_type)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/comfy/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _forward_socket(request: web.Request, target: str) -> web.WebSocketResponse:
    near = web.WebSocketResponse()
    await near.prepare(request)

    async def copy(source: Any, sink: Any) -> None:
        async for message in source:
            if message.type is aiohttp.WSMsgType.TEXT:
                await sink.send_str(message.data)
            elif message.type is aiohttp.WSMsgType.BINARY:
                await sink.send_bytes(message.data)

    async with aiohttp.ClientSession() as session, session.ws_connect(target) as far:
        tasks = [asyncio.create_task(copy(near, far)), asyncio.create_task(copy(far, near))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return near


async def test_a_server_behind_a_prefix_a_password_and_a_key_is_reached() -> None:
    async with FakeComfyUI() as fake, admission_control(fake) as port:
        url = f"http://me:p%40ss@127.0.0.1:{port}/comfy/"
        async with ComfyUI(url, tuned(headers={"X-Key": "k"})) as connector:
            attempt = Attempt(connector, leased(slow()))
            result = await attempt.result()
            assert attempt.of(ProgressKind.PROGRESS)
            (file,) = result.files
            assert file.url is not None
            assert file.url.startswith(f"http://127.0.0.1:{port}/comfy/view?")
            assert await connector.fetch(file)


async def test_what_speaks_no_http_is_no_server_and_hears_our_credentials_from_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "comfyfleet")
    async with (
        no_http() as url,
        ComfyUI(url, tuned(headers={"X-Key": "our-secret"}, listen_s=0.05)) as connector,
    ):
        with pytest.raises(Exception, match="does not speak HTTP") as failed:
            await connector.inventory()
        await eventually(lambda: "no WebSocket" in caplog.text)
    assert "secret" not in repr(failed.value) + caplog.text


async def test_a_gate_that_does_not_let_us_in_is_told_at_once() -> None:
    async with (
        FakeComfyUI() as fake,
        admission_control(fake) as port,
        ComfyUI(f"http://127.0.0.1:{port}/comfy", tuned(listen_s=0.05)) as connector,
    ):
        assert not await connector.check_health()
        failure = await Attempt(connector, leased(picture())).failure()
        assert failure.kind is FailureKind.DEAD_WORKER
        assert "credentials" in failure.message


async def test_a_connector_can_be_closed_twice_and_opened_again() -> None:
    async with FakeComfyUI() as fake:
        connector = ComfyUI(fake.url, QUICK)
        with pytest.raises(RuntimeError, match="not open"):
            await connector.process_job(leased(picture()), lambda _: None)
        await connector.open()
        await connector.open()
        first = connector._client_id
        await connector.close()
        await connector.close()
        await connector.open()
        assert connector._client_id != first
        assert (await Attempt(connector, leased(picture())).result()).files
        await connector.close()


async def test_a_connector_opens_although_its_server_is_away() -> None:
    async with FakeComfyUI() as fake:
        await fake.crash()
        async with ComfyUI(fake.url, QUICK) as connector:
            assert not await connector.check_health()
            await fake.restart()
            await eventually(lambda: connector._listening().is_open)
            assert await connector.check_health()


# inventory


async def test_the_inventory_tells_nodes_models_and_card() -> None:
    async with server_and_connector(vram_gb=23.6, ram_gb=63.5) as (_, connector):
        found = await connector.inventory()
    (service,) = found.capabilities.services
    assert (service.name, service.providers, service.version) == ("comfyui", ("local",), "0.7.0")
    assert service.node_classes is not None
    assert {"KSampler", "LabSlow"} <= service.node_classes
    assert service.models is not None
    assert {"sd15.safetensors", "detail.safetensors"} <= service.models
    assert found.capabilities.hardware.gpu == Gpu(1, 24.0, "NVIDIA GeForce RTX 4090")
    assert found.capabilities.hardware.memory.total_gb == 64.0
    assert found.live.free_vram_gb is not None
    assert found.live.available_ram_gb is not None


async def test_models_that_come_and_go_are_seen() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.added_models = {"loras": {"new.safetensors": 1.0}}
        fake.faults.missing_models = ["sd15.safetensors"]
        models = (await connector.inventory()).capabilities.services[0].models
        assert models is not None
        assert "new.safetensors" in models
        assert "sd15.safetensors" not in models


async def test_an_inventory_of_a_server_that_is_away_fails() -> None:
    async with server_and_connector() as (fake, connector):
        await fake.crash()
        with pytest.raises(ServiceFailed) as raised:
            await connector.inventory()
        assert raised.value.failure.kind is FailureKind.TRANSIENT


async def test_the_boot_changes_with_a_restart_and_not_with_a_lost_socket() -> None:
    async with server_and_connector() as (fake, connector):
        await Attempt(connector, leased(picture())).result()
        before = (await connector.inventory()).boot
        fake.faults.drop_sockets = True
        await eventually(lambda: connector._listening().losses == 1)
        await eventually(lambda: connector._listening().is_open)
        assert (await connector.inventory()).boot == before
        fake.faults.down_seconds = 0.3
        fake.faults.crash = True
        await eventually(lambda: connector._listening().losses == 2)
        await eventually(lambda: connector._listening().is_open)
        after = (await connector.inventory()).boot
        assert after != before
        assert (await connector.inventory()).boot == after


async def test_a_restart_is_known_by_refused_connections_where_nothing_could_be_forgotten() -> None:
    async with server_and_connector() as (fake, connector):
        await eventually(lambda: connector._listening().is_open)
        before = (await connector.inventory()).boot
        fake.faults.down_seconds = 0.3
        fake.faults.crash = True
        await eventually(lambda: connector._listening().losses == 1)
        await eventually(lambda: connector._listening().is_open)
        assert (await connector.inventory()).boot != before


async def test_a_restart_too_quick_to_see_is_known_by_what_was_forgotten() -> None:
    async with server_and_connector() as (fake, connector):
        await Attempt(connector, leased(picture())).result()
        before = (await connector.inventory()).boot
        await fake.restart()
        await eventually(lambda: connector._listening().losses == 1)
        assert (await connector.inventory()).boot != before


def test_numbers_that_begin_again_show_a_restart() -> None:
    boot = BootWatch()
    first = boot.value
    assert not boot.numbered(40, under_way=1)
    assert not boot.numbered(39, under_way=2)
    assert boot.value == first
    assert boot.numbered(0, under_way=1)
    assert boot.value != first
    assert not boot.numbered(1, under_way=1)
    assert BootWatch().value != boot.value


def test_a_recorded_server_without_a_card_has_none() -> None:
    (stats,) = [line["body"] for line in answers("17", "GET /system_stats")]
    machine = read_machine(stats)
    assert machine.version == "0.7.0"
    assert machine.hardware.gpu == Gpu()
    assert machine.hardware.memory.total_gb == 24.0
    assert machine.free_vram_gb is None


def test_statistics_of_any_shape_are_read() -> None:
    shapes: list[dict[str, Any]] = [
        {},
        {"system": None, "devices": None},
        {"system": {}, "devices": [None, {}]},
        *(
            {
                "system": {"ram_total": size, "ram_free": size},
                "devices": [{"vram_total": size, "vram_free": size}],
            }
            for size in (float("inf"), float("nan"), 10**400)
        ),
    ]
    for stats in shapes:
        machine = read_machine(stats)
        assert (machine.version, machine.hardware.gpu.memory_gb, machine.free_vram_gb) == (None, 0.0, None)


def test_models_are_read_from_both_notations_of_choices() -> None:
    found = combo_models(
        {
            "A": {"input": {"required": {"x": [["a.safetensors", "none"], {}], "y": ["INT", {}]}}},
            "B": {"input": {"optional": {"x": ["COMBO", {"options": ["b.gguf", 3]}]}, "hidden": None}},
            "C": None,
            "D": {"input": {"required": {"x": [], "y": "IMAGE"}}},
        }
    )
    assert found == {"a.safetensors", "b.gguf"}


# attachments


def png(mode: str = "RGB") -> bytes:
    target = io.BytesIO()
    Image.new(mode, (8, 8)).save(target, "PNG")
    return target.getvalue()


def load(*names: str) -> dict[str, Any]:
    graph: dict[str, Any] = {}
    for index, name in enumerate(names):
        graph[f"l{index}"] = {"class_type": "LoadImage", "inputs": {"image": name}}
        graph[f"s{index}"] = {
            "class_type": "SaveImage",
            "inputs": {"images": [f"l{index}", 0], "filename_prefix": f"x{index}"},
        }
    return graph


async def test_attachments_are_placed_and_wired_each_under_its_own_name() -> None:
    files = (Attachment("dir/a.png", png(), "l0", "image"), Attachment("a.png", png("L"), "l1", "image"))
    graph = load("", "")
    async with server_and_connector() as (fake, connector):
        attempt = Attempt(connector, leased(graph, attachments=files))
        assert len((await attempt.result()).files) == 2
        assert fake.stats.uploads == 2
        folder = fake.disk.folder("input")
        assert folder is not None
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    assert names == [f"comfyfleet/{attempt.prompt_id}/1-a.png", f"comfyfleet/{attempt.prompt_id}/a.png"]
    assert graph == load("", "")


async def test_a_mask_is_laid_upon_the_image_its_input_names() -> None:
    files = (
        Attachment("a.png", png(), "l0", "image"),
        Attachment("mask.png", png("RGBA"), "l0", "image", kind="mask"),
    )
    async with server_and_connector() as (fake, connector):
        attempt = Attempt(connector, leased(load(""), attachments=files))
        assert (await attempt.result()).files
        assert fake.stats.uploads == 2


async def test_an_attachment_for_a_node_that_is_not_there_is_the_callers_fault() -> None:
    files = (Attachment("a.png", png(), "77", "image"),)
    async with server_and_connector() as (fake, connector):
        failure = await Attempt(connector, leased(picture(), attachments=files)).failure()
        assert failure.kind is FailureKind.INVALID_WORKFLOW
        assert fake.stats.uploads == 0


async def test_an_attachment_too_large_for_the_server_is_the_callers_fault() -> None:
    files = (Attachment("a.png", b"x" * 200_000, "l0", "image"),)
    async with server_and_connector(max_upload_bytes=100_000) as (_, connector):
        failure = await Attempt(connector, leased(load(""), attachments=files)).failure()
        assert failure.kind is FailureKind.MISSING_INPUT
        assert failure.missing == ("a.png",)


async def test_an_upload_that_the_server_stumbles_over_is_transient() -> None:
    files = (Attachment("a.png", png(), "l0", "image"),)
    async with server_and_connector() as (fake, connector):
        fake.faults.fail_request_paths = ["/upload"]
        fake.faults.fail_requests = 1
        failure = await Attempt(connector, leased(load(""), attachments=files)).failure()
        assert failure.kind is FailureKind.TRANSIENT
        assert fake.stats.prompts_accepted == 0


async def test_every_prompt_is_sent_with_our_id_and_client_and_without_a_number() -> None:
    sent: list[dict[str, Any]] = []

    async def record(
        session: aiohttp.ClientSession, context: object, parameters: aiohttp.TraceRequestChunkSentParams
    ) -> None:
        if parameters.url.path == "/prompt":
            sent.append(json.loads(parameters.chunk))

    async with server_and_connector() as (_, connector):
        hooks = aiohttp.TraceConfig()
        hooks.on_request_chunk_sent.append(record)
        hooks.freeze()
        connector._api.session.trace_configs.append(hooks)
        attempt = Attempt(connector, leased(picture()))
        await attempt.result()
    (body,) = sent
    assert set(body) == {"prompt", "prompt_id", "client_id"}
    assert body["prompt_id"] == attempt.prompt_id
    assert body["client_id"] == connector._client_id
    assert body["prompt"]["2"]["inputs"]["filename_prefix"] == f"comfyfleet/{attempt.prompt_id}/out"
