"""Estimates how far a run is and how long it still takes.

`NodeDurations` learns the seconds of each node from earlier runs and guesses the others. `Forecast` combines
them with the speed of the current steps. A sampler's time is kept per step, because a workflow hash ignores
the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.job import NodeTiming

MAX_WORKFLOWS = 500
MAX_NODES = 500
"""Larger workflows are not learned."""
_MAX_STEPS = 10_000
_USUAL_STEPS = 20
_SMALL = 0.2
_SHORTEST_S = 0.001

# By a part of the class name. One step of a sampler weighs 1.
_GUESSES = (
    ("samplerselect", _SMALL),
    ("upscale", 5.0),
    ("vae", 2.0),
    ("loader", 2.0),
    ("video", 3.0),
    ("save", 1.0),
)


class NodeWeights(msgspec.Struct, frozen=True):
    """Each node's part of the whole."""

    by_node: dict[str, float]
    are_seconds: bool = False
    """Some were learned, and the guesses for the others are scaled to match."""


class _Learned(msgspec.Struct, frozen=True):
    class_type: str
    seconds: float
    """Per step, for nodes with steps."""


class NodeDurations:
    def __init__(self) -> None:
        self._known: dict[WorkflowHash, dict[str, _Learned]] = {}

    def record(
        self, workflow_hash: WorkflowHash, graph: Mapping[str, Any], timings: Iterable[NodeTiming]
    ) -> None:
        """From a completed run. Cached nodes have no timing and keep what was learned before."""
        if len(graph) > MAX_NODES:
            return
        learned = self._known.pop(workflow_hash, {})
        for timing in timings:
            node = graph.get(timing.node_id)
            if isinstance(node, Mapping):
                seconds = max(_SHORTEST_S, timing.seconds) / _steps(node)
                learned[timing.node_id] = _Learned(str(node.get("class_type")), seconds)
        if learned and len(learned) <= MAX_NODES:
            # The newest is last, so the first is the least recently used.
            self._known[workflow_hash] = learned
            while len(self._known) > MAX_WORKFLOWS:
                del self._known[next(iter(self._known))]

    def weights(self, workflow_hash: WorkflowHash, graph: Mapping[str, Any]) -> NodeWeights:
        nodes = {node_id: node for node_id, node in graph.items() if isinstance(node, Mapping)}
        guessed = {node_id: guess(node) for node_id, node in nodes.items()}
        learned = self._known.get(workflow_hash, {})
        # The nodes of equal workflows may have other ids.
        known = {
            node_id: learned[node_id].seconds * _steps(node)
            for node_id, node in nodes.items()
            if node_id in learned and learned[node_id].class_type == node.get("class_type")
        }
        if not known:
            return NodeWeights(guessed)
        unit_s = sum(known.values()) / sum(guessed[node_id] for node_id in known)
        return NodeWeights(
            {node_id: known.get(node_id, part * unit_s) for node_id, part in guessed.items()},
            are_seconds=True,
        )


def guess(node: Mapping[str, Any]) -> float:
    """A node's time compared with others. Sampling is most of nearly every workflow."""
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


class _Steps:
    __slots__ = ("at", "first", "first_at", "most", "value")

    def __init__(self, value: float, most: float, at: float) -> None:
        self.first = self.value = value
        self.first_at = self.at = at
        self.most = most

    def reach(self, value: float, most: float, at: float) -> None:
        if most != self.most or value < self.value:
            # It starts again: the second pass of a sampler, the next tile of a picture.
            self.first, self.first_at, self.most = value, at, most
        self.value, self.at = value, at

    @property
    def share(self) -> float:
        return min(1.0, max(0.0, self.value / self.most))

    @property
    def step_s(self) -> float | None:
        """Without the time before the first step, such as the loading of a model."""
        count = self.value - self.first
        return (self.at - self.first_at) / count if count > 0 and self.at > self.first_at else None


class Forecast:
    def __init__(self, weights: NodeWeights) -> None:
        self._left = dict(weights.by_node)
        """Weights of nodes that have not ended."""
        self._are_seconds = weights.are_seconds
        self._done = 0.0
        self._began: dict[str, float] = {}
        self._steps: dict[str, _Steps] = {}

    def leave_out(self, nodes: Iterable[str]) -> None:
        """Excludes nodes whose results are cached."""
        for node in nodes:
            self._forget(node)

    def begin(self, node: str, at: float) -> None:
        if node in self._left:
            self._began.setdefault(node, at)

    def step(self, node: str, value: float, most: float, at: float) -> None:
        if node not in self._left or most <= 0:
            return
        self._began.setdefault(node, at)
        steps = self._steps.get(node)
        if steps is None:
            self._steps[node] = _Steps(value, most, at)
        else:
            steps.reach(value, most, at)

    def end(self, node: str) -> None:
        self._done += self._forget(node)

    def _forget(self, node: str) -> float:
        self._began.pop(node, None)
        self._steps.pop(node, None)
        return self._left.pop(node, 0.0)

    def share(self) -> float:
        # Summed again each time: repeated subtraction never reaches exactly zero.
        left = sum(self._left.values())
        if not left:
            return 1.0
        begun = sum(self._left[node] * steps.share for node, steps in self._steps.items())
        return min(1.0, (self._done + begun) / (self._done + left))

    def remaining_s(self, at: float) -> float | None:
        """None: there are neither steps nor earlier runs to estimate from."""
        if not self._left:
            return 0.0
        total, unit_s = 0.0, 1.0 if self._are_seconds else None
        waiting = dict(self._left)
        for node in self._began:
            weight = waiting.pop(node)
            steps = self._steps.get(node)
            step_s = None if steps is None else steps.step_s
            if steps is not None and step_s is not None:
                # Measured in this run, which is better than anything learned.
                total += max(0.0, steps.most - steps.value) * step_s
                if unit_s is None and weight:
                    unit_s = steps.most * step_s / weight
            elif self._are_seconds:
                total += max(0.0, weight - (at - self._began[node]))
            else:
                return None
        if unit_s is None:
            return None
        return total + unit_s * sum(waiting.values())
