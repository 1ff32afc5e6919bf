"""The fake server of the A1111 family: starting, stopping, crashing and coming back.

`FakeA1111` puts the parts together and applies the faults of the connection. A crash forgets everything but the runs
that were counted.
"""

from __future__ import annotations

import asyncio
import base64
import random
from contextlib import suppress
from typing import Self

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from comfyfleet.testing.fake_a1111.answers import http_error
from comfyfleet.testing.fake_a1111.faults import A1111Faults, path_matches
from comfyfleet.testing.fake_a1111.generation import GenerationRoutes
from comfyfleet.testing.fake_a1111.info_routes import FakeInfoRoutes
from comfyfleet.testing.fake_a1111.sampler import FakeSampler
from comfyfleet.testing.fake_a1111.settings import FakeA1111Settings
from comfyfleet.testing.fake_a1111.tasks import FakeA1111Run, FakeProcess
from comfyfleet.testing.fake_comfyui.clock import FakeClock, ScaledClock
from comfyfleet.testing.fake_comfyui.pictures import require_pillow

_MAX_UPLOAD = 256 << 20
_SHUTDOWN_S = 0.01
_RUN_COST = 5


class FakeA1111:
    """Use it as an async context manager, or call `start` and `stop`; `stop` may be called twice."""

    def __init__(
        self,
        settings: FakeA1111Settings | None = None,
        *,
        clock: FakeClock | None = None,
        faults: A1111Faults | None = None,
        seed: int = 0,
    ) -> None:
        self.settings = settings or FakeA1111Settings()
        self.faults = faults or A1111Faults()
        self.runs: list[FakeA1111Run] = []
        """Every request that reached the sampler, across crashes."""
        self.requests: dict[str, int] = {}
        """How often each path was asked for."""
        self._clock = clock or ScaledClock(self.settings.time_scale)
        self._chance = random.Random(seed)
        self._process: FakeProcess | None = None
        self._runner: web.AppRunner | None = None
        self._actions: set[asyncio.Task[None]] = set()
        self._host, self._port = "127.0.0.1", 0

    async def __aenter__(self) -> Self:
        await self.start(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def is_up(self) -> bool:
        return self._runner is not None

    @property
    def port(self) -> int:
        """The port it uses, also again after a crash; 0 before the first start."""
        return self._port

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def process(self) -> FakeProcess:
        assert self._process is not None, "the fake A1111 server is not up"
        return self._process

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Starts to listen; port 0 takes a free one. Does nothing if it already listens."""
        if self.is_up:
            return
        require_pillow()
        process = FakeProcess(self._clock, self._chance, self.settings.threads)
        titles = [each.title for each in self.settings.checkpoints]
        process.option = titles[0] if titles else ""
        process.loaded = process.option if self.settings.starts_loaded else ""
        app = web.Application(client_max_size=_MAX_UPLOAD, middlewares=[self._faulty(process)])
        sampler = FakeSampler(
            self.settings, self.faults, self._clock, process, self._chance, self._crash_in_run
        )
        generation = GenerationRoutes(self.settings, self.faults, process, sampler, self.runs)
        if self.settings.has_api:
            app.add_routes(generation.routes())
        app.add_routes(FakeInfoRoutes(self.settings, self.faults, process).routes())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        site = web.TCPSite(runner, host, port, reuse_address=True)
        try:
            await site.start()
        except OSError:
            await runner.cleanup()
            raise
        self._process, self._runner = process, runner
        self._host, self._port = host, runner.addresses[0][1]

    async def stop(self) -> None:
        """Stops for good, like a killed process."""
        await self.crash()
        if self._actions:
            await asyncio.gather(*self._actions, return_exceptions=True)

    async def crash(self) -> None:
        """Dies as by SIGKILL: connections drop and memory is lost."""
        runner, self._runner = self._runner, None
        process, self._process = self._process, None
        if runner is None or process is None:
            return
        for work in list(process.work):
            work.cancel()
        for run in self.runs:
            if run.outcome == "running":
                run.outcome = "died"
        for site in list(runner.sites):
            await site.stop()
        server = runner.server
        for connection in list(server.connections) if server is not None else []:
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    async def restart(self) -> None:
        """Starts again on the same port."""
        await self.crash()
        await self.start(self._host, self._port)

    def interrupt(self) -> None:
        """What somebody does who presses Interrupt in the browser."""
        self.process.flags.interrupted = True
        self.process.changed.set()

    def recheck_faults(self) -> None:
        """To be called after a fault was cleared that a run waits for."""
        if self._process is not None:
            self._process.changed.set()

    async def _crash_in_run(self) -> None:
        action = asyncio.create_task(self.crash())
        self._actions.add(action)
        action.add_done_callback(self._actions.discard)
        # The task of the run dies with its process.
        await asyncio.Event().wait()

    def _faulty(self, process: FakeProcess) -> Middleware:
        @web.middleware
        async def apply(request: web.Request, handler: Handler) -> web.StreamResponse:
            faults, path = self.faults, request.path
            self.requests[path] = self.requests.get(path, 0) + 1
            while path_matches(path, faults.deaf_paths):
                process.changed.clear()
                await process.changed.wait()
            if faults.redirect_to and path_matches(path, faults.redirect_paths):
                return web.Response(
                    status=307, headers={"Location": f"{faults.redirect_to}{request.path_qs}"}
                )
            if path_matches(path, faults.endless_paths):
                return await _endless(request)
            if path_matches(path, faults.garbage_paths):
                return web.Response(text="<html>it works!</html>", content_type="text/html")
            if faults.slow_answer_s and (not faults.slow_paths or path_matches(path, faults.slow_paths)):
                await asyncio.sleep(faults.slow_answer_s)
            if path.startswith("/sdapi") and (refused := self._refused(request)) is not None:
                return refused
            if self._is_too_often(process, path):
                return http_error(self.settings.flavour, 429, "Too Many Requests")
            # Every route of the real server that is not async has one of these threads for itself.
            async with process.threads:
                try:
                    return await handler(request)
                except web.HTTPNotFound:
                    return web.json_response({"detail": "Not Found"}, status=404)

        return apply

    def _refused(self, request: web.Request) -> web.Response | None:
        if not self.settings.user:
            return None
        given = request.headers.get("Authorization", "")
        if not given.startswith("Basic "):
            return http_error(self.settings.flavour, 401, "Not authenticated")
        wanted = base64.b64encode(f"{self.settings.user}:{self.settings.password}".encode()).decode()
        if given != f"Basic {wanted}":
            return http_error(self.settings.flavour, 401, "Incorrect username or password")
        return None

    def _is_too_often(self, process: FakeProcess, path: str) -> bool:
        if self.settings.flavour != "sdnext" or not path.startswith("/sdapi"):
            return False
        now = self._clock.now()
        recent = [each for each in process.request_times if each > now - 60.0]
        cost = _RUN_COST if path.endswith(("/txt2img", "/img2img")) else 1
        process.request_times = [*recent, *[now] * cost]
        return len(recent) + cost > self.settings.requests_per_minute


async def _endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"a": "')
    with suppress(ConnectionError):
        while True:
            await response.write(b"x" * 65_536)
    return response
