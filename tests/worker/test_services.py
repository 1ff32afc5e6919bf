"""One worker, several services: registered once, each with its own jobs, made by the name of the service."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance._process import CLI, read_until, run_cli, started
from tests.hub._hub import HubRig, running_hub
from tests.worker._comfyui import picture

from comfyfleet.testing.fake_comfyui import FakeComfyUI
from comfyfleet.worker.connectors.comfyui import ComfyUI
from comfyfleet.worker.connectors.registry import connect
from comfyfleet.worker.connectors.simulated import SimulatedConnector


def test_a_connector_is_made_by_the_name_of_its_service() -> None:
    addresses = {"comfyui": "http://127.0.0.1:8188", "simulated": "0.5"}
    for service, address in addresses.items():
        assert connect(service, address).service_name == service
    made = connect("comfyui", "gpu-a:8188", {"headers": {"authorization": "Bearer x"}})
    assert isinstance(made, ComfyUI) and made.settings.headers == {"authorization": "Bearer x"}
    assert isinstance(connect("simulated", "0"), SimulatedConnector)


@pytest.mark.parametrize(
    ("service", "address", "told"),
    [
        ("nothing", "http://x", "choose one of: comfyui, .*simulated"),
        ("comfyui", "ftp://x", "http or https"),
        ("simulated", "soon", "seconds"),
        ("simulated", "nan", "seconds"),
    ],
)
def test_what_there_is_no_connector_for_is_told(service: str, address: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        connect(service, address)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--service", "nothing"),
        ("--service", "nothing=x"),
        ("--service", "simulated=1", "--service", "simulated=2"),
        ("--server", "http://a:1", "--service", "comfyui=http://b:1"),
        ("--server", "http://a:1", "--server", "http://b:1", "--service", "simulated=1"),
    ],
)
def test_services_that_cannot_be_are_refused_with_the_settings_name(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    ended = run_cli(
        "worker", "--hub", "http://127.0.0.1:9", *arguments, env={"COMFYFLEET_DATA": str(tmp_path)}
    )
    assert ended.returncode == 2
    assert "services" in ended.stderr


async def _completed(rig: HubRig, job_id: str) -> str:
    while (job := (await rig.get(f"/api/jobs/{job_id}")).body)["status"] != "completed":
        assert job["status"] in ("queued", "leased"), job
        await asyncio.sleep(0.02)
    return str(job["worker_id"])


async def _submitted(rig: HubRig, payload: dict[str, Any]) -> str:
    answer = await rig.post("/api/jobs", {"service": "simulated", "payload": payload})
    assert answer.status == 201, answer.content
    return str(answer.body["id"])


async def test_a_worker_process_offers_two_services_in_one_registration(tmp_path: Path) -> None:
    async with running_hub(is_open=True) as rig, FakeComfyUI() as fake:
        options = ("--server", fake.url, "--service", "simulated=0.1", "--slots", "2", "--name", "gpu")
        command = (*CLI, "worker", "--hub", rig.url, *options, "--environment", "cloud")
        with started(*command, env={"COMFYFLEET_DATA": str(tmp_path)}) as process:
            await asyncio.to_thread(read_until, process, lambda line: line.endswith(": online"))
            (worker,) = (await rig.get("/api/workers")).body["workers"]
            assert (worker["id"], worker["slots"], worker["environment"]) == ("gpu", 2, "cloud")
            assert sorted(worker["services"]) == ["comfyui", "simulated"]
            made = [
                await rig.submit(workflow=picture()),
                await _submitted(rig, {"outputs": {"out": {"texts": ["a"]}}}),
            ]
            async with asyncio.timeout(60):
                assert [await _completed(rig, job_id) for job_id in made] == ["gpu", "gpu"]
            assert len(fake.stats.prompt_log) == 1, "each service had its own job"
            process.kill()
