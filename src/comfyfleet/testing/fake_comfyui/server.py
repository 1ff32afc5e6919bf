"""The fake ComfyUI server: starting, stopping, crashing and coming back.

`FakeComfyUI` puts the parts together. A crash cuts every connection and throws the process memory away; disk,
switches and stats stay.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from comfyfleet.testing.fake_comfyui.catalogue import make_catalogue
from comfyfleet.testing.fake_comfyui.clock import FakeClock, ScaledClock
from comfyfleet.testing.fake_comfyui.control_routes import PREFIX, ControlRoutes
from comfyfleet.testing.fake_comfyui.disk import FakeDisk
from comfyfleet.testing.fake_comfyui.execution import Executor
from comfyfleet.testing.fake_comfyui.faults import ACTIONS, Faults, path_meets
from comfyfleet.testing.fake_comfyui.file_routes import FileRoutes
from comfyfleet.testing.fake_comfyui.info_routes import InfoRoutes
from comfyfleet.testing.fake_comfyui.known_nodes import known_node_classes
from comfyfleet.testing.fake_comfyui.machine import FakeMachine
from comfyfleet.testing.fake_comfyui.pictures import require_pillow
from comfyfleet.testing.fake_comfyui.prompt_routes import PromptRoutes
from comfyfleet.testing.fake_comfyui.settings import FakeSettings, parse_version
from comfyfleet.testing.fake_comfyui.stats import FakeStats

_log = logging.getLogger(__name__)

_SHUTDOWN_S = 0.01


class FakeComfyUI:
    """A server that speaks ComfyUI's HTTP and WebSocket.

    Use it as an async context manager, or call `start` and `stop`; `stop` may be called twice. `faults` can
    be set at any time; `stats` counts what really happened, across crashes.
    """

    def __init__(
        self,
        settings: FakeSettings | None = None,
        *,
        clock: FakeClock | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.settings = settings if settings is not None else FakeSettings()
        self.faults = faults if faults is not None else Faults()
        self.stats = FakeStats()
        self._clock = clock if clock is not None else ScaledClock(self.settings.time_scale)
        self._disk: FakeDisk | None = None
        self._machine: FakeMachine | None = None
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._actions: set[asyncio.Task[None]] = set()
        self._host = "127.0.0.1"
        self._port = 0
        self._lives = 0
        self._life_lock = asyncio.Lock()
        self._is_stopping = asyncio.Event()
        self.faults.listen(self._on_switch)

    async def __aenter__(self) -> Self:
        await self.start(self._host, self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
    def disk(self) -> FakeDisk:
        """Where its files are; valid between start and stop."""
        if self._disk is None:
            raise RuntimeError("the fake ComfyUI has no disk before it was started: await start() first")
        return self._disk

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Starts to listen; port 0 takes a free one. Does nothing if it already listens."""
        async with self._life_lock:
            if not self.is_up:
                await self._begin_life(host, port)

    async def _begin_life(self, host: str, port: int) -> None:
        require_pillow()
        self._is_stopping.clear()
        is_first_life = self._disk is None
        disk = self._disk if self._disk is not None else FakeDisk(self.settings.base_folder)
        try:
            await self._listen(disk, host, port)
        except BaseException:
            if is_first_life:
                disk.remove()
            raise
        self._disk = disk

    async def _listen(self, disk: FakeDisk, host: str, port: int) -> None:
        disk.empty_temp()
        machine = FakeMachine(
            self.settings,
            clock=self._clock,
            disk=disk,
            faults=self.faults,
            stats=self.stats,
            first_number=self.settings.first_number if self._lives == 0 else 0,
        )
        runner = web.AppRunner(_make_app(machine), access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        site = web.TCPSite(runner, host, port, reuse_address=True)
        try:
            await site.start()
        except OSError:
            await runner.cleanup()
            raise
        self._lives += 1
        self._machine, self._runner = machine, runner
        self._host, self._port = host, runner.addresses[0][1]
        self._tasks = [
            asyncio.create_task(Executor(machine).work(), name="fake ComfyUI worker"),
            asyncio.create_task(self._publish(machine), name="fake ComfyUI publisher"),
        ]

    async def stop(self) -> None:
        """Stops for good: cuts connections like a killed process and removes the temporary disk."""
        self._is_stopping.set()
        try:
            await asyncio.gather(*self._actions, return_exceptions=True)
            async with self._life_lock:
                await self._end_life()
        finally:
            # Also if the stop itself is cancelled.
            if self._disk is not None:
                self._disk.remove()
                self._disk = None

    def install(self, class_type: str) -> None:
        """Adds a node class of its release to the running server."""
        assert self._machine is not None, "a server that is not up has no classes"
        known = known_node_classes(parse_version(self.settings.version))
        self._machine.catalogue |= make_catalogue(known, (class_type,), ())

    async def crash(self) -> None:
        """Dies as by SIGKILL: connections drop, memory is lost, files stay."""
        async with self._life_lock:
            if self.is_up:
                self.stats.crashes += 1
                await self._end_life()

    async def restart(self) -> None:
        """Starts again on the same port, after a crash if it is up."""
        await self.crash()
        await self.start(self._host, self._port)

    async def _end_life(self) -> None:
        # The dead thread belonged to the old process.
        self.faults.dead_worker = False
        runner, self._runner, self._machine = self._runner, None, None
        if runner is None:
            return
        for task in self._tasks:
            task.cancel()
        for site in list(runner.sites):
            await site.stop()
        server = runner.server
        for connection in list(server.connections) if server is not None else []:
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await runner.cleanup()

    async def _publish(self, machine: FakeMachine) -> None:
        try:
            await machine.sockets.publish()
        except TypeError as error:
            # A message that is not JSON ends the sender, and with it a real server.
            _log.info("%s: a message could not be sent and ended the server: %s", self.settings.name, error)
            self._act(self.crash())

    def _on_switch(self, name: str) -> None:
        if self._machine is not None:
            self._machine.signal.notify()
        if name not in ACTIONS or not getattr(self.faults, name):
            return
        setattr(self.faults, name, False)
        if name == "drop_sockets" and self._machine is not None:
            self._machine.sockets.drop_all()
        elif name == "restart":
            self._act(self._crash_for(0.0))
        elif name == "crash":
            self._act(self._crash_for(self.faults.down_seconds))

    async def _crash_for(self, down_seconds: float | None) -> None:
        await self.crash()
        if down_seconds is None:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_stopping.wait(), down_seconds)
        if not self._is_stopping.is_set():
            await self.start(self._host, self._port)

    def _act(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(action)
        self._actions.add(task)
        task.add_done_callback(self._actions.discard)


def _make_app(machine: FakeMachine) -> web.Application:
    app = web.Application(
        client_max_size=machine.settings.max_upload_bytes,
        middlewares=[_own_faults(machine), _same_origin],
    )
    prompts, info = PromptRoutes(machine), InfoRoutes(machine)
    twins = [*prompts.aliased_routes(), *FileRoutes(machine).aliased_routes(), *info.aliased_routes()]
    app.add_routes(ControlRoutes(machine).routes())
    app.add_routes(prompts.job_routes())
    app.add_routes([web.route(twin.method, f"/api{twin.path}", twin.handler) for twin in twins])
    app.add_routes(twins)
    app.add_routes(info.others())
    return app


def _own_faults(machine: FakeMachine) -> Middleware:
    @web.middleware
    async def apply(request: web.Request, handler: Handler) -> web.StreamResponse:
        faults = machine.faults
        if request.path.startswith(PREFIX):
            return await handler(request)
        asked = machine.stats.requests
        asked[request.path] = asked.get(request.path, 0) + 1
        await machine.loop_is_free.wait()
        if faults.redirect_to and path_meets(request.path, faults.redirect_paths):
            return web.Response(status=302, headers={"Location": f"{faults.redirect_to}{request.path_qs}"})
        if faults.endless_paths and path_meets(request.path, faults.endless_paths):
            return await _endless(request, machine)
        if faults.swollen_paths and path_meets(request.path, faults.swollen_paths):
            return web.Response(body=b"[" + b"[]," * 1_000_000 + b"[]]", content_type="application/json")
        if faults.slow_answer_s > 0 and path_meets(request.path, faults.slow_paths):
            await asyncio.sleep(faults.slow_answer_s)
        if path_meets(request.path, faults.fail_request_paths) and faults.takes_one("fail_requests"):
            return web.Response(status=500, text="500 Internal Server Error\n\nServer got itself in trouble")
        return await handler(request)

    return apply


async def _endless(request: web.Request, machine: FakeMachine) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"a": "')
    piece = b"x" * 65_536
    with suppress(ConnectionError):
        while True:
            await response.write(piece)
            machine.stats.bytes_without_end += len(piece)
    return response


@web.middleware
async def _same_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuses pages of other sites that access a server on this machine."""
    origin = request.headers.get("Origin")
    if origin is not None:
        host = urlsplit(f"//{request.host.lower()}")
        site = urlsplit(origin.lower())
        is_same = host.hostname == site.hostname and (
            host.port == site.port or host.port is None or site.port is None
        )
        if site.hostname and not is_same and _is_loopback(host.hostname):
            return web.Response(status=403)
    return await handler(request)


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
