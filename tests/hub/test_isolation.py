"""The table of isolation over HTTP: workers say whom they serve, callers and tenants how much they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.test_isolation import ISOLATIONS, TABLE, Cell
from tests.hub._hub import TENANT, HubRig, hub_in_process

from comfyfleet.model.access import Role
from comfyfleet.model.requirement import Isolation
from comfyfleet.model.tenant import Tenant
from comfyfleet.model.worker import Capabilities, Service, TenantAccess


async def register(rig: HubRig, access: TenantAccess, name: str = "gpu") -> None:
    capabilities = msgspec.to_builtins(Capabilities((Service("comfyui"),), tenant_access=access))
    body = {"worker_id": name, "capabilities": capabilities, "slots": 3}
    answer = await rig.post("/api/worker/register", body, role=Role.WORKER)
    assert answer.status == 200, answer.content


async def poll(rig: HubRig, number: int, name: str = "gpu") -> str | None:
    body = {"worker_id": name, "poll_id": str(number), "wait_s": 0}
    answer = await rig.post("/api/worker/poll", body, role=Role.WORKER)
    return str(answer.body["lease"]["job_id"]) if answer.status == 200 else None


async def taken(rig: HubRig, made: dict[str, Isolation]) -> set[Isolation]:
    found: set[Isolation] = set()
    while (job_id := await poll(rig, len(found))) is not None:
        found.add(made[job_id])
    return found


@pytest.mark.parametrize("cell", TABLE)
async def test_a_worker_gets_what_the_table_says(cell: Cell) -> None:
    async with hub_in_process() as rig:
        await register(rig, cell.access)
        made: dict[str, Isolation] = {}
        for isolation in ISOLATIONS:
            asked: dict[str, Any] = {"requirements": {"isolation": isolation}}
            made[await rig.submit(role=Role.TENANT, **asked)] = isolation
        assert await taken(rig, made) == cell.takes


@pytest.mark.parametrize("least", ISOLATIONS)
@pytest.mark.parametrize("cell", TABLE)
async def test_what_a_tenant_asks_for_at_least_counts_as_if_each_job_did(
    cell: Cell, least: Isolation, tmp_path: Path
) -> None:
    async with hub_in_process(databases={"first": f"sqlite:///{tmp_path}/tenants.db"}) as rig:
        await (await rig.tenant_services.databases.get("first")).create_account(TENANT)
        await rig.tenant_services.tenants.create(Tenant(TENANT, "first", 1.0, isolation=least))
        await register(rig, cell.access)
        job_id = await rig.submit(role=Role.TENANT)
        assert await poll(rig, 1) == (job_id if least in cell.takes else None)


async def test_a_worker_that_shuts_a_tenant_out_while_it_polls_gets_nothing_more_of_it(
    tmp_path: Path,
) -> None:
    async with hub_in_process() as rig:
        await register(rig, TenantAccess())
        running = await rig.submit(role=Role.TENANT)
        assert await poll(rig, 1) == running
        await register(rig, TenantAccess(denied=(TENANT,)))
        await rig.submit(role=Role.TENANT)
        assert await poll(rig, 2) is None
        assert await poll(rig, 1) == running, "what it runs already goes on"
        own = await rig.submit()
        assert await poll(rig, 3) == own
