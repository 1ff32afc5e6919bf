"""Pauses between requests to Comfy Cloud, which limits how often it is asked and does not publish the limit."""

from __future__ import annotations

import random

from comfyfleet.worker.connectors.comfy_cloud.settings import ComfyCloudSettings


class CloudBackoff:
    """Growing pauses with jitter, and at least what the server asks for."""

    def __init__(self, settings: ComfyCloudSettings, first_s: float | None = None) -> None:
        self._first_s = settings.poll_s if first_s is None else min(first_s, settings.poll_s)
        self._longest_s = settings.poll_max_s
        self._tries = 0

    def next_s(self, asked_s: float | None = None) -> float:
        pause_s = min(self._longest_s, self._first_s * (1 << min(self._tries, 16)))
        self._tries += 1
        return max(asked_s or 0.0, with_jitter(pause_s))

    def reset(self) -> None:
        self._tries = 0


def with_jitter(pause_s: float) -> float:
    return pause_s * (0.75 + random.random() / 2)
