"""Serves a hub on a port: uvicorn with our settings, TLS, and a shutdown with a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from functools import partial
from typing import Self

import msgspec
import uvicorn

from comfyfleet.hub.app import Hub
from comfyfleet.hub.http.connections import Connection, Connections
from comfyfleet.hub.http.credentials import is_loopback
from comfyfleet.hub.websocket.connection import WebSocketConnection
from comfyfleet.model.errors import Fault, Refusal, RefusalCode


class HubServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 3001
    """0: any free port."""
    ws_port: int | None = None
    """A second port for the same application; 0: any free port."""
    certificate_file: str | None = None
    key_file: str | None = None
    graceful_s: float = 5.0
    keep_alive_s: int = 75
    backlog: int = 2_048


class _Server(uvicorn.Server):
    """Leaves signals to the process: a hub may be part of another program. uvicorn has no such setting."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HubServer:
    """An async context manager: the hub answers at `url` while it is open."""

    def __init__(self, hub: Hub, settings: HubServerSettings | None = None) -> None:
        self._hub = hub
        self._settings = settings or HubServerSettings()
        self._sockets: list[socket.socket] = []
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._connections = Connections(hub.limits)
        self.port = 0
        self.ws_port: int | None = None

    @property
    def url(self) -> str:
        scheme = "http" if self._settings.certificate_file is None else "https"
        host = self._settings.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def __aenter__(self) -> Self:
        settings = self._settings
        if self._hub.is_open and not is_loopback(settings.host):
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                f"a hub without keys may not listen on {settings.host}: bind to 127.0.0.1, or use keys",
            )
        self._sockets = [_bind(settings, settings.port)]
        self.port = self._sockets[0].getsockname()[1]
        if settings.ws_port is not None and settings.ws_port != self.port:
            try:
                self._sockets.append(_bind(settings, settings.ws_port))
            except Fault:
                self._sockets[0].close()
                raise
            self.ws_port = self._sockets[1].getsockname()[1]
        self._server = _Server(_config(self._hub, settings, self._connections))
        self._task = asyncio.create_task(self._server.serve(self._sockets), name="hub")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise Fault("the hub's server ended before it was ready; its log names the cause")
            await asyncio.sleep(0.005)
        self._connections.start()
        self._hub.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Answers parked requests and ends all connections within the grace time. Can be called twice."""
        self._hub.stop()
        self._connections.close()
        if self._server is not None:
            self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task})
        await self._hub.finish()
        for bound in self._sockets:
            bound.close()

    async def serve(self) -> None:
        """Waits until the server is closed."""
        assert self._task is not None, "a server is waited for inside its context"
        await asyncio.shield(self._task)


def _bind(settings: HubServerSettings, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Without the protocol, asyncio does not recognise TCP and does not set TCP_NODELAY.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((settings.host, port))
    except OSError as error:
        bound.close()
        hint = (
            f"{settings.host} is no address of this machine; choose one with --host"
            if error.errno == errno.EADDRNOTAVAIL
            else "choose another port with --port, or stop the process that uses it"
        )
        raise Fault(f"the hub cannot listen on {settings.host}:{port}: {error.strerror}; {hint}") from error
    return bound


def _config(hub: Hub, settings: HubServerSettings, connections: Connections) -> uvicorn.Config:
    return uvicorn.Config(
        hub,
        http=partial(Connection, connections),  # type: ignore[arg-type]
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        ws=WebSocketConnection,
        ws_max_size=hub.limits.max_frame_bytes,
        backlog=settings.backlog,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=int(settings.graceful_s),
        ssl_certfile=settings.certificate_file,
        ssl_keyfile=settings.key_file,
    )
