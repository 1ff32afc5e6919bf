"""How ComfyUI graphs are read as payloads, for every connector that runs them. The engine has a faster reader of its
own for the service `comfyui` (`engine/graph_reader.py`), which finds the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from comfyfleet.model.payload import PayloadReading
from comfyfleet.model.workflow import SEED_INPUTS, asks_for_seed, read_needs
from comfyfleet.model.workflow_graph import parse_workflow
from comfyfleet.model.workflow_hash import hash_workflow


class ComfyUIFormat(msgspec.Struct, frozen=True):
    service: str = "comfyui"

    def read(self, payload: Mapping[str, Any]) -> PayloadReading:
        workflow = parse_workflow(payload)
        needs = read_needs(workflow)
        seeds = tuple(
            f"{node_id}.inputs.{name}"
            for node_id, node in workflow.nodes.items()
            if asks_for_seed(node)
            for name in SEED_INPUTS
            if node.inputs.get(name) == -1
        )
        return PayloadReading(
            workflow.to_graph(), hash_workflow(workflow), needs.models, needs.node_classes, seeds, None
        )

    def json_schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "title": "A ComfyUI graph in API format, by node id",
            "minProperties": 1,
            "additionalProperties": {
                "type": "object",
                "required": ["class_type", "inputs"],
                "properties": {
                    "class_type": {"type": "string", "minLength": 1},
                    "inputs": {"type": "object"},
                },
            },
        }
