"""How far a run is and how long it will still take, from what each node weighs and how fast its steps come.

Pure: moments are given. What the nodes weigh is `durations.py`'s, what happens to them `tracker.py` tells.
"""

from __future__ import annotations

from collections.abc import Iterable

from comfyfleet.worker.connectors.comfyui.durations import Weights


class _Steps:
    """The steps of a node at work."""

    __slots__ = ("at", "first", "first_at", "most", "value")

    def __init__(self, value: float, most: float, at: float) -> None:
        self.first = self.value = value
        self.first_at = self.at = at
        self.most = most

    def reach(self, value: float, most: float, at: float) -> None:
        if most != self.most or value < self.value:
            # It begins anew: the second pass of a sampler, the next tile of a picture.
            self.first, self.first_at, self.most = value, at, most
        self.value, self.at = value, at

    @property
    def share(self) -> float:
        return min(1.0, max(0.0, self.value / self.most))

    @property
    def step_s(self) -> float | None:
        """What comes before the first step, such as the loading of a model, is no part of it."""
        count = self.value - self.first
        return (self.at - self.first_at) / count if count > 0 and self.at > self.first_at else None


class Forecast:
    def __init__(self, weights: Weights) -> None:
        self._left = dict(weights.by_node)
        """Of nodes that have not ended."""
        self._are_seconds = weights.are_seconds
        self._done = 0.0
        self._began: dict[str, float] = {}
        self._steps: dict[str, _Steps] = {}

    def leave_out(self, nodes: Iterable[str]) -> None:
        """Their results are at hand: they are no part of this run."""
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
        """From 0 to 1."""
        # Added up anew each time: what is taken away bit by bit is never quite nothing.
        left = sum(self._left.values())
        if not left:
            return 1.0
        begun = sum(self._left[node] * steps.share for node, steps in self._steps.items())
        return min(1.0, (self._done + begun) / (self._done + left))

    def remaining_s(self, at: float) -> float | None:
        """None: neither steps nor earlier runs tell."""
        if not self._left:
            return 0.0
        total, unit_s = 0.0, 1.0 if self._are_seconds else None
        waiting = dict(self._left)
        for node in self._began:
            weight = waiting.pop(node)
            steps = self._steps.get(node)
            step_s = None if steps is None else steps.step_s
            if steps is not None and step_s is not None:
                # Measured now, on this run: better than anything learned.
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
