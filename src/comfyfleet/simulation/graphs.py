"""Workflow graphs in ComfyUI's API format for simulated workflows, and results as a ComfyUI server reports them.

An engine reads the models that a job needs from such a graph, and learns load times from such a result: a loader that
ran has a timing; one whose model was loaded is among the cached nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comfyfleet.model.job import JobResult, NodeTiming
from comfyfleet.model.worker import Capabilities, Gpu, Hardware, Service
from comfyfleet.simulation.world import ServerSpec, SimulatedWorkflow

_PROMPT, _NEGATIVE, _LATENT, _SAMPLER, _DECODE, _SAVE = "10", "11", "12", "13", "14", "15"
_CORE = ("CLIPTextEncode", "EmptyLatentImage", "KSampler", "VAEDecode", "SaveImage")
_LOADERS = ("CheckpointLoaderSimple", "LoraLoader")


class WorkflowGraphs:
    """Graphs of workflows. Two workflows with the same models differ by a node class."""

    def __init__(self, workflows: Sequence[SimulatedWorkflow]) -> None:
        self._workflows = tuple(workflows)
        self._nodes = {
            workflow.name: _fixed_nodes(workflow, f"Workflow{number}")
            for number, workflow in enumerate(workflows)
        }

    def graph(self, workflow: SimulatedWorkflow, number: int) -> dict[str, Any]:
        """The graph of job `number`: its prompt and seed are its own. All other nodes are shared."""
        clip = [_loader_id(len(workflow.models) - 1), 1]
        return {
            **self._nodes[workflow.name],
            _PROMPT: {"class_type": "CLIPTextEncode", "inputs": {"clip": clip, "text": f"picture {number}"}},
            _SAMPLER: {
                "class_type": "KSampler",
                "inputs": {
                    "model": [_loader_id(len(workflow.models) - 1), 0],
                    "positive": [_PROMPT, 0],
                    "negative": [_NEGATIVE, 0],
                    "latent_image": [_LATENT, 0],
                    "seed": number,
                    "steps": 20,
                    "cfg": 7.0,
                    "sampler_name": "euler",
                    "scheduler": "normal",
                    "denoise": 1.0,
                },
            },
        }

    def capabilities(self, server: ServerSpec) -> Capabilities:
        """A server offers the models that fit its card."""
        models = {
            model.name for workflow in self._workflows if server.fits(workflow) for model in workflow.models
        }
        classes = {*_CORE, *_LOADERS, *(f"Workflow{number}" for number in range(len(self._workflows)))}
        service = Service("comfyui", models=frozenset(models), node_classes=frozenset(classes))
        card = f"speed {server.speed:g}, disk {server.disk_speed:g}"
        return Capabilities((service,), Hardware(gpu=Gpu(1, server.vram_gb, card)))

    @staticmethod
    def result(
        workflow: SimulatedWorkflow, loaded: Sequence[str], load_s: float, run_s: float, began_at: float
    ) -> JobResult:
        """`loaded`: the names of the models that the server did not have."""
        cached, timings, at = [_NEGATIVE, _LATENT], list[NodeTiming](), began_at
        total_s = sum(model.load_s for model in workflow.models if model.name in loaded)
        for place, model in enumerate(workflow.models):
            if model.name not in loaded:
                cached.append(_loader_id(place))
                continue
            seconds = load_s * (model.load_s / total_s if total_s else 1 / len(loaded))
            timings.append(NodeTiming(_loader_id(place), at, seconds))
            at += seconds
        for node_id, share in ((_PROMPT, 0.02), (_SAMPLER, 0.9), (_DECODE, 0.06), (_SAVE, 0.02)):
            timings.append(NodeTiming(node_id, at, run_s * share))
            at += run_s * share
        return JobResult(timings=tuple(timings), cached_nodes=tuple(cached))


def _fixed_nodes(workflow: SimulatedWorkflow, kind: str) -> dict[str, Any]:
    nodes: dict[str, Any] = {}
    for place, model in enumerate(workflow.models):
        if place == 0:
            nodes[_loader_id(0)] = {"class_type": _LOADERS[0], "inputs": {"ckpt_name": model.name}}
            continue
        inputs = {
            "lora_name": model.name,
            "model": [_loader_id(place - 1), 0],
            "clip": [_loader_id(place - 1), 1],
        }
        nodes[_loader_id(place)] = {"class_type": _LOADERS[1], "inputs": inputs}
    if not workflow.models:
        nodes[_loader_id(-1)] = {"class_type": kind, "inputs": {}}
    last = _loader_id(len(workflow.models) - 1)
    vae = [_loader_id(0) if workflow.models else last, 2]
    nodes[_NEGATIVE] = {"class_type": "CLIPTextEncode", "inputs": {"clip": [last, 1], "text": "blurry"}}
    nodes[_LATENT] = {
        "class_type": "EmptyLatentImage",
        "inputs": {"width": 1024, "height": 1024, "batch_size": 1},
    }
    nodes[_DECODE] = {"class_type": "VAEDecode", "inputs": {"samples": [_SAMPLER, 0], "vae": vae}}
    nodes[_SAVE] = {
        "class_type": "SaveImage",
        "inputs": {"images": [_DECODE, 0], "filename_prefix": workflow.name},
    }
    if workflow.models:
        # It is part of the workflow hash, so that workflows with the same models are told apart.
        nodes["16"] = {"class_type": kind, "inputs": {"images": [_DECODE, 0]}}
    return nodes


def _loader_id(place: int) -> str:
    return str(place + 1) if place >= 0 else "1"
