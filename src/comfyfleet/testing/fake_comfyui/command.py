"""Runs a fake server until it is stopped, for the command line."""

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
    """Serves until cancelled. Calls `on_ready` once, when the server answers, with its port."""
    server = FakeComfyUI(settings, faults=faults)
    try:
        await server.start(host, port)
        if on_ready is not None:
            on_ready(server)
        await asyncio.Event().wait()
    finally:
        await server.stop()
