"""What an operator says of a worker on the command line is what the fleet knows of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance._process import CLI, read_until, run_cli, started
from tests.hub._hub import graph, running_hub

from comfyfleet.cli.exit_codes import CommandFailed
from comfyfleet.cli.servers import declared_in
from comfyfleet.cli.settings import read_settings
from comfyfleet.model.ids import TenantId
from comfyfleet.model.worker import (
    Capabilities,
    Cost,
    Cpu,
    Gpu,
    Hardware,
    Location,
    Memory,
    Service,
    TenantAccess,
)
from comfyfleet.ports import Inventory
from comfyfleet.worker.registration import join

FLAGS = (
    *("--tenant-isolation", "strict", "--allow-tenant", "acme", "--allow-tenant", "borg"),
    *("--deny-tenant", "evil", "--region", "eu", "--compliance", "gdpr", "--compliance", "hipaa"),
    *("--cost-tier", "premium", "--rate", "1.20", "--environment", "cloud"),
    *("--quality-level", "fast", "--quality-level", "best", "--speed", "2", "--provider", "lambda"),
    *("--cpu-cores", "16", "--cpu-threads", "32", "--memory-gb", "128"),
    *("--gpu-count", "2", "--gpu-memory-gb", "80", "--gpu-model", "NVIDIA H100"),
)
SAID: dict[str, Any] = {
    "tenant_access": {"isolation": "strict", "allowed": ["acme", "borg"], "denied": ["evil"]},
    "location": {"region": "eu", "compliance": ["gdpr", "hipaa"]},
    "cost": {"tier": "premium", "rate_per_hour": 1.2},
    "environment": "cloud",
    "performance": {"quality_levels": ["fast", "best"], "speed": 2.0},
    "hardware": {
        "gpu": {"count": 2, "memory_gb": 80.0, "model": "NVIDIA H100"},
        "cpu": {"cores": 16, "threads": 32},
        "memory": {"total_gb": 128.0},
    },
}


@pytest.mark.parametrize("servers", [("--fake", "1"), ("--simulated", "0")])
async def test_a_worker_tells_its_hub_what_was_said_of_it(tmp_path: Path, servers: tuple[str, str]) -> None:
    async with running_hub(is_open=True) as rig:
        command = (*CLI, "worker", "--hub", rig.url, "--data", tmp_path, *servers, *FLAGS)
        with started(*command) as process:
            await asyncio.to_thread(read_until, process, lambda line: ": online" in line)
            (listed,) = (await rig.get("/api/workers")).body["workers"]
            worker = (await rig.get(f"/api/workers/{listed['id']}")).body
            assert {name: worker["capabilities"][name] for name in SAID} == SAID
            assert worker["capabilities"]["has_hub"] is True
            assert [each["providers"] for each in worker["capabilities"]["services"]] == [["lambda"]]


def read(**environment: str) -> Capabilities:
    variables = {f"COMFYFLEET_{name.upper()}": value for name, value in environment.items()}
    return declared_in(read_settings({}, environment=variables))


def test_the_environment_says_the_same() -> None:
    assert read() == Capabilities(())
    assert read(
        tenant_isolation="loose", allow_tenants="a,b", deny_tenants="c d", compliance="gdpr", rate="2"
    ) == Capabilities(
        (),
        tenant_access=TenantAccess("loose", tuple(map(TenantId, "ab")), tuple(map(TenantId, "cd"))),
        location=Location(None, ("gdpr",)),
        cost=Cost(rate_per_hour=2.0),
    )


def test_what_is_declared_of_a_card_leaves_the_rest_as_it_was_found() -> None:
    found = Capabilities(
        (Service("comfyui", ("local",)),), Hardware(Gpu(1, 24.0, "RTX 4090"), memory=Memory(64.0))
    )
    offer = join(read(gpu_memory_gb="20", cpu_cores="8"), {"comfyui": Inventory(found)})
    assert offer.capabilities.hardware == Hardware(Gpu(1, 20.0, "RTX 4090"), Cpu(8), Memory(64.0))
    assert offer.capabilities.services[0].providers == ("local",)
    assert join(read(providers="a,b"), {"comfyui": Inventory(found)}).capabilities.services[0].providers == (
        "a",
        "b",
    )


async def test_a_job_can_require_a_quality_level_and_threads() -> None:
    async with running_hub(is_open=True) as rig:
        needs = {"quality": "best", "hardware": {"cpu_threads": 16}}
        body = {"payload": {"workflow": graph()}, "requirements": needs}
        job_id = (await rig.post("/api/jobs", body)).body["id"]

        async def poll(name: str, levels: list[str], threads: int) -> int:
            capabilities = {
                "services": [{"name": "comfyui"}],
                "hardware": {"cpu": {"cores": 8, "threads": threads}},
                "performance": {"quality_levels": levels},
            }
            await rig.post("/api/worker/register", {"worker_id": name, "capabilities": capabilities})
            return (
                await rig.post("/api/worker/poll", {"worker_id": name, "poll_id": name, "wait_s": 0})
            ).status

        assert await poll("few", ["best"], 8) == 204
        assert await poll("fast", ["fast"], 16) == 204
        told = str((await rig.get(f"/api/jobs/{job_id}/explain")).body)
        assert "has 8 CPU threads, 16 are needed" in told
        assert "offers the quality levels 'fast', 'best' is required" in told
        assert await poll("right", ["fast", "best"], 32) == 200


@pytest.mark.parametrize(
    ("said", "what_to_do"),
    [
        ({"tenant_isolation": "strict"}, "--allow-tenant"),
        ({"tenant_isolation": "strict", "deny_tenants": "a"}, "--allow-tenant"),
        ({"allow_tenants": "a"}, "--tenant-isolation strict"),
        ({"allow_tenants": "a", "tenant_isolation": "none"}, "--tenant-isolation strict"),
        ({"rate": "-1"}, "'-1' is not a number of at least 0$"),
    ],
)
def test_a_list_that_would_not_do_what_it_looks_like_is_refused(
    said: dict[str, str], what_to_do: str
) -> None:
    with pytest.raises(CommandFailed, match=what_to_do):
        read(**said)


def test_up_refuses_it_before_it_serves_anybody(tmp_path: Path) -> None:
    ended = run_cli("up", "--port", "0", "--data", tmp_path, "--allow-tenant", "acme")
    assert ended.returncode == 2
    assert "--tenant-isolation strict" in ended.stderr and "flag --allow-tenant" in ended.stderr
