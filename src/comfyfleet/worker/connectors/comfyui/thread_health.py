"""Remembers that a server's execution thread is dead, or busy with another client's prompt.

Such a server still answers HTTP, so a health check alone does not notice. `run.py` diagnoses; this module
keeps the diagnosis, its message, and the signs that end it.
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
    """Another client's prompt that runs while ours waits."""

    prompt_id: str
    since: float
    """Since when it has run without a sign of life, on the event loop's clock."""
    is_poison: bool = False
    """Its graph is of a kind that kills a server's execution thread."""


class _Finding(Enum):
    DEAD = "dead"
    """The thread died, idle or with our own prompt."""
    UNSTOPPABLE = "unstoppable"
    """Our own prompt runs on after a cancel."""
    BROKEN = "broken"
    """The server sends more data than the limits allow."""
    OCCUPIED = "occupied"
    """Another client's prompt does not end."""


class _Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    finding: _Finding
    since: float
    """On the event loop's clock."""
    prompt_id: str = ""
    """The prompt at which the thread was found dead, or which still runs."""
    losses: int = 0
    """The number of lost WebSockets at that time."""
    words: str = ""
    is_poison: bool = False


class ThreadHealth:
    def __init__(self, api: ComfyApi, settings: ComfyUISettings) -> None:
        self._api = api
        self._settings = settings
        self._diagnosis: _Diagnosis | None = None
        self.patience_s = settings.occupied_s
        """How long our prompt waits behind a silent prompt of another client."""

    @property
    def defect(self) -> str | None:
        """The message, which stays the same as long as the diagnosis."""
        found = self._diagnosis
        if found is None:
            return None
        match found.finding:
            case _Finding.DEAD | _Finding.BROKEN:
                return found.words
            case _Finding.UNSTOPPABLE:
                return (
                    f"it still runs prompt {found.prompt_id} after a cancel: a node does not react, "
                    f"or {RESTART}"
                )
            case _Finding.OCCUPIED:
                whose = f"prompt {found.prompt_id} of another client"
                if found.is_poison or _age_s(found) >= self._settings.occupied_dead_s:
                    return f"{RESTART} ({whose} is listed as running and does not end)"
                return f"it runs {whose} without a sign of life while ours waits: it is busy, or {RESTART}"

    @property
    def is_broken(self) -> bool:
        """Then health checks do not ask the server at all."""
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
        """The server runs a prompt that nobody needs, and other prompts would wait behind it."""
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
        # A completed run does not show that the server sends less now.
        if not self.is_broken:
            self._diagnosis = None

    async def is_dead(self, losses: int, *, is_listening: bool) -> bool:
        """`losses` counts lost WebSockets. Raises `Unreachable`."""
        found = self._diagnosis
        if found is None or found.finding is _Finding.BROKEN:
            self.found_alive()
            return self.is_broken
        # A WebSocket ends with its server's process, so a new one may belong to a new process.
        is_new = losses > found.losses and is_listening
        is_occupied = found.finding is _Finding.OCCUPIED
        if (not is_new or is_occupied) and await self._shows_no_life(found):
            return True
        if is_occupied and not is_new:
            # The prompt was long, and the thread is alive: wait longer for such prompts from now on.
            self.patience_s = max(self.patience_s, 2 * _age_s(found))
        self.found_alive()
        return False

    async def _shows_no_life(self, found: _Diagnosis) -> bool:
        running, waiting = await prompts_of(self._api)
        if found.finding is not _Finding.DEAD:
            return found.prompt_id in running
        if running - {found.prompt_id}:
            return False
        # An empty queue proves nothing, so the diagnosis expires: it may have been wrong.
        return bool(running or waiting) or _age_s(found) < self._settings.dead_worker_s

    def _find(self, diagnosis: _Diagnosis) -> None:
        # The diagnosis of a broken server explains failed runs better.
        if not self.is_broken:
            self._diagnosis = diagnosis


def _now() -> float:
    return asyncio.get_running_loop().time()


def _age_s(diagnosis: _Diagnosis) -> float:
    return _now() - diagnosis.since
