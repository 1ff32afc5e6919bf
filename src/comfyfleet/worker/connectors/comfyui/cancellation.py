"""Stops one prompt and no other: a waiting prompt is deleted, a running one is interrupted.

A waiting prompt may start between the lookup and the action, so `stop` repeats both until it is gone.
"""

from __future__ import annotations

import asyncio

import msgspec

from comfyfleet.worker.connectors.comfyui.api import ComfyApi, Unreachable
from comfyfleet.worker.connectors.comfyui.prompt_state import PromptState, PromptStatus, look_up
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings

INTERRUPTS_BY_ID = (0, 3, 57)
UNAIMED_REPEAT_S = 2.0
"""How often an interrupt without a prompt id is repeated: each one may hit a prompt that has just started."""
MAX_INTERVAL_S = 2.0


class CancelResult(msgspec.Struct, frozen=True):
    standing: PromptStatus
    """Waiting or running only if the time was over."""
    was_seen: bool = False
    """The prompt was found waiting or running."""


async def stop(
    api: ComfyApi, settings: ComfyUISettings, prompt_id: str, version: tuple[int, ...] | None, within_s: float
) -> CancelResult:
    """Raises `Unreachable` if the server does not answer until the end."""
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
                # Servers that ignore the id interrupt any run, so each interrupt follows a lookup.
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
    """The leading numbers of a version. None: there are none, which counts as the oldest version."""
    numbers: list[int] = []
    for part in text.removeprefix("v").split(".") if isinstance(text, str) else ():
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers) or None
