"""The servers, workflows and jobs of the demo. `demo.py` runs them, `demo_show.py` shows them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from comfyfleet.testing.fake_comfyui import FakeSettings, Faults, NodeClass, NodeFault
from comfyfleet.testing.fake_comfyui.catalogue import input_of

Kind = Literal["SDXL", "SD 1.5", "edit", "upscale"]
KINDS: tuple[Kind, ...] = ("SDXL", "SD 1.5", "edit", "upscale")

FAILING = "gpu-b"
"""Fails its first picture, then works."""
CRASHING = "gpu-c"
"""Crashes during a run and comes back."""

_SDXL = {"sdxl.safetensors": 6.5}
_SD15 = {"sd15.safetensors": 2.0}
_INK = {"ink.safetensors": 2.0}
_UPSCALER = {"4x-plain.safetensors": 0.1}


class Card(msgspec.Struct, frozen=True):
    """One server of the demo."""

    id: str
    vram_gb: float
    speed: float
    checkpoints: dict[str, float]
    upscalers: dict[str, float] = {}

    @property
    def description(self) -> str:
        can = [name.removesuffix(".safetensors") for name in self.checkpoints]
        return f"{self.vram_gb:g} GB, {', '.join([*can, 'upscaler'] if self.upscalers else can)}"


CARDS = (
    Card("gpu-a", 24, 1.6, {**_SDXL, **_SD15, **_INK}, _UPSCALER),
    Card("gpu-b", 16, 1.3, {**_SDXL, **_SD15, **_INK}),
    Card("gpu-c", 10, 1.0, {**_SDXL, **_SD15, **_INK}),
    Card("gpu-d", 6, 0.8, {**_SD15, **_INK}, _UPSCALER),
)
# As measured on a real card: 2.7 s for SDXL, 1.2 s for the small checkpoints. A run takes about one or two.
_LOAD_S = 0.5
_LOAD_S_PER_GB = 1 / 3
_MODEL_INPUTS = ("ckpt_name", "model_name")
"""The inputs of loader nodes that name a model file."""


def settings_of(card: Card, time_scale: float, seed: int) -> FakeSettings:
    """The fake server of a card. Only some servers have the upscaler node, so node classes route jobs too."""
    upscale = NodeClass(
        name="ImageUpscaleWithModel",
        required={"upscale_model": input_of("UPSCALE_MODEL"), "image": input_of("IMAGE")},
        outputs=("IMAGE",),
        cost_s=1.0,
        uses_gpu=True,
    )
    return FakeSettings(
        name=card.id,
        vram_gb=card.vram_gb,
        speed=card.speed,
        models={"checkpoints": card.checkpoints, "upscale_models": card.upscalers},
        extra_node_classes=(upscale,) if card.upscalers else (),
        time_scale=time_scale,
        load_seconds=_LOAD_S,
        load_seconds_per_gb=_LOAD_S_PER_GB,
        transfer_seconds_per_gb=0.0,
        seed=seed,
    )


def load_seconds_of(card: Card, time_scale: float) -> dict[str, float]:
    """The model files of a card, and how long it reads each."""
    installed = {**card.checkpoints, **card.upscalers}
    return {name: (_LOAD_S + size_gb * _LOAD_S_PER_GB) * time_scale for name, size_gb in installed.items()}


def loaders_of(kind: Kind) -> dict[str, str]:
    """The loader nodes of a workflow, and the model file that each reads."""
    return {
        node_id: node["inputs"][name]
        for node_id, node in workflow_of(kind, "").items()
        for name in _MODEL_INPUTS
        if name in node["inputs"]
    }


def faults_of(card: Card, down_s: float) -> Faults:
    faults = Faults(down_seconds=down_s)
    if card.id == FAILING:
        message = "expected all tensors to be on the same device"
        faults.fail_nodes = [NodeFault(class_type="KSampler", message=message)]
    return faults


class Story(msgspec.Struct, frozen=True):
    """A picture to make, and perhaps a second one of the same subject after it."""

    title: str
    kind: Kind
    text: str
    priority: int = 0
    then: Kind | None = None


_SUBJECTS = (
    "a lighthouse at dusk", "a red fox in snow", "a market in the rain", "an old observatory", "a paper boat",
    "a glass greenhouse", "a sleeping cat", "a desert train", "a moss garden", "a harbour at dawn",
    "a clockmaker's desk", "a field of poppies", "a stone bridge", "a tram in the fog", "a snowed-in cabin",
    "a kite over dunes", "a flooded library", "a bakery at night", "a lemon tree", "a ship in a bottle",
)  # fmt: skip
_PRIORITIES = {6: -5, 9: 10, 13: 10}
_THEN: dict[int, Kind] = {1: "edit", 7: "upscale", 11: "edit", 16: "upscale"}


def stories() -> list[Story]:
    """Twenty pictures, four of them followed by an edited or upscaled one: 24 jobs.

    The workflow changes from one to the next, so servers that take them in order have to change their models.
    """
    return [
        Story(
            f"#{index + 1}",
            KINDS[(index + index // len(KINDS)) % len(KINDS)],
            subject,
            _PRIORITIES.get(index, 0),
            _THEN.get(index),
        )
        for index, subject in enumerate(_SUBJECTS)
    ]


def workflow_of(kind: Kind, text: str) -> dict[str, Any]:
    """The graph. The picture to edit or upscale is made in the same run."""
    match kind:
        case "SDXL":
            return _generation("sdxl.safetensors", text, edge=1024, steps=10, sampler="3")
        case "SD 1.5":
            return _generation("sd15.safetensors", text, edge=768, steps=12, sampler="3")
        case "edit":
            graph = _generation("ink.safetensors", text, edge=512, steps=6, sampler="13")
            graph["11"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["8", 0], "vae": ["4", 2]}}
            graph["12"] = {
                "class_type": "CLIPTextEncode",
                "inputs": {"text": "in ink", "clip": ["4", 1]},
            }
            edited = {"positive": ["12", 0], "latent_image": ["11", 0], "denoise": 0.6, "steps": 15}
            graph["14"] = {"class_type": "KSampler", "inputs": {**graph["13"]["inputs"], **edited}}
            graph["15"] = {"class_type": "VAEDecode", "inputs": {"samples": ["14", 0], "vae": ["4", 2]}}
            graph["9"]["inputs"]["images"] = ["15", 0]
            return graph
        case "upscale":
            graph = _generation("sd15.safetensors", text, edge=512, steps=6, sampler="3")
            graph["12"] = {
                "class_type": "UpscaleModelLoader",
                "inputs": {"model_name": "4x-plain.safetensors"},
            }
            wires = {"upscale_model": ["12", 0], "image": ["8", 0]}
            graph["13"] = {"class_type": "ImageUpscaleWithModel", "inputs": wires}
            graph["9"]["inputs"]["images"] = ["13", 0]
            return graph


def _generation(checkpoint: str, text: str, *, edge: int, steps: int, sampler: str) -> dict[str, Any]:
    return {
        "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": checkpoint}},
        "5": {"class_type": "EmptyLatentImage", "inputs": {"width": edge, "height": edge, "batch_size": 1}},
        "6": {"class_type": "CLIPTextEncode", "inputs": {"text": text, "clip": ["4", 1]}},
        "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "blurry", "clip": ["4", 1]}},
        sampler: {
            "class_type": "KSampler",
            "inputs": {
                "seed": -1,
                "steps": steps,
                "cfg": 7.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
                "model": ["4", 0],
                "positive": ["6", 0],
                "negative": ["7", 0],
                "latent_image": ["5", 0],
            },
        },
        "8": {"class_type": "VAEDecode", "inputs": {"samples": [sampler, 0], "vae": ["4", 2]}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["8", 0], "filename_prefix": "picture"}},
    }
