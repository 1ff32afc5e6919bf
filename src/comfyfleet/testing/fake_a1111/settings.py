"""The settings of one fake server of the A1111 family: its flavour, its models and its speed.

They are fixed for the life of a server; `faults.py` has what can change.
"""

from __future__ import annotations

from typing import Literal

import msgspec

A1111Flavour = Literal["a1111", "reforge", "forge", "forge-classic", "sdnext"]

VERSIONS: dict[A1111Flavour, str] = {
    "a1111": "v1.10.1",
    "reforge": "v1.10.1-reforge",
    "forge": "f2.0.1v1.10.1",
    "forge-classic": "neo",
    "sdnext": "2026-07-01",
}


class FakeCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint in the models folder. `file` may have a folder: `xl/base.safetensors`."""

    file: str
    hash: str

    @property
    def title(self) -> str:
        return f"{self.file} [{self.hash}]"

    @property
    def model_name(self) -> str:
        return self.file.rpartition(".")[0].replace("/", "_")

    @property
    def short_name(self) -> str:
        """The name in `info` and in the text of a picture."""
        return self.file.rpartition("/")[2].rpartition(".")[0]

    @property
    def aliases(self) -> frozenset[str]:
        """What `sd_model_checkpoint` may say for this checkpoint."""
        names = {self.title, self.file, self.model_name, self.short_name, self.hash}
        return frozenset({*names, f"{self.short_name} [{self.hash}]"})


class FakeA1111Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations are simulated seconds; `time_scale` is the wall-clock seconds of one."""

    flavour: A1111Flavour = "a1111"
    time_scale: float = 1.0
    step_seconds: float = 0.1
    load_seconds: float = 0.5
    extras_seconds: float = 0.5
    starts_loaded: bool = True
    """False: the first run loads the checkpoint of the options."""
    threads: int = 40
    """All routes share them: with more waiting requests the server is deaf."""
    checkpoints: tuple[FakeCheckpoint, ...] = (
        FakeCheckpoint("base.safetensors", "aaaa"),
        FakeCheckpoint("other.safetensors", "bbbb"),
    )
    vaes: tuple[str, ...] = ("plain-vae.safetensors",)
    loras: tuple[str, ...] = ("detail",)
    samplers: tuple[str, ...] = ("Euler", "DPM++ 2M")
    schedulers: tuple[str, ...] = ("Automatic", "Karras")
    upscalers: tuple[str, ...] = ("None", "Lanczos", "4x-plain")
    scripts: tuple[str, ...] = ("prompt matrix",)
    always_on_scripts: tuple[str, ...] = ("controlnet", "soft inpainting")
    image_format: Literal["png", "jpg", "webp"] = "png"
    returns_grid: bool = False
    gpu_gb: float | None = 24.0
    """None: the memory of the GPU is not known."""
    has_web_ui: bool = True
    """False is `--nowebui`: no `/internal` routes."""
    has_api: bool = True
    """False: started without `--api`."""
    user: str = ""
    password: str = ""
    """`--api-auth`. Empty: none."""
    requests_per_minute: int = 300
    """Only SD.Next has this limit; a run counts as five requests."""
    longest_edge: int = 64
    """Pictures are drawn no larger than this."""
