"""Taking a prompt back: out of the queue, or off the card, and nobody else's.

Owns the repetition until the server no longer has the prompt waiting or running. A prompt that waits is deleted, one
that runs is interrupted; between asking and acting either may turn into the other, so the truth is asked each time.
"""

from __future__ import annotations

import asyncio

import msgspec

from comfyfleet.worker.connectors.comfyui.api import ComfyApi, Unreachable
from comfyfleet.worker.connectors.comfyui.prompt_state import PromptState, PromptStatus, look_up
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings

INTERRUPTS_BY_ID = (0, 3, 57)
UNAIMED_REPEAT_S = 2.0
"""How often an interrupt without an aim is repeated: each one may hit whoever has just started."""
MAX_INTERVAL_S = 2.0


class CancelResult(msgspec.Struct, frozen=True):
    standing: PromptStatus
    """In the end; still waiting or running only when the time was over."""
    was_seen: bool = False
    """The prompt was met waiting or running."""


async def stop(
    api: ComfyApi, settings: ComfyUISettings, prompt_id: str, version: tuple[int, ...] | None, within_s: float
) -> CancelResult:
    """Raises `Unreachable` when the server gave no answer to the last."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    interval_s = settings.cancel_interval_s
    is_aimed = version is not None and version >= INTERRUPTS_BY_ID
    interrupted_at: float | None = None
    was_seen = False
    while True:
        standing: PromptStatus | None = None
        try:
            standing = await look_up(api, prompt_id)
            if standing.state is PromptState.WAITING:
                await api.delete(prompt_id)
                interval_s = settings.cancel_interval_s
            elif standing.state is PromptState.RUNNING:
                now = loop.time()
                # Servers that ignore the id stop whatever runs: it was ours a moment ago, and is asked again each time.
                if is_aimed or interrupted_at is None or now - interrupted_at >= UNAIMED_REPEAT_S:
                    await api.interrupt(prompt_id)
                    interrupted_at = now
            else:
                return CancelResult(standing, was_seen)
            was_seen = True
        except Unreachable:
            if loop.time() >= deadline:
                raise
        if standing is not None and loop.time() >= deadline:
            return CancelResult(standing, was_seen)
        await asyncio.sleep(min(interval_s, max(0.01, deadline - loop.time())))
        interval_s = min(interval_s * 1.5, MAX_INTERVAL_S)


def parse_version(text: object) -> tuple[int, ...] | None:
    """The numbers a version begins with; None when there are none, which counts as the oldest."""
    numbers: list[int] = []
    for part in text.removeprefix("v").split(".") if isinstance(text, str) else ():
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers) or None
