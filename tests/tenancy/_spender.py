"""A process that spends: for each line `tenant amount`, it submits one job and says what became of it."""

from __future__ import annotations

import asyncio
import os
import sys

from comfyfleet.model.ids import TenantId
from comfyfleet.tenancy.database import open_tenant_database
from comfyfleet.testing.contract.ledger_driver import LedgerDriver


async def spend(url: str) -> None:
    database = open_tenant_database(url)
    await database.open()
    driver = LedgerDriver(database, f"job-{os.getpid()}")
    print("ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        tenant, amount = line.split()
        opened = await database.open_round(driver.opening(int(amount), TenantId(tenant)))
        print(opened.outcome, flush=True)
    await database.close()


if __name__ == "__main__":
    asyncio.run(spend(sys.argv[1]))
