"""Whether a server whose worker thread was found dead, or busy with a prompt that does not stop, may be used again.

Such a server leaves HTTP answering, so health cannot be asked for. Owns the memory of the diagnosis and the signs that
end it; who diagnoses is `run.py`, and what an unhealthy server means is for whoever asks.
"""

from __future__ import annotations

import asyncio

from comfyfleet.worker.connectors.comfyui.api import Api
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings
from comfyfleet.worker.connectors.comfyui.truth import prompts_of


class Vitality:
    def __init__(self, api: Api, settings: ComfyUISettings) -> None:
        self._api = api
        self._settings = settings
        self._stuck: str | None = None
        """The prompt at which the worker was found dead, or which it goes on running against our will."""
        self._is_busy = False
        self._found_at = 0.0
        self._losses = 0

    def found_dead(self, prompt_id: str, losses: int) -> None:
        self._stuck = prompt_id
        self._is_busy = False
        self._found_at = asyncio.get_running_loop().time()
        self._losses = losses

    def found_busy(self, prompt_id: str, losses: int) -> None:
        """It runs a prompt that nobody wants any more: whatever came next would wait behind that."""
        self.found_dead(prompt_id, losses)
        self._is_busy = True

    def found_alive(self) -> None:
        self._stuck = None

    async def is_dead(self, losses: int, *, is_listening: bool) -> bool:
        """`losses` counts how often the websocket was lost. Raises `Unreachable`."""
        if self._stuck is None:
            return False
        # The socket of a server goes with its process, so one that was lost and is back may be a new server's.
        is_new = losses > self._losses and is_listening
        if is_new or not await self._shows_no_life():
            self.found_alive()
            return False
        return True

    async def _shows_no_life(self) -> bool:
        running, waiting = await prompts_of(self._api)
        if self._is_busy:
            return self._stuck in running
        if running - {self._stuck}:
            return False
        # An empty queue proves nothing, so the diagnosis does not stand for ever: it may have been wrong.
        is_old = asyncio.get_running_loop().time() >= self._found_at + self._settings.dead_worker_s
        return bool(running or waiting) or not is_old
