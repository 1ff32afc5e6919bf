"""Where a run takes place, and the rules it is played by: short leases, and no job is given up for having bad luck."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.engine.system import SystemClock
from comfyfleet.model.errors import Fault
from comfyfleet.policy.rules import Rules
from comfyfleet.ports import Store
from comfyfleet.stores.factory import open_store
from comfyfleet.tenancy.services import TenantServices
from comfyfleet.worker.settings import AgentSettings

LEASE_S = 2.0
SLACK_S = 2.0
"""What a process may take, beside the length of a lease, to notice that something came back and to catch up."""

_MANY = 1_000_000

RULES = Rules(
    lease_ttl_s=LEASE_S,
    acknowledge_s=LEASE_S,
    sweep_s=0.5,
    worker_lost_s=30.0,
    cooldown_s=0.2,
    # Nobody is to blame here: a job is taken up again however often its worker dies.
    max_attempts=_MANY,
    max_worker_faults=_MANY,
    max_releases=_MANY,
    give_up_workers=_MANY,
    max_failures_before_block=_MANY,
    quarantine_blocks=_MANY,
    retry_base_s=0.1,
    retry_cap_s=0.5,
)

# A tenant's job is looked at in its database before the holder of its lease hears of it: that may take a while.
RULES_WITH_DATABASES = msgspec.structs.replace(RULES, lease_ttl_s=3 * LEASE_S, acknowledge_s=3 * LEASE_S)

AGENT = AgentSettings(slots=4, poll_wait_s=5.0, command_wait_s=5.0, backoff_base_s=0.05, backoff_cap_s=0.5)


class Setting(msgspec.Struct, frozen=True):
    folder: Path
    url: str
    engines: int = 0
    """How many engine processes there are; callers and bridged workers speak to any of them."""
    databases: dict[str, str] = {}
    """Databases of tenants, by name. None: nobody knows of tenants."""

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def sockets(self) -> list[Path]:
        return [self.socket(number) for number in range(self.engines)]

    def socket(self, number: int) -> Path:
        return self.folder / f"engine-{number}.socket"


@asynccontextmanager
async def opened_engine(setting: Setting) -> AsyncIterator[Engine]:
    """An engine on the store, as soon as there is one: its server may be down, its file still another's."""
    while True:
        clock = SystemClock()
        store = open_store(setting.url, clock)
        tenant_services = TenantServices(store, clock, setting.databases) if setting.databases else None
        rules = RULES if tenant_services is None else RULES_WITH_DATABASES
        engine = Engine(store if tenant_services is None else tenant_services.store, rules=rules, clock=clock)
        try:
            await engine.__aenter__()
            break
        except (Fault, OSError):
            with contextlib.suppress(Exception):
                await engine.close()
            await asyncio.sleep(0.05)
    try:
        if tenant_services is None:
            yield engine
        else:
            async with tenant_services.background_tasks(engine.admit):
                yield engine
            await tenant_services.close()
    finally:
        await engine.close()


@asynccontextmanager
async def opened_store(url: str) -> AsyncIterator[Store]:
    store = open_store(url, SystemClock())
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def play(setting: Setting, who: str, work: Coroutine[Any, Any, None]) -> None:
    """The whole life of an actor's process. It ends with its parent, should that be killed."""
    # What the product says in its distress is kept with the logs and not shown: there is much of it.
    said = os.open(setting.logs / f"{who}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(said, 2)
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(work)
