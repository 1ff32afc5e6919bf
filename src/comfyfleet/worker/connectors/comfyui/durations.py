"""How long each node of a workflow takes on this server: learned from earlier runs, guessed for the rest.

Pure but for its memory. What a sampler takes grows with its steps, which a workflow hash does not count, so it is kept
for each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.job import NodeTiming

MAX_WORKFLOWS = 500
MAX_NODES = 500
"""Of a workflow with more, nothing is learned."""
_MAX_STEPS = 10_000
_USUAL_STEPS = 20
_SMALL = 0.2
_SHORTEST_S = 0.001

# By what stands in the name of a class. A step of a sampler is 1.
_GUESSES = (
    ("samplerselect", _SMALL),
    ("upscale", 5.0),
    ("vae", 2.0),
    ("loader", 2.0),
    ("video", 3.0),
    ("save", 1.0),
)


class Weights(msgspec.Struct, frozen=True):
    """By node, in parts of the whole."""

    by_node: dict[str, float]
    are_seconds: bool = False
    """Some were learned, and the others are guessed to match."""


class _Learned(msgspec.Struct, frozen=True):
    class_type: str
    seconds: float
    """For each step, where it has steps."""


class Durations:
    def __init__(self) -> None:
        self._known: dict[WorkflowHash, dict[str, _Learned]] = {}

    def learn(
        self, workflow_hash: WorkflowHash, graph: Mapping[str, Any], timings: Iterable[NodeTiming]
    ) -> None:
        """From a run that completed. Nodes whose results were at hand have no timing: what was known of them stays."""
        if len(graph) > MAX_NODES:
            return
        learned = self._known.pop(workflow_hash, {})
        for timing in timings:
            node = graph.get(timing.node_id)
            if isinstance(node, Mapping):
                seconds = max(_SHORTEST_S, timing.seconds) / _steps(node)
                learned[timing.node_id] = _Learned(str(node.get("class_type")), seconds)
        if learned and len(learned) <= MAX_NODES:
            # The newest is the last; the one that was not used for longest goes.
            self._known[workflow_hash] = learned
            while len(self._known) > MAX_WORKFLOWS:
                del self._known[next(iter(self._known))]

    def weights(self, workflow_hash: WorkflowHash, graph: Mapping[str, Any]) -> Weights:
        nodes = {node_id: node for node_id, node in graph.items() if isinstance(node, Mapping)}
        guessed = {node_id: guess(node) for node_id, node in nodes.items()}
        learned = self._known.get(workflow_hash, {})
        # Equal workflows may have other ids for their nodes.
        known = {
            node_id: learned[node_id].seconds * _steps(node)
            for node_id, node in nodes.items()
            if node_id in learned and learned[node_id].class_type == node.get("class_type")
        }
        if not known:
            return Weights(guessed)
        unit_s = sum(known.values()) / sum(guessed[node_id] for node_id in known)
        return Weights(
            {node_id: known.get(node_id, part * unit_s) for node_id, part in guessed.items()},
            are_seconds=True,
        )


def guess(node: Mapping[str, Any]) -> float:
    """What a node takes compared with others. Sampling is most of nearly every workflow."""
    name = str(node.get("class_type")).lower()
    for part, weight in _GUESSES:
        if part in name:
            return weight
    if "sampler" in name:
        return float(_steps(node, _USUAL_STEPS))
    return _SMALL


def _steps(node: Mapping[str, Any], otherwise: int = 1) -> int:
    inputs = node.get("inputs")
    steps = inputs.get("steps") if isinstance(inputs, Mapping) else None
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= _MAX_STEPS:
        return otherwise
    return steps
