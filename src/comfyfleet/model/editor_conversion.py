"""Converts a workflow of the ComfyUI editor to the API format that servers run, like the editor's `graphToPrompt`.

It handles reroutes, primitives, muted and bypassed nodes, subgraphs and the order of widget values. The caller chooses
the server's definitions, and `workflow_graph.py` checks the result.

Servers of several releases run variants of one workflow. The values of inputs depend on the server's release; nodes and
links do not. One graph is stored whole, and for every other release only the nodes that differ. The common part gives
the workflow its hash, so all variants share one hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from comfyfleet.model.editor_graph import (
    MUTED,
    SUBGRAPH_INPUT,
    EditorGraph,
    EditorNode,
    EditorSlot,
    read_editor_graph,
    types_match,
    variable_of,
)
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.node_classes import NodeDefinitions, Widget
from comfyfleet.model.workflow_graph import MAX_NODES, InvalidWorkflow

EXPORT = "open it in ComfyUI and save it with 'Export (API)' (in older releases 'Save (API Format)')"
MAX_HOPS = 150
"""Links followed for one input. A longer chain is a cycle."""
MAX_STEPS = 1_000_000
"""Inputs and values read in total. A subgraph is written once and may be used thousands of times."""
MAX_BYTES = 32 * 1024 * 1024
"""The size of the converted graph. One value may go to thousands of inputs."""
MAX_LEVELS = 32
"""Nesting of subgraphs."""

_CONTROLS = frozenset({"fixed", "increment", "decrement", "randomize", "increment-wrap"})
_BESIDE = frozenset({"control_after_generate", "control_filter_list"})
"""Widgets that the editor adds to another widget. No server has such an input."""


class _Output(msgspec.Struct, frozen=True):
    """The real origin of a link, after reroutes and subgraphs are resolved."""

    node: str
    slot: int


class _Value(msgspec.Struct, frozen=True):
    """The value that a primitive or a promoted widget of a subgraph gives to an input."""

    value: Any


class _Place(msgspec.Struct, frozen=True):
    """One instance of a graph: the workflow, or a subgraph with its host node."""

    graph: EditorGraph
    path: tuple[str, ...] = ()
    host: EditorNode | None = None
    outer: _Place | None = None

    def id_of(self, node: EditorNode) -> str:
        return ":".join((*self.path, node.id))

    def types(self) -> Iterator[str]:
        """The types of the enclosing subgraphs, itself included."""
        place: _Place | None = self
        while place is not None and place.host is not None:
            yield place.host.type
            place = place.outer

    def inside(self, node: EditorNode) -> _Place:
        subgraph = self.graph.subgraphs[node.type]
        return _Place(subgraph, (*self.path, node.id), node, self)


def is_editor_workflow(workflow: Any) -> bool:
    """Whether it has the editor format, which servers do not run."""
    return isinstance(workflow, Mapping) and isinstance(workflow.get("nodes"), list)


def node_classes_of(workflow: Mapping[str, Any]) -> frozenset[str]:
    """The classes that would run, without muted, bypassed and editor-only nodes."""
    return frozenset(node.type for _, node in _running(_Place(read_editor_graph(workflow))))


def convert_workflow(workflow: Mapping[str, Any], definitions: NodeDefinitions) -> dict[str, dict[str, Any]]:
    """The API-format graph. Raises `InvalidWorkflow`, or the refusal `unworkable` if the definitions lack a class."""
    found = list(_running(_Place(read_editor_graph(workflow))))
    if not found:
        raise InvalidWorkflow("This workflow has nothing to run: every node is muted or a note.")
    missing = sorted({node.type for _, node in found} - definitions.keys())
    if missing:
        raise cannot_convert(missing)
    bounds = _Bounds()
    graph: dict[str, dict[str, Any]] = {}
    for place, node in found:
        widgets = definitions[node.type]
        bounds.look(len(node.inputs) + len(node.values) + len(widgets))
        inputs: dict[str, Any] = {}
        for name, value in _values(place, node, widgets, bounds):
            inputs[name] = bounds.kept(name, _plain(value))
        for slot in node.inputs:
            if slot.link is None:
                continue
            bounds.begin()
            source = _resolve_input(place, slot, slot.type, bounds)
            name = slot.widget or slot.name
            if isinstance(source, _Value):
                inputs[name] = bounds.kept(name, _plain(source.value))
            elif source is not None:
                inputs[name] = bounds.kept(name, [source.node, source.slot])
        graph[bounds.kept(node.title, place.id_of(node))] = {
            "inputs": inputs,
            "class_type": node.type,
            "_meta": {"title": node.title or node.type},
        }
    return graph


def cannot_convert(missing: list[str]) -> Refusal:
    names = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
    return Refusal(
        RefusalCode.UNWORKABLE,
        "this workflow has the format of the ComfyUI editor. To convert it, a worker must have all of its nodes, and "
        f"none has {names}. Start such a worker, or {EXPORT}",
        missing=missing,
    )


def _running(place: _Place) -> Iterator[tuple[_Place, EditorNode]]:
    """Every node that a server would get, with subgraphs expanded."""
    waiting, count = [place], 0
    while waiting:
        place = waiting.pop(0)
        for node in place.graph.nodes.values():
            if node.is_off or node.is_virtual:
                continue
            count += 1
            if count > MAX_NODES:
                raise InvalidWorkflow(
                    f"The workflow has more than {MAX_NODES} nodes, with subgraphs expanded."
                )
            if node.type in place.graph.subgraphs:
                if node.type in place.types():
                    raise InvalidWorkflow(f"The subgraph {node.title or node.type!r} contains itself.")
                if len(place.path) == MAX_LEVELS:
                    raise InvalidWorkflow(f"Subgraphs are nested more than {MAX_LEVELS} deep.")
                waiting.append(place.inside(node))
            else:
                yield place, node


# values


def _plain(value: Any) -> Any:
    """Wrap a list: a server would read it as a link."""
    return {"__value__": value} if isinstance(value, list) else value


def _values(
    place: _Place, node: EditorNode, widgets: tuple[Widget, ...], bounds: _Bounds
) -> Iterator[tuple[str, Any]]:
    given = node.values
    if isinstance(given, Mapping):
        # A custom node pack that saves values by name may have more of them than the server lists. An object that the
        # server does not list belongs to the editor, such as a preview.
        known = {widget.name: widget for widget in widgets if widget.name}
        found = {
            name: widget.default
            for name, widget in known.items()
            if widget.default is not None and not widget.choices
        }
        for name, value in given.items():
            if name in known:
                found[name] = _marked(known[name], value)
            elif not isinstance(value, Mapping) and name not in _BESIDE:
                found[name] = value
    else:
        found = dict(_in_order(list(given), widgets))
    outside = place.host.promoted.get(node.id, {}) if place.host is not None else {}
    bounds.look(len(outside))
    yield from (found | {name: value for name, value in outside.items() if name in found}).items()


def _in_order(values: list[Any], widgets: tuple[Widget, ...]) -> Iterator[tuple[str, Any]]:
    """Take values from the front of the list, one for each widget and for each control beside it."""
    later = sum(each.trait != "button" for each in widgets)
    for widget in widgets:
        later -= widget.trait != "button"
        if widget.trait == "button":
            # Newer editors save no value for it. Older ones save the file kind or nothing.
            if len(values) > later:
                values.pop(0)
            continue
        if values:
            value = values.pop(0)
        elif widget.default is not None:
            value = widget.default
        else:
            continue
        yield widget.name, _marked(widget, value)
        if widget.trait.startswith("control") and values and _is_control(values, later):
            values.pop(0)
            if widget.trait == "control_and_filter" and values and isinstance(values[0], str):
                values.pop(0)
        if widget.choices and isinstance(value, str):
            yield from _in_order(values, widget.choices.get(value, ()))


def _is_control(values: list[Any], later: int) -> bool:
    """Whether the next value is the control of a seed. The first editors saved a boolean, some saved nothing."""
    first = values[0]
    return first in _CONTROLS if isinstance(first, str) else isinstance(first, bool) and len(values) > later


def _marked(widget: Widget, value: Any) -> Any:
    if widget.trait == "curve" and value is not None:
        return {"__type__": "CURVE", "__value__": value}
    return value


# wires


class _Bounds:
    """Limits of one conversion, against hostile files."""

    def __init__(self) -> None:
        self._hops, self._steps, self._bytes = 0, MAX_STEPS, MAX_BYTES

    def begin(self) -> None:
        """Start to follow the links of another input."""
        self._hops = MAX_HOPS

    def hop(self, node: EditorNode) -> None:
        self._hops -= 1
        if self._hops < 0:
            raise InvalidWorkflow(f"The links around node {node.id} form a cycle.")
        self.look(node.weight)

    def look(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise InvalidWorkflow("The workflow is too large with subgraphs expanded: split it.")

    def kept(self, name: str, value: Any) -> Any:
        """Count the size of a value that becomes part of the graph, and return the value."""
        self._bytes -= len(name) + len(value if isinstance(value, str) else repr(value))
        if self._bytes < 0:
            raise InvalidWorkflow(f"The workflow has more than {MAX_BYTES} bytes, with subgraphs expanded.")
        return value


def _resolve_input(
    place: _Place, slot: EditorSlot | None, kind: str, bounds: _Bounds
) -> _Output | _Value | None:
    """What feeds an input. None: nothing, so its own value stays."""
    while True:
        link = None if slot is None or slot.link is None else place.graph.links.get(slot.link)
        if link is None:
            return None
        if link.origin != SUBGRAPH_INPUT:
            break
        # Leave the subgraph and follow the same input of the host node.
        host, outer = place.host, place.outer
        if host is None or outer is None or link.slot >= len(place.graph.input_names):
            return None
        bounds.hop(host)
        name = place.graph.input_names[link.slot]
        slot = host.input(name)
        if slot is None or slot.link is None:
            return _Value(host.own[name]) if name in host.own else None
        place, kind = outer, slot.type
    source = place.graph.nodes.get(link.origin)
    return None if source is None else _resolve_output(place, source, link.slot, kind, bounds)


def _resolve_output(
    place: _Place, node: EditorNode, slot: int, kind: str, bounds: _Bounds
) -> _Output | _Value | None:
    bounds.hop(node)
    if node.type == "PrimitiveNode":
        # Even if it is muted: the editor writes its value into the inputs first.
        values = node.values
        return _Value(values[0]) if isinstance(values, list) and values else None
    if node.mode == MUTED:
        return None
    if node.is_off:
        through = _bypass(node, slot, kind)
        return None if through is None else _resolve_input(place, through, through.type, bounds)
    if node.type in place.graph.subgraphs:
        inner = place.inside(node)
        link = inner.graph.output_links.get(slot)
        source = None if link is None else inner.graph.nodes.get(link.origin)
        if link is not None and link.origin == SUBGRAPH_INPUT and link.slot < len(inner.graph.input_names):
            # The subgraph connects its input directly to its output.
            return _resolve_input(place, node.input(inner.graph.input_names[link.slot]), kind, bounds)
        return (
            None
            if link is None or source is None
            else _resolve_output(inner, source, link.slot, kind, bounds)
        )
    if node.type == "GetNode":
        setter = _setter(place, node)
        return None if setter is None else _through(*setter, kind, bounds)
    if node.is_virtual:
        return _through(place, node, kind, bounds)
    return _Output(place.id_of(node), slot)


def _through(place: _Place, node: EditorNode, kind: str, bounds: _Bounds) -> _Output | _Value | None:
    return _resolve_input(place, node.inputs[0], kind, bounds) if node.inputs else None


def _setter(place: _Place | None, node: EditorNode) -> tuple[_Place, EditorNode] | None:
    """The SetNode for this GetNode, in this graph or an outer one."""
    name = variable_of(node)
    while place is not None and name is not None:
        if (setter := place.graph.setters.get(name)) is not None:
            return place, setter
        place = place.outer
    return None


def _bypass(node: EditorNode, slot: int, kind: str) -> EditorSlot | None:
    """The input that a bypassed node passes on: the one with the same index if it fits, else the first that fits."""
    inputs = node.inputs
    if not inputs:
        return None
    if kind in ("*", ""):
        return inputs[slot if slot < len(inputs) else 0]
    given = node.outputs[slot] if slot < len(node.outputs) else kind

    def fits(index: int) -> bool:
        return types_match(inputs[index].type, given) and types_match(inputs[index].type, kind)

    if slot < len(inputs) and fits(slot):
        return inputs[slot]
    exact = (each for each in inputs if each.type == kind)
    return next(exact, next((inputs[index] for index in range(len(inputs)) if fits(index)), None))


MAX_GRAPHS = 4
"""The maximum number of different graphs of one workflow. Servers of further releases get the first."""

WorkflowGraph = dict[str, dict[str, Any]]


class WorkflowVariant(msgspec.Struct, frozen=True, omit_defaults=True):
    signatures: tuple[str, ...]
    """Signatures of the servers that run this variant."""
    nodes: dict[str, Any]
    """The nodes that differ."""


def variant_of(graph: WorkflowGraph, other: WorkflowGraph, signatures: Iterable[str]) -> WorkflowVariant:
    changed = {node_id: node for node_id, node in other.items() if graph.get(node_id) != node}
    return WorkflowVariant(tuple(sorted(signatures)), changed)


def graph_for(
    graph: dict[str, Any], variants: Iterable[WorkflowVariant], signature: str | None
) -> dict[str, Any]:
    """The graph for a server with this signature."""
    if signature is not None:
        for variant in variants:
            if signature in variant.signatures:
                return with_nodes(graph, variant)
    return graph


def with_nodes(graph: dict[str, Any], variant: WorkflowVariant) -> dict[str, Any]:
    return {node_id: variant.nodes.get(node_id, node) for node_id, node in graph.items()}


def common_to(graph: WorkflowGraph, others: Iterable[WorkflowGraph]) -> WorkflowGraph:
    """The graph with only the inputs that every release has. A value that differs becomes None."""
    graphs = list(others)
    return {
        node_id: {**node, "inputs": _common(node["inputs"], [each[node_id]["inputs"] for each in graphs])}
        for node_id, node in graph.items()
    }


def _common(inputs: Mapping[str, Any], others: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: value if all(each[name] == value for each in others) else None
        for name, value in inputs.items()
        if all(name in each for each in others)
    }
