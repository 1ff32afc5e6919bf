"""Listens for commands on a call of its own, so that they are heard at once and not with the next heartbeat.

A convenience that may fail: whatever is missed here comes with a heartbeat. What a command means is the agent's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from comfyfleet.model.calls import Command
from comfyfleet.model.ids import WorkerId
from comfyfleet.ports import WorkerApi
from comfyfleet.worker.settings import AgentSettings, Backoff


class CommandListener:
    def __init__(
        self,
        api: WorkerApi,
        worker_id: WorkerId,
        settings: AgentSettings,
        obey: Callable[[Command], None],
        on_call: Callable[[], None],
    ) -> None:
        """`on_call`: the other side answered early and without a command: a heartbeat has something new."""
        self._api = api
        self._worker_id = worker_id
        self._settings = settings
        self._obey = obey
        self._on_call = on_call
        self._is_registered = asyncio.Event()

    def set_registered(self, is_registered: bool) -> None:
        """Only a registered worker has somebody to listen to."""
        if is_registered:
            self._is_registered.set()
        else:
            self._is_registered.clear()

    async def run(self) -> None:
        """Listens, for ever."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._settings)
        while True:
            await self._is_registered.wait()
            asked_at = loop.time()
            commands: tuple[Command, ...] = ()
            try:
                commands = await self._api.commands(self._worker_id, self._settings.command_wait_s)
            except Exception:
                # The heartbeat meets the same trouble and does what is to be done about it.
                await asyncio.sleep(backoff.next_s())
                continue
            for command in commands:
                self._obey(command)
            if not commands and loop.time() - asked_at < self._settings.command_wait_s / 2:
                self._on_call()
            if commands or loop.time() - asked_at >= self._settings.command_wait_s / 2:
                backoff.reset()
            if loop.time() - asked_at < self._settings.backoff_base_s:
                # One that answers without parking, or says the same again and again, must not make us spin.
                await asyncio.sleep(backoff.next_s())
