"""The fake's own routes: its switches and its counts.

No real server has `/fake/...`. No fault applies to these routes, so a test can always repair a broken fake.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from comfyfleet.testing.fake_comfyui.faults import ACTIONS
from comfyfleet.testing.fake_comfyui.machine import FakeMachine

PREFIX = "/fake/"
# An answer needs a moment to leave before a crash cuts its connection.
_ANSWER_FIRST_S = 0.05


class ControlRoutes:
    """Handlers for tests that control the fake."""

    def __init__(self, machine: FakeMachine) -> None:
        self._machine = machine

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/fake/faults", self.get_faults),
            web.post("/fake/faults", self.post_faults),
            web.get("/fake/stats", self.get_stats),
        ]

    async def get_faults(self, _request: web.Request) -> web.Response:
        return web.json_response(msgspec.to_builtins(self._machine.faults))

    async def post_faults(self, request: web.Request) -> web.Response:
        faults = self._machine.faults
        try:
            switches: dict[str, Any] = msgspec.json.decode(await request.read(), type=dict[str, Any])
            actions = {name: switches.pop(name) for name in ACTIONS if name in switches}
            faults.change(switches)
        except msgspec.DecodeError as error:
            return web.json_response({"error": f"no switch was changed: {error}"}, status=400)
        for name, value in actions.items():
            if value:
                asyncio.get_running_loop().call_later(_ANSWER_FIRST_S, setattr, faults, name, True)
        return web.json_response(msgspec.to_builtins(faults))

    async def get_stats(self, _request: web.Request) -> web.Response:
        machine = self._machine
        stats = msgspec.to_builtins(machine.stats)
        now = {
            "worker_is_dead": machine.worker_is_dead,
            "queue_remaining": machine.queue.remaining,
            "models_on_card": list(machine.gpu.resident),
        }
        return web.json_response({**stats, "now": now})
