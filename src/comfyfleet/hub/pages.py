"""The status page: data of the API for people to read. The caller's role decides what it shows."""

from __future__ import annotations

from starlette.responses import HTMLResponse

from comfyfleet.engine.engine import Engine
from comfyfleet.hub import html
from comfyfleet.hub.fleet import TenantQueueStats, workers_seen
from comfyfleet.hub.http.pipeline import Handler, HubRequest
from comfyfleet.model.calls import JobFilter
from comfyfleet.wire import answers
from comfyfleet.wire.route import LOOKERS

_RECENT = 20


class PageHandlers:
    def __init__(self, engine: Engine, stats: TenantQueueStats, version: str) -> None:
        self._engine = engine
        self._stats = stats
        self._version = version

    def bound(self) -> dict[str, Handler]:
        return {"status_page": self.status}

    async def status(self, call: HubRequest[None]) -> HTMLResponse:
        engine = self._engine
        stats = await self._stats.of(call.caller.scope)
        workers = await workers_seen(engine, call.caller) if call.caller.role in LOOKERS else None
        page = await engine.listing(JobFilter(call.caller.scope), _RECENT, newest_first=True)
        jobs = list(map(answers.job, page.jobs))
        text = html.status_page(stats, workers, jobs, engine.now(), self._version)
        return HTMLResponse(text, headers=html.HEADERS)
