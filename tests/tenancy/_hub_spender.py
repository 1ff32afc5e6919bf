"""A hub without its HTTP: for each line `tenant`, it submits one job of that tenant's and says what became of it."""

from __future__ import annotations

import asyncio
import sys

from tests.engine._rig import graph

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.errors import Refusal
from comfyfleet.model.ids import TenantId
from comfyfleet.model.job import Submission
from comfyfleet.stores.factory import open_store
from comfyfleet.tenancy.services import TenantServices


async def spend(store_url: str, database_url: str) -> None:
    clock = SystemClock()
    tenant_services = TenantServices(open_store(store_url, clock), clock, {"first": database_url})
    async with (
        Engine(tenant_services.store, clock=clock) as engine,
        tenant_services.background_tasks(engine.admit),
    ):
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                await engine.submit(Submission(graph(), tenant=TenantId(line.strip())))
                print("accepted", flush=True)
            except Refusal as refusal:
                print(refusal.code.value, flush=True)
    await tenant_services.close()


if __name__ == "__main__":
    asyncio.run(spend(*sys.argv[1:]))
