"""What one prompt leaves for the next: the results of its nodes and the memory of its node objects.

ComfyUI has three modes. `classic`, its default, keeps what the newest prompt can use, so a server is warm for
the models of its last prompt and for no others. `lru` (`--cache-lru N`) keeps older results too, as long as
there are at most N. `none` (`--cache-none`) keeps nothing. A model stays in memory as long as a kept result
refers to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from comfyfleet.testing.fake_comfyui.values import FakeModel

CacheMode = Literal["classic", "lru", "none"]


class KeptResult(msgspec.Struct, frozen=True):
    """A node's result and the output shown for it."""

    values: tuple[Any, ...]
    shown: dict[str, Any] | None


class NodeMemory(msgspec.Struct):
    """What the object of a node remembers while prompts have a node of this id and class."""

    temp_name: str
    lora: str | None = None
    """The LoRA file that it has read."""


class ResultCache:
    """The results of earlier prompts, by the keys of `graph.signatures`."""

    def __init__(self, mode: CacheMode, lru_size: int) -> None:
        self._mode = mode
        self._lru_size = lru_size
        self._kept: dict[str, KeptResult] = {}
        self._used_by: dict[str, int] = {}
        """The number of the prompt that last had a node with this key."""
        self._prompt = 0
        self._oldest = 0

    def begin_prompt(self, keys: Iterable[str]) -> None:
        """Drops what the mode does not keep for a prompt whose nodes have these keys."""
        used = set(keys)
        self._prompt += 1
        self._used_by |= dict.fromkeys(used, self._prompt)
        match self._mode:
            case "classic":
                self._drop(key for key in self._kept if key not in used)
            case "lru":
                self._drop_oldest_prompts()
            case "none":
                self.clear()
        self._used_by = {
            key: prompt for key, prompt in self._used_by.items() if key in self._kept or key in used
        }

    def _drop_oldest_prompts(self) -> None:
        # All results of a prompt go together, as in ComfyUI, so fewer than `lru_size` may be left.
        while len(self._kept) > self._lru_size and self._oldest < self._prompt:
            self._oldest += 1
            self._drop(key for key in self._kept if self._used_by[key] < self._oldest)

    def _drop(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            del self._kept[key]

    def end_prompt(self) -> None:
        """Drops what the mode does not keep after a prompt."""
        if self._mode == "none":
            self.clear()

    def clear(self) -> None:
        self._kept.clear()

    def get(self, key: str | None) -> KeptResult | None:
        return self._kept.get(key) if key is not None else None

    def keep(self, key: str, result: KeptResult) -> None:
        if self._mode != "none":
            self._kept[key] = result

    def models(self) -> set[str]:
        """Keys of the model files that kept results refer to, as folder/name."""
        return {
            part
            for result in self._kept.values()
            for value in result.values
            if isinstance(value, FakeModel)
            for part in value.parts()
        }
