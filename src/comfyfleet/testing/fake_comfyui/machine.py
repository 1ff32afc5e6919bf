"""The memory of one server process, and the parts that survive it.

It is new at every start; disk, switches, stats and clock pass from one process to the next.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from typing import Any

from comfyfleet.testing.fake_comfyui.catalogue import INPUT_IMAGES, make_catalogue
from comfyfleet.testing.fake_comfyui.clock import FakeClock
from comfyfleet.testing.fake_comfyui.disk import FakeDisk
from comfyfleet.testing.fake_comfyui.faults import Faults
from comfyfleet.testing.fake_comfyui.gpu import FakeGpu
from comfyfleet.testing.fake_comfyui.known_nodes import known_node_classes
from comfyfleet.testing.fake_comfyui.prompt_queue import PromptQueue
from comfyfleet.testing.fake_comfyui.settings import FakeSettings, behaviour_of, parse_version
from comfyfleet.testing.fake_comfyui.signal import Signal
from comfyfleet.testing.fake_comfyui.sockets import FakeSockets
from comfyfleet.testing.fake_comfyui.stats import FakeStats
from comfyfleet.testing.fake_comfyui.validation import Validator

_TEMP_LETTERS = "abcdefghijklmnopqrstuvxyz"


class FakeMachine:
    """The memory of one server process."""

    def __init__(
        self,
        settings: FakeSettings,
        *,
        clock: FakeClock,
        disk: FakeDisk,
        faults: Faults,
        stats: FakeStats,
        first_number: int,
    ) -> None:
        self.settings = settings
        self.behaviour = behaviour_of(settings.version)
        self.clock = clock
        self.disk = disk
        self.faults = faults
        self.stats = stats
        self.random = random.Random(f"{settings.seed}/{settings.name}/{stats.crashes}")
        self._load_random = random.Random(f"{settings.seed}/{settings.name}/{stats.crashes}/loads")
        self.signal = Signal()
        self.loop_is_free = asyncio.Event()
        self.loop_is_free.set()
        self.sockets = FakeSockets(faults, self.loop_is_free)
        self.queue = PromptQueue(self.sockets, self.signal)
        self.gpu = FakeGpu(settings.vram_gb, stats)
        known = known_node_classes(parse_version(settings.version))
        self.catalogue = make_catalogue(known, settings.node_classes, settings.extra_node_classes)
        self.validator = Validator(self.catalogue, self.list_names, disk, self.behaviour)
        self.number = first_number
        self.is_interrupted = False
        self.worker_is_dead = False
        self._last_create_time = 0

    def new_id(self) -> str:
        """A prompt id made by the server."""
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    def new_temp_name(self) -> str:
        """The random part of a temporary file's name."""
        return "".join(self.random.choice(_TEMP_LETTERS) for _ in range(5))

    def load_seconds(self, size_gb: float) -> float:
        """How long reading a model file takes this time."""
        settings = self.settings
        usual = settings.load_seconds + size_gb * settings.load_seconds_per_gb
        return usual * (1 + self._load_random.uniform(-settings.load_noise, settings.load_noise))

    def create_time(self) -> int:
        """Milliseconds, never the same twice: a real server takes longer to validate a prompt."""
        self._last_create_time = max(int(time.time() * 1000), self._last_create_time + 1)
        return self._last_create_time

    def models(self) -> dict[str, dict[str, float]]:
        """The installed models after the switches: folder, file name, size in gigabytes."""
        installed = {folder: dict(names) for folder, names in self.settings.models.items()}
        for folder, names in self.faults.added_models.items():
            installed.setdefault(folder, {}).update(names)
        for names in installed.values():
            for name in self.faults.missing_models:
                names.pop(name, None)
        return installed

    def list_names(self, folder: str) -> list[str]:
        """The files a node input may choose from."""
        if folder == INPUT_IMAGES:
            return self.disk.input_pictures()
        return sorted(self.models().get(folder, {}))

    def features(self) -> dict[str, Any]:
        """What the server says it can do."""
        features: dict[str, Any] = {"supports_preview_metadata": True}
        if self.behaviour.is_recent:
            features["supports_model_type_tags"] = True
        features["max_upload_size"] = self.settings.max_upload_bytes
        features["extension"] = {"manager": {"supports_v4": True}}
        if self.behaviour.is_recent:
            features |= {"node_replacements": True, "assets": False}
        return features

    async def never(self) -> None:
        """Waits until this server process ends, which cancels all waiting tasks."""
        await asyncio.Event().wait()

    def interrupt(self) -> None:
        """Ask the running prompt to stop; it notices at its next progress report or node."""
        self.is_interrupted = True
        self.signal.notify()
