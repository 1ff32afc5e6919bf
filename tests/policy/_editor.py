"""Workflows as the ComfyUI editor saves them, in a few words, and what a server says of their nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comfyfleet.model.node_classes import read_definitions

_TRACE = Path(__file__).resolve().parents[1] / "data" / "comfyui_traces" / "17-info-endpoints.jsonl"


def recorded_definitions() -> dict[str, Any]:
    """`/object_info` of a real server, for the nodes that were asked for."""
    found: dict[str, Any] = {}
    for line in _TRACE.read_text().splitlines():
        entry = json.loads(line)
        if entry["dir"] == "recv" and str(entry.get("for", "")).startswith("GET /object_info/"):
            found |= entry["body"]
    return found


def _node(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"input": {"required": required, **({"optional": optional} if optional else {})}}


OBJECT_INFO: dict[str, Any] = {
    **recorded_definitions(),
    "KSampler": _node(
        {
            "model": ["MODEL"],
            "seed": ["INT", {"default": 0, "control_after_generate": True}],
            "steps": ["INT", {"default": 20}],
            "cfg": ["FLOAT", {"default": 8.0}],
            "sampler_name": [["euler", "heun"]],
            "scheduler": ["COMBO", {"options": ["normal", "karras"]}],
            "positive": ["CONDITIONING"],
            "negative": ["CONDITIONING"],
            "latent_image": ["LATENT"],
            "denoise": ["FLOAT", {"default": 1.0}],
        }
    ),
    "CLIPTextEncode": _node({"text": ["STRING", {"multiline": True}], "clip": ["CLIP"]}),
    "EmptyLatentImage": _node({"width": ["INT", {"default": 512}], "height": ["INT", {"default": 512}]}),
    "LoraLoader": _node(
        {"model": ["MODEL"], "clip": ["CLIP"], "lora_name": [["a.safetensors"]], "strength": ["FLOAT", {}]}
    ),
    "VAEDecode": _node({"samples": ["LATENT"], "vae": ["VAE"]}),
    "SaveImage": _node({"images": ["IMAGE"], "filename_prefix": ["STRING", {"default": "ComfyUI"}]}),
    "LoadImageMask": _node({"image": [["a.png"], {"image_upload": True}], "channel": [["alpha", "red"]]}),
    "LoadBoth": _node(
        {"image": [["a.png"], {"image_upload": True}]}, {"resize": ["BOOLEAN", {"default": False}]}
    ),
    "Switches": _node({"seed": ["INT", {}], "is_fast": ["BOOLEAN", {}], "points": ["STRING", {}]}),
    "Forced": _node(
        {"text": ["STRING", {"forceInput": True}], "size": ["INT", {}]},
        {"other": ["INT", {"defaultInput": True}], "last": ["INT", {"default": 5}]},
    ),
    "Picker": _node({"model_name": ["COMBO", {"options": ["a", "b"], "control_after_generate": True}]}),
    "Resize": _node(
        {
            "how": [
                "COMFY_DYNAMICCOMBO_V3",
                {
                    "options": [
                        {"key": "by factor", "inputs": {"required": {"factor": ["FLOAT", {}]}}},
                        {"key": "to size", "inputs": {"required": {"width": ["INT", {}], "height": ["INT", {}]}}},
                    ]
                },
            ],
            "method": [["area", "nearest"]],
        }
    ),
    "CurveEditor": _node({"curve": ["CURVE", {}]}),
    "VHS_VideoCombine": _node({"images": ["IMAGE"], "frame_rate": ["FLOAT", {"default": 8}], "format": [["gif"]]}),
}  # fmt: skip
DEFINITIONS = read_definitions(OBJECT_INFO)


class Editor:
    """Draws a workflow: nodes, and wires from an output to a named input."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.links: list[list[Any]] = []

    def node(
        self, kind: str, values: Any = None, *, mode: int = 0, number: int | None = None, **more: Any
    ) -> int:
        number = len(self.nodes) + 1 if number is None else number
        self.nodes.append(
            {"id": number, "type": kind, "mode": mode, "inputs": [], "outputs": more.pop("outputs", []), **more}
        )  # fmt: skip
        if values is not None:
            self.nodes[-1]["widgets_values"] = values
        return number

    def wire(
        self, origin: int, slot: int, target: int, name: str, kind: str = "*", *, widget: str | None = None
    ) -> None:
        number = len(self.links) + 1
        inputs = next(node for node in self.nodes if node["id"] == target)["inputs"] if target > 0 else []
        slot_ = {"name": name, "type": kind, "link": number}
        inputs.append(slot_ | ({} if widget is None else {"widget": {"name": widget}}))
        self.links.append([number, origin, slot, target, len(inputs) - 1, kind])

    def saved(self, **more: Any) -> dict[str, Any]:
        return {"nodes": self.nodes, "links": self.links, "version": 0.4, **more}

    def as_subgraph(self, name: str, inputs: list[str], outputs: list[str]) -> dict[str, Any]:
        """Wires from -10 come in, wires to -20 go out; the number of an output stands in the wire's name."""
        links = [
            {"id": number, "origin_id": origin, "origin_slot": slot, "target_id": target, "target_slot": place,
             "type": kind}
            for number, origin, slot, target, place, kind in self.links
        ]  # fmt: skip
        return {
            "id": name,
            "name": name,
            "nodes": self.nodes,
            "links": links,
            "inputs": [{"name": each, "type": "*"} for each in inputs],
            "outputs": [{"name": each, "type": "*"} for each in outputs],
        }
