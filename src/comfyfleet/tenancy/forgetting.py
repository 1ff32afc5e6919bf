"""What is old in tenants' databases: jobs with payload and result, and the events that were taken in.

A job goes there when the store has none of it any more, so whoever finds it in one place finds it in the other. The
book of credits stays: holds, settlements, postings, and what each round took.
"""

from __future__ import annotations

import logging

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault
from comfyfleet.policy.retention import DAY_S, Retention
from comfyfleet.ports import Store
from comfyfleet.tenancy.database import TenantDatabase
from comfyfleet.tenancy.homes import Homes

_LOG = logging.getLogger(__name__)
_PAGE = 500
_PAGES = 20
"""In one look at a database, of each kind."""


class Forgetting:
    def __init__(self, central: Store, homes: Homes, retention: Retention) -> None:
        self._central = central
        self._homes = homes
        self._retention = retention

    async def tidy(self) -> None:
        now = await self._central.now()
        for pool in await self._homes.everyone():
            try:
                database = await self._homes.pools.get(pool)
                await self._events(database, now)
                await self._jobs(database, now)
            except Fault as fault:
                # One database that is away must not keep the others full.
                _LOG.warning("what is old in the pool %s is forgotten later: %s", pool, fault)

    async def _events(self, database: TenantDatabase, now: float) -> None:
        before = now - self._retention.events_days * DAY_S
        for _ in range(_PAGES):
            if await database.forget_events(before, _PAGE) < _PAGE:
                return

    async def _jobs(self, database: TenantDatabase, now: float) -> None:
        kept = self._retention
        for phase, days in (
            (Phase.COMPLETED, kept.completed_days),
            (Phase.CANCELLED, kept.cancelled_days),
            (Phase.FAILED, kept.failed_days),
        ):
            before = now - days * DAY_S
            for _ in range(_PAGES):
                old = await database.ended_jobs(phase, before, _PAGE)
                known = await self._central.load_many(old)
                gone = [job_id for job_id, dispatch in zip(old, known, strict=True) if dispatch is None]
                if not gone or not await database.forget_jobs(gone, before) or len(old) < _PAGE:
                    break
