"""Running a fake server until it is told to stop: what the command line calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from comfyfleet.testing.fake_comfyui.faults import Faults
from comfyfleet.testing.fake_comfyui.server import FakeComfyUI
from comfyfleet.testing.fake_comfyui.settings import FakeSettings


async def serve(
    settings: FakeSettings,
    host: str,
    port: int,
    faults: Faults | None = None,
    on_ready: Callable[[FakeComfyUI], None] | None = None,
) -> None:
    """Serve until cancelled. `on_ready` is called once, when the server answers; with port 0 it learns the port."""
    server = FakeComfyUI(settings, faults=faults)
    try:
        await server.start(host, port)
        if on_ready is not None:
            on_ready(server)
        await asyncio.Event().wait()
    finally:
        await server.stop()
