"""The parts of a file of the ComfyUI editor: nodes, wires, subgraphs, in every form that its releases have saved.

It reads and normalises; what runs and what feeds what is `editor_conversion.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from comfyfleet.model.workflow_graph import MAX_NODES, InvalidWorkflow

MUTED = 2
BYPASSED = 4
SUBGRAPH_INPUT = "-10"
SUBGRAPH_OUTPUT = "-20"
MAX_PARTS = 200_000
"""Nodes, wires, inputs, outputs and values in all graphs of a file together."""

_VIRTUAL = frozenset({"Note", "MarkdownNote", "Reroute", "PrimitiveNode", "SetNode", "GetNode"})
_VIRTUAL_OF_PACKS = frozenset(
    f"{name} (rgthree)"
    for name in (
        "Reroute",
        "Label",
        "Bookmark",
        "Node Collector",
        "Fast Muter",
        "Fast Bypasser",
        "Fast Groups Muter",
        "Fast Groups Bypasser",
        "Fast Actions Button",
        "Mute / Bypass Repeater",
        "Mute / Bypass Relay",
        "Random Unmuter",
    )
)
_GROUP_NODE = ("workflow>", "workflow/")


class EditorSlot(msgspec.Struct, frozen=True):
    name: str
    type: str
    link: str | None = None
    widget: str | None = None
    """The widget that this input takes the place of; somebody may have renamed the input."""


class EditorLink(msgspec.Struct, frozen=True):
    origin: str
    slot: int
    target: str
    target_slot: int


class EditorNode(msgspec.Struct, frozen=True):
    id: str
    type: str
    mode: int
    title: str
    inputs: tuple[EditorSlot, ...]
    outputs: tuple[str, ...]
    """Their types."""
    values: list[Any] | dict[str, Any]
    own: dict[str, Any] = {}
    """Of a subgraph: the values of its inputs that are widgets on its outside."""
    promoted: dict[str, dict[str, Any]] = {}
    """Of a subgraph: by the node within and the widget, values that are shown and set on its outside."""
    weight: int = 1
    """What it takes to look through its inputs and outputs."""

    def input(self, name: str) -> EditorSlot | None:
        return next((slot for slot in self.inputs if slot.name == name), None)

    @property
    def is_off(self) -> bool:
        return self.mode in (MUTED, BYPASSED)

    @property
    def is_virtual(self) -> bool:
        """Only in the editor: no server has such a class."""
        return self.type in _VIRTUAL or self.type in _VIRTUAL_OF_PACKS


class EditorGraph(msgspec.Struct, frozen=True):
    nodes: dict[str, EditorNode]
    links: dict[str, EditorLink]
    subgraphs: Mapping[str, EditorGraph]
    """All that the file defines, by id."""
    input_names: tuple[str, ...] = ()
    output_links: dict[int, EditorLink] = {}
    """Of a subgraph: what feeds each of its outputs."""
    setters: dict[str, EditorNode] = {}
    """The nodes that set a name for those that get it."""


def read_editor_graph(workflow: Mapping[str, Any]) -> EditorGraph:
    definitions = workflow.get("definitions")
    raw = {
        str(each["id"]): each
        for each in (_items(definitions, "subgraphs") if isinstance(definitions, Mapping) else [])
        if "id" in each
    }
    if len(raw) > MAX_NODES:
        raise InvalidWorkflow(f"The workflow has {len(raw)} subgraphs, and at most {MAX_NODES} are allowed.")
    if (parts := sum(map(_parts, (workflow, *raw.values())))) > MAX_PARTS:
        raise InvalidWorkflow(f"The workflow has {parts} parts, and at most {MAX_PARTS} are allowed.")
    widgets = {subgraph_id: tuple(_widget_inputs(each)) for subgraph_id, each in raw.items()}
    subgraphs: dict[str, EditorGraph] = {}
    for subgraph_id, each in raw.items():
        subgraphs[subgraph_id] = _graph(each, widgets, subgraphs)
    return _graph(workflow, widgets, subgraphs)


def _parts(raw: Mapping[str, Any]) -> int:
    nodes = _items(raw, "nodes")
    listings = (node.get(name) for node in nodes for name in ("inputs", "outputs", "widgets_values"))
    parts = (*listings, raw.get("nodes"), raw.get("links"), raw.get("inputs"))
    return sum(len(each) for each in parts if isinstance(each, list | dict))


def _graph(
    raw: Mapping[str, Any], widgets: Mapping[str, tuple[str, ...]], subgraphs: Mapping[str, EditorGraph]
) -> EditorGraph:
    listing = _items(raw, "nodes")
    if len(listing) > MAX_NODES:
        raise InvalidWorkflow(f"The workflow has {len(listing)} nodes, and at most {MAX_NODES} are allowed.")
    nodes = {str(node.get("id")): _node(node, widgets) for node in listing}
    links = dict(_wires(raw.get("links")))
    outputs = {wire.target_slot: wire for wire in links.values() if wire.target == SUBGRAPH_OUTPUT}
    names = tuple(str(each.get("name")) for each in _items(raw, "inputs"))
    setters: dict[str, EditorNode] = {}
    for node in nodes.values():
        if node.type == "SetNode" and (name := variable_of(node)) is not None:
            setters.setdefault(name, node)
    return EditorGraph(nodes, links, subgraphs, names, outputs, setters)


def variable_of(node: EditorNode) -> str | None:
    """The name under which a node sets or gets."""
    values = node.values
    return values[0] if isinstance(values, list) and values and isinstance(values[0], str) else None


def _node(raw: Mapping[str, Any], widgets: Mapping[str, tuple[str, ...]]) -> EditorNode:
    kind = str(raw.get("type") or "")
    mode = raw.get("mode")
    title = raw.get("title")
    if kind.startswith(_GROUP_NODE) and mode not in (MUTED, BYPASSED):
        raise InvalidWorkflow(
            f"Node {raw.get('id')} is a group node ({kind.partition(kind[8])[2]}), which newer editors have given up: "
            "convert it to nodes or to a subgraph in the editor, or save with 'Export (API)'."
        )
    named, listed = raw.get("widgets_values_named"), raw.get("widgets_values")
    values: list[Any] | dict[str, Any] = listed if isinstance(listed, list | dict) else []
    # Newer editors save both. Those that are only in the editor are read by place.
    if isinstance(named, dict) and kind not in _VIRTUAL:
        values = named
    inputs = tuple(map(_slot, _items(raw, "inputs")))
    outputs = tuple(str(each.get("type", "*")) for each in _items(raw, "outputs"))
    length = sum(map(len, outputs)) + sum(len(slot.type) for slot in inputs)
    node = EditorNode(
        str(raw.get("id")),
        kind,
        mode if isinstance(mode, int) else 0,
        title if isinstance(title, str) else "",
        inputs,
        outputs,
        values,
        # A type may be a list of all choices.
        weight=1 + len(inputs) + length // 100,
    )
    if kind in widgets:
        own, promoted = _outside(raw, node, widgets[kind])
        return msgspec.structs.replace(node, own=own, promoted=promoted)
    return node


def _slot(raw: Mapping[str, Any]) -> EditorSlot:
    link = raw.get("link")
    kind = raw.get("type", "*")
    widget = raw.get("widget")
    return EditorSlot(
        str(raw.get("name")),
        ",".join(map(str, kind)) if isinstance(kind, list) else str(kind),
        None if link is None else str(link),
        str(widget.get("name", raw.get("name"))) if isinstance(widget, Mapping) else None,
    )


def _outside(
    raw: Mapping[str, Any], node: EditorNode, names: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The values that a node standing for a subgraph keeps: for its own inputs, and for widgets within."""
    if isinstance(node.values, dict):
        return dict(node.values), {}
    properties = raw.get("properties")
    proxies = properties.get("proxyWidgets") if isinstance(properties, Mapping) else None
    own: dict[str, Any] = {}
    promoted: dict[str, dict[str, Any]] = {}
    if isinstance(proxies, list) and proxies:
        # Releases that promoted widgets by a list saved their values in its order, or none at all.
        for proxy, value in zip(proxies, node.values, strict=False):
            if isinstance(proxy, list) and len(proxy) >= 2 and value is not None:
                inner, name = str(proxy[0]), str(proxy[1])
                if inner == "-1":
                    own[name] = value
                else:
                    promoted.setdefault(inner, {})[name] = value
        return own, promoted
    own = {name: value for name, value in zip(names, node.values, strict=False) if value is not None}
    return own, promoted


