"""Whether a server may be used whose execution thread is dead, or does not get round to our prompts.

Such a server leaves HTTP answering, so health cannot be asked for. Owns the memory of the diagnosis, its words, and the
signs that end it; who diagnoses is `run.py`, and what an unhealthy server means is for whoever asks.
"""

from __future__ import annotations

import asyncio
from enum import Enum

import msgspec

from comfyfleet.worker.connectors.comfyui.api import ComfyApi
from comfyfleet.worker.connectors.comfyui.prompt_state import prompts_of
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings

RESTART = "its execution thread is dead; restart it"


class PromptAhead(msgspec.Struct, frozen=True):
    """Somebody else's prompt that runs while ours waits."""

    prompt_id: str
    since: float
    """Since when it runs without a sign of life, as far as we saw. On the event loop's clock."""
    is_poison: bool = False
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


class _Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    finding: _Finding
    since: float
    """On the event loop's clock."""
    prompt_id: str = ""
    """The prompt at which the thread was found dead, or which it goes on running."""
    losses: int = 0
    """How often the websocket had been lost by then."""
    words: str = ""
    is_poison: bool = False


class ThreadHealth:
    def __init__(self, api: ComfyApi, settings: ComfyUISettings) -> None:
        self._api = api
        self._settings = settings
        self._diagnosis: _Diagnosis | None = None
        self.patience_s = settings.occupied_s
        """How long a prompt of ours waits behind a silent one of somebody else's."""

    @property
    def defect(self) -> str | None:
        """What is wrong with the server, in words that stay the same while the diagnosis does."""
        found = self._diagnosis
        if found is None:
            return None
        match found.finding:
            case _Finding.DEAD | _Finding.BROKEN:
                return found.words
            case _Finding.UNSTOPPABLE:
                return (
                    f"it goes on running prompt {found.prompt_id} although it was told to stop: a node does not react, "
                    f"or {RESTART}"
                )
            case _Finding.OCCUPIED:
                whose = f"prompt {found.prompt_id} of somebody else"
                if found.is_poison or _age_s(found) >= self._settings.occupied_dead_s:
                    return f"{RESTART} ({whose} is said to run and does not end)"
                return (
                    f"it has been running {whose} without a sign of life and does not come to ours: it is busy, or "
                    f"{RESTART}"
                )

    @property
    def is_broken(self) -> bool:
        """It is not even asked whether it is better."""
        found = self._diagnosis
        return (
            found is not None and found.finding is _Finding.BROKEN and _age_s(found) < self._settings.broken_s
        )

    def found_broken(self, words: str) -> None:
        self._diagnosis = _Diagnosis(finding=_Finding.BROKEN, since=_now(), words=words)

    def found_dead(self, prompt_id: str, losses: int, words: str) -> None:
        self._find(
            _Diagnosis(finding=_Finding.DEAD, since=_now(), prompt_id=prompt_id, losses=losses, words=words)
        )

    def found_busy(self, prompt_id: str, losses: int) -> None:
        """It runs a prompt that nobody wants any more: whatever came next would wait behind that."""
        self._find(_Diagnosis(finding=_Finding.UNSTOPPABLE, since=_now(), prompt_id=prompt_id, losses=losses))

    def found_occupied(self, ahead: PromptAhead, losses: int) -> None:
        self._find(
            _Diagnosis(
                finding=_Finding.OCCUPIED,
                since=ahead.since,
                prompt_id=ahead.prompt_id,
                losses=losses,
                is_poison=ahead.is_poison,
            )
        )

    def found_alive(self) -> None:
        # A run that completes there says nothing of what else it sends.
        if not self.is_broken:
            self._diagnosis = None

    async def is_dead(self, losses: int, *, is_listening: bool) -> bool:
        """`losses` counts how often the websocket was lost. Raises `Unreachable`."""
        found = self._diagnosis
        if found is None or found.finding is _Finding.BROKEN:
            self.found_alive()
            return self.is_broken
        # The socket of a server goes with its process, so one that was lost and is back may be a new server's.
        is_new = losses > found.losses and is_listening
        is_occupied = found.finding is _Finding.OCCUPIED
        if (not is_new or is_occupied) and await self._shows_no_life(found):
            return True
        if is_occupied and not is_new:
            # It was long, not dead: prompts of that kind are waited for from now on.
            self.patience_s = max(self.patience_s, 2 * _age_s(found))
        self.found_alive()
        return False

    async def _shows_no_life(self, found: _Diagnosis) -> bool:
        running, waiting = await prompts_of(self._api)
        if found.finding is not _Finding.DEAD:
            return found.prompt_id in running
        if running - {found.prompt_id}:
            return False
        # An empty queue proves nothing, so the diagnosis does not stand for ever: it may have been wrong.
        return bool(running or waiting) or _age_s(found) < self._settings.dead_worker_s

    def _find(self, diagnosis: _Diagnosis) -> None:
        # Why runs fail at a broken server is known already, and better.
        if not self.is_broken:
            self._diagnosis = diagnosis


def _now() -> float:
    return asyncio.get_running_loop().time()


def _age_s(diagnosis: _Diagnosis) -> float:
    return _now() - diagnosis.since
