"""Jobs that no worker can run fail after a while, and what is held for them is given back.

Since when nobody can run a class of jobs is noted in the store, so that it outlives hubs. One hub at a time looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import ComfyFleetError, Fault
from comfyfleet.model.ids import ClassKey, JobId, TenantId
from comfyfleet.policy.unrunnable import unrunnable_after
from comfyfleet.ports import Cabinet, Clock
from comfyfleet.tenancy.claims import Claim, claim
from comfyfleet.tenancy.tenants import Tenants
from comfyfleet.tracing import in_background, log_failure

_LOG = logging.getLogger(__name__)

DRAWER = "unrunnable"
CLAIM = TenantId("-unrunnable")
"""No tenant has a name like this."""
LOOK_S = 30.0
_PAGE = 200


class _Noted(msgspec.Struct, frozen=True):
    since: float


class UnrunnableJobs:
    """`start` and `close` are its life; both may be called twice."""

    def __init__(
        self, engine: Engine, tenants: Tenants, cabinet: Cabinet, clock: Clock, look_s: float = LOOK_S
    ) -> None:
        self._engine = engine
        self._tenants = tenants
        self._cabinet = cabinet
        self._clock = clock
        self._look_s = look_s
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._running is None:
            self._running = in_background(self._run(), name="unrunnable jobs")

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            try:
                await self.look()
            except ComfyFleetError as error:
                _LOG.warning("jobs that nobody can run are looked for later: %s", error)
            except Exception:
                log_failure(
                    _LOG, "jobs that nobody can run could not be looked for; the next look tries again"
                )

    async def look(self) -> int:
        """How many have failed."""
        mine = await claim(self._cabinet, self._clock, CLAIM)
        if mine is None:
            return 0
        try:
            return await self._look(mine)
        finally:
            with contextlib.suppress(ComfyFleetError):
                await mine.give_back()

    async def _look(self, mine: Claim) -> int:
        classes, now, failed = (
            await self._engine.judge.unrunnable_classes(),
            await self._engine.store.now(),
            0,
        )
        noted = await self._noted()
        for key in noted.keys() - classes.keys():
            await self._cabinet.remove(DRAWER, key)
        for key in classes.keys() - noted.keys():
            await self._cabinet.put(DRAWER, key, msgspec.json.encode(_Noted(now)), version=0)
        of_tenants: dict[TenantId, dict[ClassKey, float]] = {}
        for key, cls in classes.items():
            if key in noted:
                of_tenants.setdefault(cls.tenant, {})[key] = noted[key]
        for tenant_id, since in of_tenants.items():
            after_s = unrunnable_after(await self._tenants.newest(tenant_id), self._engine.rules)
            due = {key: at for key, at in since.items() if at + after_s <= now}
            try:
                failed += await self._fail(tenant_id, due, after_s, mine) if due else 0
            except Fault as fault:
                _LOG.info("jobs of tenant %s that nobody can run fail later: %s", tenant_id, fault)
        return failed

    async def _noted(self) -> dict[ClassKey, float]:
        noted: dict[ClassKey, float] = {}
        after = ""
        while page := await self._cabinet.listing(DRAWER, after, _PAGE):
            noted |= {ClassKey(each.name): msgspec.json.decode(each.body, type=_Noted).since for each in page}
            after = page[-1].name
        return noted

    async def _fail(
        self, tenant_id: TenantId, due: dict[ClassKey, float], after_s: float, mine: Claim
    ) -> int:
        store, failed = self._engine.store, 0
        after: JobId | None = None
        while True:
            page = await store.records.listing(tenant=tenant_id, phase=Phase.QUEUED, limit=_PAGE, after=after)
            for dispatch in await store.load_many([each.job_id for each in page]):
                if dispatch is not None and dispatch.class_key in due:
                    await mine.keep()
                    failed += await self._engine.judge.fail_unrunnable(
                        dispatch, due[dispatch.class_key], after_s
                    )
            if len(page) < _PAGE:
                return failed
            after = page[-1].job_id