def _widget_inputs(definition: Mapping[str, Any]) -> Iterator[str]:
    """Those inputs of a subgraph that end in a widget within, in their order."""
    links = dict(_wires(definition.get("links")))
    widgets = {
        slot.link
        for node in _items(definition, "nodes")
        for slot in map(_slot, _items(node, "inputs"))
        if slot.widget is not None and slot.link is not None
    }
    ends = {wire.slot for link, wire in links.items() if wire.origin == SUBGRAPH_INPUT and link in widgets}
    for number, each in enumerate(_items(definition, "inputs")):
        if number in ends:
            yield str(each.get("name"))


def _wires(raw: Any) -> Iterator[tuple[str, EditorLink]]:
    """Lists in files of the workflow itself, objects in subgraphs and in newer files."""
    for link in raw if isinstance(raw, list) else ():
        if isinstance(link, list) and len(link) >= 5:
            number, *ends = link[:5]
        elif isinstance(link, Mapping):
            number = link.get("id")
            ends = [link.get(name) for name in ("origin_id", "origin_slot", "target_id", "target_slot")]
        else:
            continue
        origin, slot, target, target_slot = ends
        try:
            wire = EditorLink(str(origin), int(slot), str(target), int(target_slot))
        except (TypeError, ValueError, OverflowError):
            raise InvalidWorkflow(
                f"Link {number} of the workflow does not say from where to where it goes."
            ) from None
        # One that was left over, without a place at its beginning, feeds nothing.
        if wire.slot >= 0:
            yield str(number), wire


def _items(raw: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    listing = raw.get(name)
    return [each for each in listing if isinstance(each, Mapping)] if isinstance(listing, list) else []


def types_match(one: str, other: str) -> bool:
    """The editor's rule: any type fits, and of two lists one in common is enough."""
    if one in ("", "*", "0") or other in ("", "*", "0"):
        return True
    return bool(set(one.lower().split(",")) & set(other.lower().split(",")))
