"""Two hubs in two processes, on one store and one database, that spend one tenant's credits at the same instant."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from comfyfleet.engine.system import SystemClock
from comfyfleet.model.ids import TenantId
from comfyfleet.model.ledger import Account, FlatPrice
from comfyfleet.model.tenant import Tenant
from comfyfleet.policy import accounting
from comfyfleet.stores.factory import open_store
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.tenancy.tenants import Tenants

_ROOT = Path(__file__).resolve().parents[2]
GRANTED, PRICE = 100, 80


class Spender:
    """A process of its own that spends when it is told to, and says what came of it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._to, self._from = process.stdin, process.stdout
        self.kill = process.kill

    def spend(self, tenant: TenantId, *more: int) -> None:
        self._to.write(f"{' '.join(map(str, (tenant, *more)))}\n".encode())

    async def answer(self) -> str:
        return (await self._from.readline()).decode().strip()


@asynccontextmanager
async def spender(module: str, *arguments: str) -> AsyncIterator[Spender]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"tests.tenancy.{module}",
        *arguments,
        cwd=_ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Spender(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def spend_at_once(store_url: str, database_url: str, times: int) -> list[str]:
    """Each time a tenant with 100 is asked for 80 by both. What went otherwise than that one of them is accepted."""
    store = open_store(store_url, SystemClock())
    database = open_tenant_database(database_url)
    wrong = []
    async with AsyncExitStack() as stack:
        await store.open()
        stack.push_async_callback(store.close)
        await database.open()
        stack.push_async_callback(database.close)
        hubs = [
            await stack.enter_async_context(spender("_hub_spender", store_url, database_url))
            for _ in range(2)
        ]
        for each in hubs:
            assert await each.answer() == "ready"
        tenants = Tenants(store.documents, SystemClock(), is_shared=True)
        for number in range(times):
            tenant = TenantId(f"spender-{number:04d}")
            await tenants.create(Tenant(tenant, "first", 1.0, price=FlatPrice(PRICE)))
            given = accounting.grant("first", tenant, GRANTED, 1.0)
            await database.grant(given, accounting.posting_of(given))
            for each in hubs:
                each.spend(tenant)
            answers = sorted([await each.answer() for each in hubs])
            account = await database.account(tenant)
            found = accounting.problems(await database.ledger(tenant))
            if (
                answers != ["accepted", "credits_short"]
                or account != Account(tenant, GRANTED, PRICE)
                or found
            ):
                wrong.append(f"{tenant}: {' and '.join(answers)}, {account}, {'; '.join(found)}")
    return wrong
