"""The fake LangFlow server: starting, stopping, dying and coming back.

`FakeLangFlow` puts the parts together and owns what every answer passes: the key, the faults, a blocked process. A
death cuts every connection; jobs, files and switches stay.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from comfyfleet.testing.fake_comfyui.clock import FakeClock, ScaledClock
from comfyfleet.testing.fake_langflow.answers import answer_json
from comfyfleet.testing.fake_langflow.direct_runs import FakeDirectRuns
from comfyfleet.testing.fake_langflow.file_routes import LangFlowFileRoutes
from comfyfleet.testing.fake_langflow.flow_routes import FlowRoutes
from comfyfleet.testing.fake_langflow.flows import FakeFlow
from comfyfleet.testing.fake_langflow.jobs import FakeLangFlowJobs
from comfyfleet.testing.fake_langflow.run import FlowRun, RunRequest, Tell
from comfyfleet.testing.fake_langflow.settings import FakeLangFlowSettings, LangFlowFaults
from comfyfleet.testing.fake_langflow.workflow_routes import WorkflowRoutes

_SHUTDOWN_S = 0.01
_OPEN = ("/health", "/health_check", "/healthz", "/api/v1/version", "/api/v1/config")


class FakeLangFlow:
    """A server that speaks LangFlow's HTTP. Use it as an async context manager.

    `faults` can be set at any time; `jobs` shows what really happened, across restarts."""

    def __init__(
        self,
        settings: FakeLangFlowSettings | None = None,
        *,
        clock: FakeClock | None = None,
        faults: LangFlowFaults | None = None,
    ) -> None:
        self.settings = settings or FakeLangFlowSettings()
        self.faults = faults or LangFlowFaults()
        self.clock = clock or ScaledClock(self.settings.time_scale)
        self.storage: dict[str, bytes] = {}
        """Files by path: the id of a flow or user, and the name."""
        self.jobs = FakeLangFlowJobs(self.settings, self.faults, self.clock, self.make_run)
        self.direct_runs = FakeDirectRuns(self.faults, self.make_run)
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request."""
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._blocked = 0
        self._unblocked = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    @property
    def is_up(self) -> bool:
        return self._runner is not None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listens, after a death on the same port."""
        if self._runner is not None:
            return
        self.jobs.begin_process()
        app = web.Application(middlewares=[self._middleware()], client_max_size=1 << 30)
        FlowRoutes(self).add_to(app)
        LangFlowFileRoutes(self).add_to(app)
        if self.has_jobs:
            WorkflowRoutes(self).add_to(app)
        self._runner = web.AppRunner(
            app, shutdown_timeout=_SHUTDOWN_S, handler_cancellation=True, access_log=None
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port or self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """As SIGKILL: running jobs are lost, queued ones hang."""
        await self._end_process(is_killed=True)

    async def terminate(self) -> None:
        """As SIGTERM: running jobs fail without a reason."""
        await self._end_process(is_killed=False)

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    async def _end_process(self, *, is_killed: bool) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        await self.jobs.end_process(is_killed=is_killed)
        await self.direct_runs.end_process()
        if runner.server is not None:
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        await runner.cleanup()

    @property
    def has_jobs(self) -> bool:
        major, minor = self.settings.version.split(".")[:2]
        return int(major) > 1 or int(minor) >= 11

    @property
    def is_before_1_13(self) -> bool:
        """As seen with a real 1.11: the list of flows is compressed, and tweaks of code are ignored."""
        major, minor = self.settings.version.split(".")[:2]
        return int(major) < 2 and int(minor) < 13

    def find_flow(self, name: str) -> FakeFlow | None:
        for flow in self.flows:
            if name in (flow.flow_id, flow.endpoint_name):
                return flow
        return None

    @property
    def flows(self) -> list[FakeFlow]:
        return [flow for flow in self.settings.flows if flow.name not in self.faults.missing_flows]

    def make_run(self, run_id: str, flow: FakeFlow, request: RunRequest, tell: Tell) -> FlowRun:
        return FlowRun(run_id, flow, request, self.clock, self.storage, self.block, self.faults, tell)

    async def block(self, seconds: float) -> None:
        """A component that does not await: nothing is answered meanwhile."""
        self._blocked += 1
        self._unblocked.clear()
        try:
            await self.clock.sleep(seconds)
        finally:
            self._blocked -= 1
            if not self._blocked:
                self._unblocked.set()

    async def wait_unblocked(self) -> None:
        while self._blocked or self.faults.stalls:
            if self.faults.stalls:
                await asyncio.sleep(0.01)
            else:
                await self._unblocked.wait()

    # what every request passes

    def _middleware(self) -> Middleware:
        @web.middleware
        async def pass_through(request: web.Request, handler: Handler) -> web.StreamResponse:
            self.requests.append((request.method, request.path))
            await self.wait_unblocked()
            if (answer := await self._faulty_answer(request)) is not None:
                return answer
            if (refusal := self._refusal(request)) is not None:
                return refusal
            try:
                return await handler(request)
            except ConnectionResetError:
                # The client hung up.
                raise asyncio.CancelledError from None
            except web.HTTPNotFound:
                return answer_json({"detail": "Not Found"}, 404)
            except web.HTTPMethodNotAllowed:
                return answer_json({"detail": "Method Not Allowed"}, 405)

        return pass_through

    async def _faulty_answer(self, request: web.Request) -> web.StreamResponse | None:
        faults, path = self.faults, request.path_qs
        if faults.redirects is not None and faults.redirects in path:
            return web.Response(status=307, headers={"Location": f"{self.url}/"})
        if faults.garbage is not None and faults.garbage in path:
            return web.Response(text="<html>another program</html>", content_type="text/html")
        if faults.endless_answers is not None and faults.endless_answers in path:
            stream = web.StreamResponse(headers={"Content-Type": "application/json"})
            await stream.prepare(request)
            with suppress(ConnectionResetError):
                while True:
                    await stream.write(b'{"a": "' + b"x" * 65536)
            return stream
        return None

    def _refusal(self, request: web.Request) -> web.Response | None:
        wanted = self.settings.key
        if wanted is None or request.path in _OPEN:
            return None
        given = request.headers.get("x-api-key") or request.query.get("x-api-key")
        if given == wanted and not self.faults.refuses_key:
            return None
        is_run = request.path.startswith("/api/v1/run")
        if given is None:
            missing = "An API key must be passed as query or header" if is_run else None
            return answer_json({"detail": missing or "No authentication credentials provided"}, 403)
        return answer_json({"detail": "Invalid or missing API key" if is_run else "Invalid API key"}, 403)
