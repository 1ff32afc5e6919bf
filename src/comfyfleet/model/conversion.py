"""A workflow as the ComfyUI editor saves it, made into the graph that servers run: the editor's `graphToPrompt`, pure.

Owns reroutes, primitives, muted and bypassed nodes, subgraphs and the order of widget values. Which server's
definitions are used is the caller's choice; the result is checked by `workflow_graph.py` like any other graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from comfyfleet.model.editor_graph import (
    MUTED,
    SUBGRAPH_INPUT,
    EditorGraph,
    EditorNode,
    read_editor_graph,
    types_match,
)
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.node_definitions import NodeDefinitions, Widget
from comfyfleet.model.workflow_graph import MAX_NODES, InvalidWorkflow

EXPORT = "open it in ComfyUI and save it with 'Export (API)' (in older releases 'Save (API Format)')"
MAX_HOPS = 300
"""Wires followed for one input, a few calls deep each: beyond it they run in a circle."""

_CONTROLS = frozenset({"fixed", "increment", "decrement", "randomize", "increment-wrap"})


class _Output(msgspec.Struct, frozen=True):
    """Where a wire comes from, when all that is only in the editor is taken away."""

    node: str
    slot: int


class _Value(msgspec.Struct, frozen=True):
    """What a primitive, or a widget on the outside of a subgraph, gives to an input."""

    value: Any


class _Place(msgspec.Struct, frozen=True):
    """One instance of a graph: the workflow itself, or a subgraph with the node that stands for it."""

    graph: EditorGraph
    path: tuple[str, ...] = ()
    host: EditorNode | None = None
    outer: _Place | None = None

    def id_of(self, node: EditorNode) -> str:
        return ":".join((*self.path, node.id))

    def inside(self, node: EditorNode) -> _Place:
        subgraph = self.graph.subgraphs[node.type]
        return _Place(subgraph, (*self.path, node.id), node, self)


def is_editor_workflow(workflow: Any) -> bool:
    """Whether it is a file of the editor, which servers do not run."""
    return isinstance(workflow, Mapping) and isinstance(workflow.get("nodes"), list)


def node_classes_of(workflow: Mapping[str, Any]) -> frozenset[str]:
    """The classes that would run: what is muted, bypassed or only in the editor needs no server."""
    return frozenset(node.type for _, node in _running(_Place(read_editor_graph(workflow))))


def convert_workflow(workflow: Mapping[str, Any], definitions: NodeDefinitions) -> dict[str, dict[str, Any]]:
    """The API-format graph. Raises `InvalidWorkflow`, or `unworkable` when the definitions lack a class."""
    found = list(_running(_Place(read_editor_graph(workflow))))
    if not found:
        raise InvalidWorkflow("Nothing in this workflow would run: every node is muted or only a note.")
    missing = sorted({node.type for _, node in found} - definitions.keys())
    if missing:
        raise cannot_convert(missing)
    graph: dict[str, dict[str, Any]] = {}
    for place, node in found:
        inputs = {name: _plain(value) for name, value in _values(place, node, definitions[node.type])}
        for slot in node.inputs:
            source = _resolve_input(place, node, slot.name, slot.type, _Hops())
            name = slot.widget or slot.name
            if isinstance(source, _Value):
                inputs[name] = _plain(source.value)
            elif source is not None:
                inputs[name] = [source.node, source.slot]
        graph[place.id_of(node)] = {
            "inputs": inputs,
            "class_type": node.type,
            "_meta": {"title": node.title or node.type},
        }
    return graph


def cannot_convert(missing: list[str]) -> Refusal:
    names = ", ".join(missing[:10]) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
    return Refusal(
        RefusalCode.UNWORKABLE,
        f"this workflow is as the ComfyUI editor saves it, and to convert it a worker must have all of its nodes: none "
        f"has {names}. Start one that does, or {EXPORT}",
        missing=missing,
    )


def _running(place: _Place) -> Iterator[tuple[_Place, EditorNode]]:
    """Every node that a server would see, subgraphs unfolded."""
    waiting, count = [place], 0
    while waiting:
        place = waiting.pop(0)
        for node in place.graph.nodes.values():
            if node.is_off or node.is_virtual:
                continue
            count += 1
            if count > MAX_NODES:
                raise InvalidWorkflow(f"The workflow has more than {MAX_NODES} nodes, subgraphs unfolded.")
            if node.type in place.graph.subgraphs:
                if node.type in place.graph.within:
                    raise InvalidWorkflow(f"The subgraph {node.title or node.type!r} contains itself.")
                waiting.append(place.inside(node))
            else:
                yield place, node


# values


def _plain(value: Any) -> Any:
    """A list would be taken for a wire."""
    return {"__value__": value} if isinstance(value, list) else value


def _values(place: _Place, node: EditorNode, widgets: tuple[Widget, ...]) -> Iterator[tuple[str, Any]]:
    given = node.values
    if isinstance(given, Mapping):
        # By name: a pack of nodes that keeps them so may have more of them than the server lists. What is an object
        # there is the editor's own, such as a preview.
        named = {name: value for name, value in given.items() if not isinstance(value, Mapping)}
        known = {widget.name: widget.default for widget in widgets if widget.name and not widget.choices}
        found = {name: value for name, value in known.items() if value is not None} | named
    else:
        found = dict(_in_order(list(given), widgets))
    outside = place.host.promoted.get(node.id, {}) if place.host is not None else {}
    yield from (found | {name: value for name, value in outside.items() if name in found}).items()


def _in_order(values: list[Any], widgets: tuple[Widget, ...]) -> Iterator[tuple[str, Any]]:
    """Takes values from the front of the list, one for each widget and for what the editor puts beside it."""
    for position, widget in enumerate(widgets):
        later = sum(1 for each in widgets[position + 1 :] if each.trait != "button")
        if widget.trait == "button":
            # Newer editors save no value for it; older ones save the kind of file, or nothing.
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
    """Whether the next value says what becomes of a seed. The first editors had a switch there, some nothing."""
    first = values[0]
    return first in _CONTROLS if isinstance(first, str) else isinstance(first, bool) and len(values) > later


def _marked(widget: Widget, value: Any) -> Any:
    if widget.trait == "curve" and value is not None:
        return {"__type__": "CURVE", "__value__": value}
    return value


# wires


class _Hops:
    """Counts the wires followed for one input, so that a circle of reroutes ends."""

    def __init__(self) -> None:
        self._left = MAX_HOPS

    def one(self, node: EditorNode) -> None:
        self._left -= 1
        if self._left < 0:
            raise InvalidWorkflow(f"The wires around node {node.id} run in a circle.")


def _resolve_input(
    place: _Place, node: EditorNode, name: str, kind: str, hops: _Hops
) -> _Output | _Value | None:
    """What really feeds an input. None: nothing does, so its own value stays, where it has one."""
    while True:
        hops.one(node)
        slot = next((slot for slot in node.inputs if slot.name == name), None)
        link = None if slot is None or slot.link is None else place.graph.links.get(slot.link)
        if link is None:
            return None
        if link.origin != SUBGRAPH_INPUT:
            break
        # Out of the subgraph, to what feeds the same input of the node that stands for it.
        host, outer = place.host, place.outer
        if host is None or outer is None or link.slot >= len(place.graph.input_names):
            return None
        name = place.graph.input_names[link.slot]
        outside = next((slot for slot in host.inputs if slot.name == name), None)
        if outside is None or outside.link is None:
            return _Value(host.own[name]) if name in host.own else None
        place, node = outer, host
    source = place.graph.nodes.get(link.origin)
    return None if source is None else _resolve_output(place, source, link.slot, kind, hops)


def _resolve_output(
    place: _Place, node: EditorNode, slot: int, kind: str, hops: _Hops
) -> _Output | _Value | None:
    hops.one(node)
    if node.mode == MUTED:
        return None
    if node.is_off:
        through = _bypass(node, slot, kind)
        return None if through is None else _resolve_input(place, node, through, kind, hops)
    if node.type in place.graph.subgraphs:
        inner = place.inside(node)
        link = inner.graph.output_links.get(slot)
        source = None if link is None else inner.graph.nodes.get(link.origin)
        if link is not None and link.origin == SUBGRAPH_INPUT and link.slot < len(inner.graph.input_names):
            # Straight through the subgraph.
            return _resolve_input(place, node, inner.graph.input_names[link.slot], kind, hops)
        return (
            None if link is None or source is None else _resolve_output(inner, source, link.slot, kind, hops)
        )
    if node.type == "PrimitiveNode":
        values = node.values
        return _Value(values[0]) if isinstance(values, list) and values else None
    if node.type == "GetNode":
        setter = _setter(place, node)
        return None if setter is None else _through(*setter, kind, hops)
    if node.is_virtual:
        return _through(place, node, kind, hops)
    return _Output(place.id_of(node), slot)


def _through(place: _Place, node: EditorNode, kind: str, hops: _Hops) -> _Output | _Value | None:
    return _resolve_input(place, node, node.inputs[0].name, kind, hops) if node.inputs else None


def _setter(place: _Place | None, node: EditorNode) -> tuple[_Place, EditorNode] | None:
    """The node that set what this one gets, here or further out."""
    name = node.values[0] if isinstance(node.values, list) and node.values else None
    while place is not None:
        for other in place.graph.nodes.values():
            if other.type == "SetNode" and isinstance(other.values, list) and other.values[:1] == [name]:
                return place, other
        place = place.outer
    return None


def _bypass(node: EditorNode, slot: int, kind: str) -> str | None:
    """The input that a bypassed node hands on here: the one at the same place if it fits, else the first that does."""
    inputs = node.inputs
    if not inputs:
        return None
    if kind in ("*", ""):
        return inputs[slot if slot < len(inputs) else 0].name
    given = node.outputs[slot] if slot < len(node.outputs) else kind

    def fits(index: int) -> bool:
        return types_match(inputs[index].type, given) and types_match(inputs[index].type, kind)

    if slot < len(inputs) and fits(slot):
        return inputs[slot].name
    exact = (each.name for each in inputs if each.type == kind)
    return next(exact, next((inputs[index].name for index in range(len(inputs)) if fits(index)), None))
