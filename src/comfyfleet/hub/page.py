"""The status page: what the API tells, drawn for people. The caller's role decides what is on it."""

from __future__ import annotations

from starlette.responses import HTMLResponse

from comfyfleet.engine.engine import Engine
from comfyfleet.hub import html
from comfyfleet.hub.door import Call, Handler
from comfyfleet.model.calls import JobFilter
from comfyfleet.wire import answers
from comfyfleet.wire.route import LOOKERS

_RECENT = 20


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
            known = await engine.workers()
            held = await engine.leases(known)
            workers = [answers.worker(worker, held[worker.worker_id]) for worker in known]
        now = await engine.store.now()
        page = await engine.listing(JobFilter(call.caller.scope), _RECENT, newest_first=True)
        jobs = list(map(answers.job, page.jobs))
        stats = answers.StatsBody(**counts, is_paused=is_paused)
        text = html.status_page(stats, workers, jobs, now, self._version)
        return HTMLResponse(text, headers=html.HEADERS)
