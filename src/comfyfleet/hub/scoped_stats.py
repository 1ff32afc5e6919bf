"""The queue as a key of one tenant sees it: its newest jobs, counted. Nobody else's are in the figures.

Stores count all jobs together. What belongs to one tenant is counted from its list, up to a bound and not more often
than every few seconds, so that asking costs no more than a look at the list.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from comfyfleet.engine.engine import Engine
from comfyfleet.model.calls import JobFilter
from comfyfleet.model.dispatch import Phase, Standing
from comfyfleet.model.ids import TenantId
from comfyfleet.policy.feasibility import admits
from comfyfleet.tracing import in_background
from comfyfleet.wire.answers import StatsBody

NEWEST = 500
_GOOD_FOR_S = 5.0
_MAX_KNOWN = 1_000


class _Counted(msgspec.Struct, frozen=True):
    phases: Counter[Phase]
    standings: Counter[Standing]
    payload_bytes: int
    jobs: int


class StatsDesk:
    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        """`now` is a clock that only goes forward."""
        self._engine = engine
        self._now = now
        self._known: dict[TenantId, tuple[float, asyncio.Task[_Counted]]] = {}

    async def of(self, scope: TenantId | None) -> StatsBody:
        """`scope` is the only tenant that the caller sees. None: it sees all of them."""
        engine = self._engine
        is_paused = await engine.store.is_queue_paused()
        if scope is None:
            stats = await engine.stats()
            return StatsBody(
                **{name: getattr(stats, name) for name in stats.__struct_fields__}, is_paused=is_paused
            )
        counted = await self._counted(scope)
        workers = [
            worker
            for worker in await engine.workers()
            if not worker.is_offline and admits(worker.capabilities.tenant_access, scope, is_strict=False)
        ]
        return StatsBody(
            waiting=counted.standings[Standing.IN_LANE],
            delayed=counted.standings[Standing.DELAYED],
            paused=counted.standings[Standing.PAUSED],
            leased=counted.phases[Phase.LEASED],
            completed=counted.phases[Phase.COMPLETED],
            failed=counted.phases[Phase.FAILED],
            cancelled=counted.phases[Phase.CANCELLED],
            workers=len(workers),
            idle_slots=engine.idle_slots,
            payload_bytes=counted.payload_bytes,
            is_paused=is_paused,
            counted=counted.jobs,
        )

    async def _counted(self, tenant: TenantId) -> _Counted:
        until, counting = self._known.pop(tenant, (0.0, None))
        if counting is None or self._now() >= until:
            counting = in_background(self._count(tenant), name="stats")
            until = self._now() + _GOOD_FOR_S
        self._known[tenant] = (until, counting)
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        try:
            # Shielded: others wait for the same count.
            return await asyncio.shield(counting)
        except Exception:
            self._known.pop(tenant, None)
            raise

    async def _count(self, tenant: TenantId) -> _Counted:
        page = await self._engine.listing(JobFilter(tenant), NEWEST, newest_first=True)
        is_open = [job.job_id for job in page.jobs if not job.phase.is_final]
        found = [each for each in await self._engine.store.load_many(is_open) if each is not None]
        phases = Counter(job.phase for job in page.jobs if job.phase.is_final)
        phases.update(each.phase for each in found)
        waiting = Counter(each.standing for each in found if each.phase is Phase.QUEUED)
        size = sum(each.payload_bytes for each in found if not each.phase.is_final)
        return _Counted(phases, waiting, size, len(page.jobs))
