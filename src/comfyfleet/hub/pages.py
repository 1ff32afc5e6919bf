"""Pages for people: the status page, whose content depends on the caller's role, and the API at /docs. Also the
OpenAPI document."""

from __future__ import annotations

from functools import cached_property

from starlette.responses import HTMLResponse

from comfyfleet.engine.engine import Engine
from comfyfleet.hub import html
from comfyfleet.hub.api_page import api_page
from comfyfleet.hub.fleet import TenantQueueStats, workers_seen
from comfyfleet.hub.http.pipeline import HubRequest, Reply
from comfyfleet.model.calls import JobFilter
from comfyfleet.wire import answers
from comfyfleet.wire.openapi import document
from comfyfleet.wire.route import FLEET_VIEWERS, Route

_RECENT = 20


class PageHandlers:
    def __init__(
        self, engine: Engine, stats: TenantQueueStats, version: str, routes: tuple[Route, ...]
    ) -> None:
        self._engine = engine
        self._stats = stats
        self._version = version
        self._document = document(routes, version)

    async def status_page(self, call: HubRequest[None]) -> HTMLResponse:
        engine = self._engine
        stats = await self._stats.of(call.caller.scope)
        workers = await workers_seen(engine, call.caller) if call.caller.role in FLEET_VIEWERS else None
        page = await engine.listing(JobFilter(call.caller.scope), _RECENT, newest_first=True)
        jobs = list(map(answers.job_body, page.jobs))
        text = html.status_page(stats, workers, jobs, engine.now(), self._version)
        return HTMLResponse(text, headers=html.HEADERS)

    async def api_page(self, call: HubRequest[None]) -> HTMLResponse:
        return HTMLResponse(self._api_page, headers=html.HEADERS)

    async def openapi(self, call: HubRequest[None]) -> Reply:
        return Reply(200, self._document)

    @cached_property
    def _api_page(self) -> str:
        return api_page(self._document)
