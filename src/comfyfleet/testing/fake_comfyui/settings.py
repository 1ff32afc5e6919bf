"""The settings of one fake server: version, card, models, speed and seed.

They are fixed for the life of a server; `faults` has what can change. `Behaviour` lists the differences
between ComfyUI releases, so that no other module compares versions.
"""

from __future__ import annotations

import msgspec

from comfyfleet.testing.fake_comfyui.catalogue import NodeClass
from comfyfleet.testing.fake_comfyui.result_cache import CacheMode

GIGABYTE = 1024**3
OLDEST = (0, 3, 40)
PROFILES = ("0.3.64", "0.7.0", "0.33.0")
"""The recorded releases, used in turn by a mixed fleet. The last is the newest known."""


def default_models() -> dict[str, dict[str, float]]:
    """The default models: folder, then file name, then size in gigabytes."""
    return {
        "checkpoints": {"sd15.safetensors": 2.0, "sdxl.safetensors": 6.5, "flux-dev-fp8.safetensors": 16.0},
        "loras": {"detail.safetensors": 0.2},
        "vae": {"sdxl-vae.safetensors": 0.3},
        "text_encoders": {"t5xxl-fp8.safetensors": 4.9},
        "diffusion_models": {"flux-dev.safetensors": 12.0},
        "upscale_models": {"4x-plain.safetensors": 0.1},
        "embeddings": {"bad-hands.safetensors": 0.001},
    }


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a fake server is made. Sizes are in gigabytes, durations in simulated seconds."""

    version: str = "0.7.0"
    """The ComfyUI release to behave like, from "0.3.40" on: its protocol and its node classes."""
    name: str = "fake"
    device_name: str = "cuda:0 NVIDIA GeForce RTX 4090 : cudaMallocAsync"
    device_type: str = "cuda"
    vram_gb: float = 24.0
    ram_gb: float = 64.0
    node_classes: tuple[str, ...] | None = None
    """Only these classes of the catalogue are installed; None means all of them."""
    extra_node_classes: tuple[NodeClass, ...] = ()
    models: dict[str, dict[str, float]] = msgspec.field(default_factory=default_models)
    """Installed models: folder, then file name, then size in gigabytes."""
    speed: float = 1.0
    """How fast the simulated card is: 2.0 halves the time of sampling and decoding."""
    time_scale: float = 1.0
    """Wall-clock seconds per simulated second: 0.01 makes a run a hundred times faster."""
    load_seconds_per_gb: float = 0.5
    """Reading a model file from the disk, which its loader node does."""
    load_seconds: float = 0.0
    """What each file takes beside its size."""
    load_noise: float = 0.0
    """How far a load may be from its usual time: 0.1 is a tenth up or down."""
    transfer_seconds_per_gb: float = 0.05
    """From memory to the card, at the first node that uses the model."""
    cache_mode: CacheMode = "classic"
    """Which results outlive their prompt: ComfyUI's default, `--cache-lru` or `--cache-none`."""
    lru_size: int = 100
    """How many node results `lru` keeps."""
    step_seconds: float = 0.1
    """One sampling step on one megapixel."""
    working_gb_per_megapixel: float = 1.5
    """Memory that sampling and decoding need beside the models."""
    seed: int = 0
    """Decides pictures, server-made ids and temporary names."""
    base_folder: str | None = None
    """Where input, output and temp files live; None makes a temporary folder that is removed at stop."""
    max_upload_bytes: int = 104857600
    first_number: int = 0
    """Queue number of the first prompt, as on a server that has been running for a while."""
    picture_edge_max: int = 256
    """Saved pictures are drawn no larger than this, whatever the workflow asked for."""


class Behaviour(msgspec.Struct, frozen=True):
    """What a release does; every field is a difference that a client can see."""

    takes_own_prompt_id: bool
    sends_progress_state: bool
    negotiates_features: bool
    takes_partial_targets: bool
    interrupts_by_id: bool
    hides_api_keys: bool
    stamps_create_time: bool
    has_jobs: bool
    says_cancelled: bool
    says_missing_node_type: bool
    says_dependency_cycle: bool
    wants_uuid: bool
    cancels_jobs: bool
    cached_outputs_without_client: bool
    checks_new_style_choices: bool
    is_recent: bool
    """Small differences of 0.33.0 whose first release is not known; taken as new with the UUID rule."""


def parse_version(version: str) -> tuple[int, ...]:
    """Split "0.3.57" into numbers; refuses anything else, and releases whose behaviour is not known."""
    try:
        number = tuple(int(part) for part in version.removeprefix("v").split("."))
    except ValueError:
        raise ValueError(
            f"the fake ComfyUI cannot behave like version {version!r}: give numbers with dots, such as 0.7.0"
        ) from None
    if number < OLDEST:
        raise ValueError(f"the fake ComfyUI behaves like releases from 0.3.40 on, not like {version}")
    return number


def behaviour_of(version: str) -> Behaviour:
    """The differences that `version` shows."""
    number = parse_version(version)
    return Behaviour(
        takes_own_prompt_id=number >= (0, 3, 45),
        sends_progress_state=number >= (0, 3, 45),
        negotiates_features=number >= (0, 3, 45),
        takes_partial_targets=number >= (0, 3, 48),
        interrupts_by_id=number >= (0, 3, 57),
        hides_api_keys=number >= (0, 3, 68),
        stamps_create_time=number >= (0, 3, 69),
        has_jobs=number >= (0, 6, 0),
        says_cancelled=number >= (0, 8, 2),
        says_missing_node_type=number >= (0, 11, 1),
        says_dependency_cycle=number >= (0, 19, 3),
        wants_uuid=number >= (0, 24, 0),
        cancels_jobs=number >= (0, 25, 0),
        cached_outputs_without_client=number >= (0, 24, 0),
        checks_new_style_choices=number > (0, 7, 0),
        is_recent=number >= (0, 24, 0),
    )
