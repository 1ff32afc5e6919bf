"""What an operator says of a worker on the command line is what the fleet knows of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance._process import CLI, read_until, run_cli, started
from tests.hub._hub import running_hub

from comfyfleet.cli.endings import CommandFailed
from comfyfleet.cli.servers import declared_in
from comfyfleet.cli.settings import read_settings
from comfyfleet.model.ids import TenantId
from comfyfleet.model.worker import Capabilities, Cost, Location, TenantAccess

FLAGS = (
    *("--tenant-isolation", "strict", "--allow-tenant", "acme", "--allow-tenant", "borg"),
    *("--deny-tenant", "evil", "--region", "eu", "--compliance", "gdpr", "--compliance", "hipaa"),
    *("--cost-tier", "premium", "--rate", "1.20", "--environment", "cloud"),
)
SAID: dict[str, Any] = {
    "tenant_access": {"isolation": "strict", "allowed": ["acme", "borg"], "denied": ["evil"]},
    "location": {"region": "eu", "compliance": ["gdpr", "hipaa"]},
    "cost": {"tier": "premium", "rate_per_hour": 1.2},
    "environment": "cloud",
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


@pytest.mark.parametrize(
    ("said", "what_to_do"),
    [
        ({"tenant_isolation": "strict"}, "--allow-tenant"),
        ({"tenant_isolation": "strict", "deny_tenants": "a"}, "--allow-tenant"),
        ({"allow_tenants": "a"}, "--tenant-isolation strict"),
        ({"allow_tenants": "a", "tenant_isolation": "none"}, "--tenant-isolation strict"),
        ({"rate": "-1"}, ">= 0"),
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
