"""The state of one run by its WebSocket messages: progress, timings and outputs.

It does no I/O. It remembers the reported outcome, which counts only if the history cannot be asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

import msgspec

from comfyfleet.model.fact import ProgressKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobResult, NodeTiming
from comfyfleet.worker.connectors.comfyui import failures
from comfyfleet.worker.connectors.comfyui.listener import Message, text_or_none
from comfyfleet.worker.connectors.comfyui.outputs import (
    MAX_FILES,
    SentPictures,
    build_result,
    files_of,
    is_included,
)
from comfyfleet.worker.connectors.comfyui.progress_estimate import Forecast, NodeWeights

MAX_NODES_HEARD = 20_000
MAX_TEXT = 4_000
MAX_CLASS_NAME = 200


class TrackedProgress(msgspec.Struct, frozen=True):
    kind: ProgressKind
    data: dict[str, Any]
    image: bytes | None = None


class _Busy(msgspec.Struct):
    """The time that one node of the submitted graph was at work, including nodes of its expansion."""

    started_at: float
    open: set[str] = set()
    since: float = 0.0
    total_s: float = 0.0


class RunTracker:
    def __init__(
        self,
        graph: Mapping[str, Any],
        base: str,
        included: tuple[str, ...] = (),
        max_output_size: int = 1 << 27,
        weights: NodeWeights | None = None,
    ) -> None:
        """`max_output_size` bounds the outputs and the sent pictures kept here; the history has all outputs.
        `weights`: each node's share of the run."""
        self.sent = SentPictures(graph, included, max_output_size)
        self._output_left = max_output_size
        self._nodes = frozenset(graph)
        self._classes = {node_id: _class_of(node) for node_id, node in graph.items()}
        self._forecast = Forecast(weights or NodeWeights(dict.fromkeys(graph, 1.0)))
        self._base = base
        self._included = included
        self._busy: dict[str, _Busy] = {}
        self._open: dict[str, None] = {}
        """Nodes at work, including those of expansions."""
        self._done: set[str] = set()
        self._at = 0.0
        self._has_states = False
        self._value: float | None = None
        self._max: float | None = None
        self._node: str | None = None
        self._text: tuple[str | None, str] = (None, "")
        """A node and its latest text."""
        self._percentage = 0.0
        self._outputs: dict[str, Any] = {}
        self._display: dict[str, str] = {}
        self._cached: tuple[str, ...] = ()
        self.is_started = False
        self.has_messages = False
        self.is_under_way = False
        """A message arrived that follows `execution_cached`: the run got past its beginning."""
        self.is_success_reported = False
        self.is_end_reported = False
        self._failure: Failure | None = None

    def on_message(self, message: Message, at: float, wall: float) -> list[TrackedProgress]:
        """`at` measures durations, `wall` is the time of day."""
        data = message.data
        self.has_messages = True
        self._at = at
        progress = self.begin()
        if message.kind not in ("execution_start", "execution_cached"):
            self.is_under_way = True
        match message.kind:
            case "execution_cached":
                nodes = data.get("nodes")
                self._cached = tuple(map(str, nodes)) if isinstance(nodes, list) else ()
                self._done.update(self._nodes.intersection(self._cached))
                self._forecast.leave_out(self._cached)
                progress.append(self._progress())
            case "executing" if message.is_end_of_run:
                self.is_end_reported = True
                self._close_all(at)
            case "executing" if message.node is not None:
                if self._has_capacity(message.node):
                    self._begin(message.node, text_or_none(data.get("display_node")), at, wall)
                    progress.append(self._progress())
            case "progress":
                self._step(data.get("value"), data.get("max"), self._shown(message.node))
                progress.append(self._progress())
            case "progress_state":
                self._states(data.get("nodes"), at)
                progress.append(self._progress())
            case "executed" if message.node is not None and self._has_capacity(message.node, message.size):
                progress += self._executed(message.node, text_or_none(data.get("display_node")), data, at)
            case "execution_success":
                self.is_success_reported = True
            case "execution_error" if failures.is_end(data):
                self._failure = failures.execution_error(data)
            case "execution_interrupted":
                self._failure = failures.interrupted(data)
            case "preview":
                node = message.node or self._node
                if not self.sent.on_picture(node, str(data.get("format")), message.image):
                    progress.append(
                        TrackedProgress(ProgressKind.PREVIEW, {**data, "node": node}, message.image)
                    )
            case "text":
                shown = self._shown(message.node) or self._node
                self._text = shown, str(data.get("text", ""))[:MAX_TEXT]
                progress.append(self._progress(shown))
        return progress

    def begin(self) -> list[TrackedProgress]:
        """Reports the start once, whether a message or a lookup found it."""
        if self.is_started:
            return []
        self.is_started = True
        return [TrackedProgress(ProgressKind.STARTED, {})]

    @property
    def node(self) -> str | None:
        """The last mentioned node of the submitted graph."""
        return self._node

    @property
    def timings(self) -> tuple[NodeTiming, ...]:
        return tuple(NodeTiming(node, busy.started_at, busy.total_s) for node, busy in self._busy.items())

    def outcome(self, vram_gb: float | None = None) -> JobResult | Failure | None:
        """The outcome by the WebSocket alone. None: it is unknown."""
        if self._failure is not None:
            is_memory = self._failure.kind is FailureKind.OUT_OF_MEMORY
            return msgspec.structs.replace(self._failure, vram_gb=vram_gb if is_memory else None)
        if not self.is_success_reported:
            return None
        return build_result(
            self._outputs,
            self._base,
            included=self._included,
            display_nodes=self._display,
            timings=self.timings,
            cached_nodes=self._cached,
        )

    def _shown(self, node: str | None) -> str | None:
        """The node of the submitted graph that this one belongs to: expansions make ids such as 1.0.0.1."""
        if node is None or node in self._nodes:
            return node
        return self._display.get(node) or node.split(".", 1)[0]

    def _has_capacity(self, node: str, size: int = 0) -> bool:
        """A run can expand into any number of nodes."""
        self._output_left -= size
        is_known = node in self._nodes or node in self._display
        return self._output_left >= 0 and (is_known or len(self._display) + len(self._busy) < MAX_NODES_HEARD)

    def _begin(self, node: str, display: str | None, at: float, wall: float) -> None:
        if display is not None:
            self._display[node] = display
        if not self._has_states:
            # Without states only the next node shows that the previous one has finished.
            self._close_all(at)
        shown = self._shown(node) or node
        busy = self._busy.setdefault(shown, _Busy(wall))
        if not busy.open:
            busy.since = at
        busy.open.add(node)
        self._open[node] = None
        self._done.discard(shown)
        self._forecast.begin(shown, at)
        self._step(None, None, shown)

    def _finish(self, node: str, at: float) -> None:
        self._open.pop(node, None)
        shown = self._shown(node) or node
        busy = self._busy.get(shown)
        if busy is not None and node in busy.open:
            busy.open.remove(node)
            if not busy.open:
                busy.total_s += at - busy.since
        if (busy is None or not busy.open) and shown in self._nodes:
            self._done.add(shown)
            self._forecast.end(shown)

    def _close_all(self, at: float) -> None:
        for node in list(self._open):
            self._finish(node, at)

    def _states(self, nodes: Any, at: float) -> None:
        if not isinstance(nodes, Mapping):
            return
        self._has_states = True
        for node, content in nodes.items():
            if not isinstance(content, Mapping) or not self._has_capacity(node):
                continue
            display = text_or_none(content.get("display_node_id"))
            if display is not None:
                self._display[node] = display
            if content.get("state") == "finished":
                self._finish(node, at)
            elif content.get("state") == "running":
                self._step(content.get("value"), content.get("max"), self._shown(node))

    def _step(self, value: Any, maximum: Any, node: str | None) -> None:
        self._at_node(node)
        self._value, self._max = _finite(value), _finite(maximum)
        if self._node is not None and self._value is not None and self._max is not None:
            self._forecast.step(self._node, self._value, self._max, self._at)

    def _at_node(self, node: str | None) -> None:
        if node is not None and node != self._node:
            self._node = node
            self._value = self._max = None

    def _executed(
        self, node: str, display: str | None, data: Mapping[str, Any], at: float
    ) -> list[TrackedProgress]:
        if display is not None:
            self._display[node] = display
        self._finish(node, at)
        output = data.get("output")
        if not isinstance(output, Mapping):
            return []
        self._outputs[node] = dict(output)
        if not is_included(node, display, self._included):
            return []
        named = islice(files_of(node, output, self._base), MAX_FILES)
        files = [msgspec.to_builtins(file) for file in named]
        return [TrackedProgress(ProgressKind.OUTPUT, {"node": node, "output": dict(output), "files": files})]

    def _progress(self, node: str | None = None) -> TrackedProgress:
        # The percentage never goes back when a finished node turns out to have more to do.
        self._percentage = max(self._percentage, 100.0 * self._forecast.share())
        data: dict[str, Any] = {
            "value": self._value,
            "max": self._max,
            "node": node or self._node,
            "percentage": round(self._percentage, 1),
            "nodes_done": len(self._done),
            "nodes_total": len(self._nodes),
        }
        if (message := self._message(node or self._node)) is not None:
            data["message"] = message
        if (remaining_s := self._forecast.remaining_s(self._at)) is not None:
            data["remaining_s"] = round(remaining_s, 2)
        return TrackedProgress(ProgressKind.PROGRESS, data)

    def _message(self, node: str | None) -> str | None:
        """A text for people: the node's own, or its class and step."""
        speaker, text = self._text
        if text and speaker == node:
            return text
        name = None if node is None else self._classes.get(node)
        if not name or self._value is None or self._max is None or self._max <= 1 or node != self._node:
            return name or None
        return f"{name}: step {self._value:g} of {self._max:g}"


def _class_of(node: Any) -> str:
    return str(node.get("class_type") or "")[:MAX_CLASS_NAME] if isinstance(node, Mapping) else ""


def _finite(value: Any) -> float | None:
    """A server's JSON may contain NaN, infinities and integers of any length."""
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
