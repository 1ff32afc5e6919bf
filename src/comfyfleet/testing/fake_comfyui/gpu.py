"""The simulated card: which models are on it and what does not fit.

A loader reads a model into the server's memory; the first node that uses it puts it on the card. The card returns how
many gigabytes went there, and the caller waits for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from comfyfleet.testing.fake_comfyui.errors import OutOfMemory
from comfyfleet.testing.fake_comfyui.stats import FakeStats
from comfyfleet.testing.fake_comfyui.values import FakeModel


class FakeGpu:
    """Models on a card, the least recently used first."""

    def __init__(self, vram_gb: float, stats: FakeStats) -> None:
        self.vram_gb = vram_gb
        self._stats = stats
        self._resident: dict[str, float] = {}
        self._has_lost_models = False
        """Models left the card because this prompt has no use for them; what it puts there takes their place."""

    @property
    def resident(self) -> tuple[str, ...]:
        """Keys of the models on the card, as folder/name."""
        return tuple(self._resident)

    @property
    def free_gb(self) -> float:
        return self.vram_gb - sum(self._resident.values())

    def put(self, models: Iterable[FakeModel], working_gb: float = 0.0) -> float:
        """Puts models and working memory on the card and returns the gigabytes of models that went there."""
        needed: dict[str, float] = {}
        for model in models:
            needed.update(model.parts())
        if sum(needed.values()) + working_gb > self.vram_gb:
            raise OutOfMemory(
                "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
                f"Requested               : {sum(needed.values()) + working_gb:.2f} GiB\n"
                f"Device limit            : {self.vram_gb:.2f} GiB"
            )
        moved_gb = 0.0
        for key, size_gb in needed.items():
            if key in self._resident:
                self._resident[key] = self._resident.pop(key)
                continue
            if self._evict(size_gb, needed) or self._has_lost_models:
                self._stats.model_swaps += 1
            self._has_lost_models = False
            self._resident[key] = size_gb
            moved_gb += size_gb
        self._evict(working_gb, needed)
        return moved_gb

    def keep_only(self, held: Collection[str]) -> None:
        """Takes models off the card that the server no longer holds in memory."""
        gone = [key for key in self._resident if key not in held]
        for key in gone:
            del self._resident[key]
        self._has_lost_models = bool(gone)

    def unload_all(self) -> None:
        """What ComfyUI does after running out of memory, and at `/free`."""
        self._resident.clear()

    def _evict(self, room_gb: float, keep: dict[str, float]) -> bool:
        evicted = False
        for key in [key for key in self._resident if key not in keep]:
            if self.free_gb >= room_gb:
                break
            del self._resident[key]
            evicted = True
        return evicted
