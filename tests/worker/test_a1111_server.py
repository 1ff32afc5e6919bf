"""What the A1111 connector finds out about its server: what it has, which flavour it is, whether it is well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.worker._a1111 import QUICK, attempt, job_of, payload, server_and_connector, tuned
from tests.worker._scripted import no_http

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import ServiceFailed
from comfyfleet.ports import Connector, OutputSource
from comfyfleet.testing.fake_a1111 import FakeA1111, FakeA1111Settings, FakeCheckpoint
from comfyfleet.worker.connectors.a1111 import A1111, PLUGIN
from comfyfleet.worker.connectors.registry import connect
from comfyfleet.worker.job_files import CleansUp
from comfyfleet.worker.servers import HasUrl, ReportsConnection, ReportsDefect


def test_it_has_all_that_an_agent_can_use() -> None:
    connector: Connector = connect("a1111", "http://gpu-a:7860")
    for protocol in (OutputSource, CleansUp, HasUrl, ReportsConnection, ReportsDefect):
        assert isinstance(connector, protocol), protocol
    assert (PLUGIN.name, PLUGIN.payload.service, connector.service_name) == ("a1111", "a1111", "a1111")


async def test_the_inventory_lists_everything_that_a_job_may_need() -> None:
    async with server_and_connector() as (_, connector):
        found = await connector.inventory()
        service = found.capabilities.services[0]
        assert (service.name, service.version, service.providers) == ("a1111", "a1111", ("local",))
        assert service.models is not None and service.models >= {
            "base.safetensors [aaaa]",
            "base.safetensors",
            "base",
            "vae/plain-vae.safetensors",
            "lora/detail",
            "lora/detail (alias)",
            "upscaler/4x-plain",
            "upscaler/Latent",
        }
        assert set(service.node_classes or ()) == {
            "sampler/Euler",
            "sampler/DPM++ 2M",
            "scheduler/automatic",
            "scheduler/karras",
            *(
                f"script/{route}/{name}"
                for route in ("txt2img", "img2img")
                for name in ("prompt matrix", "controlnet", "soft inpainting")
            ),
        }
        gpu = found.capabilities.hardware.gpu
        assert (gpu.count, gpu.memory_gb) == (1, 24.0)
        assert found.capabilities.hardware.memory.total_gb == 24.0
        assert found.live.free_vram_gb == 11.88 and "base.safetensors" in found.live.loaded_models
        assert found.capabilities.is_fake


async def test_every_need_of_a_payload_is_spelled_as_the_inventory_spells_it() -> None:
    async with server_and_connector() as (_, connector):
        service = (await connector.inventory()).capabilities.services[0]
        needs = PLUGIN.payload.read(
            payload(
                prompt="<lora:detail:1>",
                override_settings={"sd_model_checkpoint": "other", "sd_vae": "plain-vae.safetensors"},
                scheduler="Karras",
                script_name="Prompt matrix",
                alwayson_scripts={"ControlNet": {"args": []}},
                enable_hr=True,
                hr_upscaler="Latent",
            )
        )
        assert service.models is not None and service.node_classes is not None
        assert needs.models and needs.models <= service.models
        assert needs.node_classes and needs.node_classes <= service.node_classes


@pytest.mark.parametrize(
    ("flavour", "told", "has_tasks"),
    [
        ("a1111", "a1111", True),
        ("reforge", "a1111", True),
        ("forge", "forge", True),
        ("forge-classic", "forge-classic", True),
        ("sdnext", "sdnext 2026-07-01", False),
    ],
)
async def test_the_flavour_is_told_by_its_routes(flavour: str, told: str, has_tasks: bool) -> None:
    async with server_and_connector(flavour=flavour) as (_, connector):
        service = (await connector.inventory()).capabilities.services[0]
        assert service.version == told
        assert connector._server is not None and connector._server.has_tasks is has_tasks
        assert service.models is not None and service.node_classes is not None
        vae = "module/plain-vae.safetensors" if flavour == "forge" else "vae/plain-vae.safetensors"
        assert vae in service.models
        assert ("scheduler/karras" in service.node_classes) is (flavour != "forge-classic")
        assert (await attempt(connector, job_of()).result()).files


async def test_the_version_is_known_after_the_first_run() -> None:
    async with server_and_connector() as (_, connector):
        await attempt(connector, job_of()).result()
        assert (await connector.inventory()).capabilities.services[0].version == "a1111 v1.10.1"


async def test_a_gpu_that_cannot_be_read_is_no_gpu() -> None:
    async with server_and_connector(gpu_gb=None) as (_, connector):
        found = await connector.inventory()
        assert (found.capabilities.hardware.gpu.count, found.live.free_vram_gb) == (0, None)


async def test_a_server_without_a_checkpoint_is_not_ready() -> None:
    async with server_and_connector() as (fake, connector):
        fake.faults.is_starting = True
        with pytest.raises(ServiceFailed, match=r"lists no checkpoint\. It is still starting"):
            await connector.inventory()
        fake.faults.is_starting = False
        assert (await connector.inventory()).capabilities.services


async def test_a_title_without_a_hash_is_found_by_a_name_with_one() -> None:
    checkpoint = FakeCheckpoint("base.safetensors", "")
    async with server_and_connector(checkpoints=(checkpoint,)) as (fake, connector):
        job = job_of(override_settings={"sd_model_checkpoint": "base.safetensors [aaaa]"})
        assert (await attempt(connector, job).result()).files
        assert fake.runs[0].model == "base"


@pytest.mark.parametrize(
    ("settings", "fake_settings", "words"),
    [
        (QUICK, {"has_api": False}, "without its API. Start it with --api"),
        (tuned(user="u", password="wrong"), {"user": "u", "password": "p"}, "refuses our user and password"),
    ],
)
async def test_a_sick_server_tells_what_to_do(
    settings: Any, fake_settings: dict[str, Any], words: str
) -> None:
    async with server_and_connector(settings, **fake_settings) as (_, connector):
        assert not await connector.check_health()
        assert words in str(connector.defect) and "127.0.0.1" not in str(connector.defect)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda fake: fake.faults.garbage_paths.append("/sdapi"), "is not the web UI (status 200)"),
        (lambda fake: fake.faults.endless_paths.append("/sdapi"), "more than 100000 bytes"),
    ],
)
async def test_nonsense_is_not_health(break_it: Callable[[FakeA1111], None], words: str) -> None:
    async with server_and_connector(tuned(max_answer_bytes=100_000)) as (fake, connector):
        assert await connector.check_health() and connector.defect is None
        break_it(fake)
        assert not await connector.check_health()
        assert words in str(connector.defect)


async def test_another_program_at_the_address_is_told() -> None:
    async with no_http() as url, A1111(url, QUICK) as connector:
        assert not await connector.check_health()
        assert "does not speak HTTP" in str(connector.defect)


async def test_a_run_that_goes_on_is_a_sign_of_health() -> None:
    async with server_and_connector() as (fake, connector):
        run = attempt(connector, job_of(steps=60))
        await run.heard(ProgressKind.STARTED)
        asked = dict(fake.requests)
        assert await connector.check_health()
        assert fake.requests == asked
        await run.result()


async def test_the_user_and_password_may_be_in_the_address_or_in_the_settings() -> None:
    settings = FakeA1111Settings(user="me", password="p@ss", step_seconds=0.001)
    async with FakeA1111(settings) as fake:
        in_address = A1111(fake.url.replace("http://", "http://me:p%40ss@"), QUICK)
        in_settings = A1111(fake.url, tuned(user="me", password="p@ss"))
        for connector in (in_address, in_settings):
            async with connector:
                assert await connector.check_health()
                assert (await attempt(connector, job_of()).result()).files
            assert "ss@" not in connector.url and "me" not in connector.url


async def test_a_restart_changes_the_boot() -> None:
    async with server_and_connector() as (fake, connector):
        before = (await connector.inventory()).boot
        assert (await connector.inventory()).boot == before
        await fake.crash()
        assert not await connector.check_health()
        await fake.start(port=fake.port)
        assert await connector.check_health()
        assert (await connector.inventory()).boot != before


async def test_a_restart_that_nobody_saw_is_noticed_by_a_run_that_is_forgotten() -> None:
    async with server_and_connector() as (fake, connector):
        await attempt(connector, job_of()).result()
        before = (await connector.inventory()).boot
        await fake.restart()
        assert (await connector.inventory()).boot != before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"usr": "x"}, "there is no setting 'usr'; known: "),
        ({"poll_s": "soon"}, "the setting 'poll_s' is not valid"),
        ({"exclusive": "maybe"}, "the setting 'exclusive' is not valid"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        connect("a1111", "http://gpu-a:7860", settings)


@pytest.mark.parametrize("address", ["ftp://gpu-a:7860", "http://"])
def test_a_wrong_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="the address of a server of the A1111 family needs"):
        connect("a1111", address)


def test_settings_are_taken() -> None:
    connector = connect("a1111", "gpu-a:7860", {"exclusive": "false", "user": "u", "password": "p"})
    assert isinstance(connector, A1111)
    assert (connector.settings.exclusive, connector.settings.user) == (False, "u")
