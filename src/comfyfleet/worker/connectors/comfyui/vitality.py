"""Whether a server may be used whose execution thread is dead, or does not get round to our prompts.

Such a server leaves HTTP answering, so health cannot be asked for. Owns the memory of the diagnosis, its words, and the
signs that end it; who diagnoses is `run.py`, and what an unhealthy server means is for whoever asks.
"""

from __future__ import annotations

import asyncio
from enum import Enum

import msgspec

from comfyfleet.worker.connectors.comfyui.api import Api
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings
from comfyfleet.worker.connectors.comfyui.truth import prompts_of

RESTART = "its execution thread is dead; restart it"


class Ahead(msgspec.Struct, frozen=True):
    """Somebody else's prompt that runs while ours waits."""

    prompt_id: str
    since: float
    """Since when it runs without a sign of life, as far as we saw. On the event loop's clock."""
    is_deadly: bool = False
    """Its graph is one that ends a server's execution thread."""


class _Finding(Enum):
    DEAD = "dead"
    """The thread died, idle or with our own prompt."""
    UNSTOPPABLE = "unstoppable"
    """Our own prompt goes on running although it was told to stop."""
    BROKEN = "broken"
    """It sends more than any server should."""
    OCCUPIED = "occupied"
    """Somebody else's prompt runs and runs."""


class Vitality:
    def __init__(self, api: Api, settings: ComfyUISettings) -> None:
        self._api = api
        self._settings = settings
        self._finding: _Finding | None = None
        self._prompt_id = ""
        """The prompt at which the thread was found dead, or which it goes on running."""
        self._since = 0.0
        self._losses = 0
        self._words = ""
        self._is_deadly = False
        self.patience_s = settings.occupied_s
        """How long a prompt of ours waits behind a silent one of somebody else's."""

    @property
    def defect(self) -> str | None:
        """What is wrong with the server, in words that stay the same while the diagnosis does."""
        match self._finding:
            case None:
                return None
            case _Finding.DEAD | _Finding.BROKEN:
                return self._words
            case _Finding.UNSTOPPABLE:
                return (
                    f"it goes on running prompt {self._prompt_id} although it was told to stop: a node does not react, "
                    f"or {RESTART}"
                )
            case _Finding.OCCUPIED:
                whose = f"prompt {self._prompt_id} of somebody else"
                if self._is_deadly or self._age_s() >= self._settings.occupied_dead_s:
                    return f"{RESTART} ({whose} is said to run and does not end)"
                return (
                    f"it has been running {whose} without a sign of life and does not come to ours: it is busy, or "
                    f"{RESTART}"
                )

    def found_broken(self, words: str) -> None:
        self._find(_Finding.BROKEN, "", 0)
        self._words = words

    @property
    def is_broken(self) -> bool:
        """It is not even asked whether it is better."""
        return self._finding is _Finding.BROKEN and self._age_s() < self._settings.broken_s

    def found_dead(self, prompt_id: str, losses: int, words: str) -> None:
        if self.is_broken:
            # Why a run failed there is known already, and better.
            return
        self._find(_Finding.DEAD, prompt_id, losses)
        self._words = words

    def found_busy(self, prompt_id: str, losses: int) -> None:
        """It runs a prompt that nobody wants any more: whatever came next would wait behind that."""
        self._find(_Finding.UNSTOPPABLE, prompt_id, losses)

    def found_occupied(self, ahead: Ahead, losses: int) -> None:
        self._find(_Finding.OCCUPIED, ahead.prompt_id, losses)
        self._since = ahead.since
        self._is_deadly = ahead.is_deadly

    def found_alive(self) -> None:
        self._finding = None

    async def is_dead(self, losses: int, *, is_listening: bool) -> bool:
        """`losses` counts how often the websocket was lost. Raises `Unreachable`."""
        if self._finding is _Finding.BROKEN and not self.is_broken:
            self.found_alive()
        if self._finding is None or self.is_broken:
            return self.is_broken
        # The socket of a server goes with its process, so one that was lost and is back may be a new server's.
        is_new = losses > self._losses and is_listening
        if is_new and self._finding is not _Finding.OCCUPIED:
            self.found_alive()
            return False
        if await self._shows_no_life():
            return True
        if self._finding is _Finding.OCCUPIED and not is_new:
            # It was long, not dead: prompts of that kind are waited for from now on.
            self.patience_s = max(self.patience_s, 2 * self._age_s())
        self.found_alive()
        return False

    async def _shows_no_life(self) -> bool:
        running, waiting = await prompts_of(self._api)
        if self._finding is not _Finding.DEAD:
            return self._prompt_id in running
        if running - {self._prompt_id}:
            return False
        # An empty queue proves nothing, so the diagnosis does not stand for ever: it may have been wrong.
        return bool(running or waiting) or self._age_s() < self._settings.dead_worker_s

    def _find(self, finding: _Finding, prompt_id: str, losses: int) -> None:
        self._finding = finding
        self._prompt_id = prompt_id
        self._since = asyncio.get_running_loop().time()
        self._losses = losses
        self._is_deadly = False

    def _age_s(self) -> float:
        return asyncio.get_running_loop().time() - self._since
