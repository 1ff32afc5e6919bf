"""The status page: what the API tells, drawn for people. The caller's role decides what is on it."""

from __future__ import annotations

from starlette.responses import HTMLResponse

from comfyfleet.engine.engine import Engine
from comfyfleet.hub import html
from comfyfleet.hub.door import Call, Handler
from comfyfleet.model.calls import JobFilter
from comfyfleet.model.ids import TenantId
from comfyfleet.wire import answers
from comfyfleet.wire.route import LOOKERS

_RECENT = 20
_WINDOWS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 86400.0, 7 * 86400.0)
"""Jobs are listed from a moment on, so the newest are looked for in longer and longer stretches."""


class PageHandlers:
    def __init__(self, engine: Engine, version: str) -> None:
        self._engine = engine
        self._version = version

    def bound(self) -> dict[str, Handler]:
        return {"status_page": self.status}

    async def status(self, call: Call[None]) -> HTMLResponse:
        engine = self._engine
        found = await engine.stats()
        is_paused = await engine.store.is_queue_paused()
        counts = {name: getattr(found, name) for name in found.__struct_fields__}
        workers = None
        if call.caller.role in LOOKERS:
            workers = [
                answers.worker(worker, await engine.store.leases_of(worker.worker_id))
                for worker in await engine.workers()
            ]
        now = await engine.store.now()
        jobs = await self._recent(call.caller.scope, now)
        stats = answers.StatsBody(**counts, is_paused=is_paused)
        text = html.status_page(stats, workers, jobs, now, self._version)
        return HTMLResponse(text, headers=html.HEADERS)

    async def _recent(self, tenant: TenantId | None, now: float) -> list[answers.JobBody]:
        """The newest first."""
        for window_s in _WINDOWS_S:
            page = await self._engine.listing(JobFilter(tenant, submitted_after=now - window_s), 200)
            if len(page.jobs) >= _RECENT or window_s == _WINDOWS_S[-1]:
                break
        return [answers.job(record) for record in reversed(page.jobs[-_RECENT:])]
