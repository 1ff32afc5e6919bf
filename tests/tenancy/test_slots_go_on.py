"""A worker with one slot, and a tenant whose database does not take the result of its job: others' jobs run on it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from tests.tenancy._tenant_services import ACME, BORG, Fleet
from tests.worker._scripted import quick

from comfyfleet.engine.system import SystemClock
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId
from comfyfleet.model.ledger import Account
from comfyfleet.model.worker import Capabilities, Service
from comfyfleet.stores.memory import MemoryStore
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.database.sql_database import TenantDatabase
from comfyfleet.worker.agent import Agent
from comfyfleet.worker.connectors.simulated import SimulatedConnector, instant


class Away:
    """A database that takes no results while it is away."""

    def __init__(self, inner: TenantDatabase) -> None:
        self._inner = inner
        self.is_away = False
        self.was_asked = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def stage(self, *arguments: Any) -> bool:
        if self.is_away:
            self.was_asked.set()
            raise Fault("the database is away")
        return await self._inner.stage(*arguments)


async def ended(fleet: Fleet, job_id: JobId) -> Phase:
    async with asyncio.timeout(60):
        async for _ in fleet.engine.watch(job_id):
            """To its end."""
    found = await fleet.central.load(job_id)
    assert found is not None
    return found.phase


async def test_a_result_that_a_tenants_database_does_not_take_keeps_no_slot(tmp_path: Path) -> None:
    clock, opened = SystemClock(), dict[str, Away]()

    def open_database(url: str) -> TenantDatabase:
        opened[url] = Away(open_tenant_database(url))
        return cast(TenantDatabase, opened[url])

    databases = {name: f"sqlite:///{tmp_path}/{name}.db" for name in ("first", "second")}
    async with Fleet(MemoryStore(clock), clock, databases, open_database=open_database) as fleet:
        await fleet.tenant(ACME, granted=100)
        await fleet.tenant(BORG, granted=100, database="second")
        away = opened[databases["first"]]
        away.is_away = True
        offered = Capabilities(services=(Service("comfyui"),))
        connector = SimulatedConnector(behaviour=instant())
        async with Agent(fleet.engine, "gpu", [connector], quick(slots=1), offered):  # type: ignore[arg-type]
            held_up = await fleet.submit(ACME)
            async with asyncio.timeout(60):
                await away.was_asked.wait()
            others = [await fleet.submit(BORG) for _ in range(3)]
            assert [await ended(fleet, job_id) for job_id in others] == [Phase.COMPLETED] * 3
            dispatch = await fleet.central.load(held_up)
            assert dispatch is not None and dispatch.phase is Phase.LEASED
            away.is_away = False
            assert await ended(fleet, held_up) is Phase.COMPLETED
        assert await fleet.account(ACME) == Account(ACME, 90)
        assert len(await fleet.central.attempts(held_up)) == 1, "it ran once"
