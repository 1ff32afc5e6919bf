"""Reads the nodes, links and subgraphs of a ComfyUI editor file, in the form of any release.

`editor_conversion.py` decides which nodes run and what feeds their inputs.
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
"""Nodes, links, inputs, outputs and values of all graphs in a file together."""

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
    """The widget that this input replaces. The input may have another name."""


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
    """The types of the outputs."""
    values: list[Any] | dict[str, Any]
    own: dict[str, Any] = {}
    """For a subgraph: the values of its own input widgets."""
    promoted: dict[str, dict[str, Any]] = {}
    """For a subgraph: values of promoted widgets, by inner node and widget."""
    weight: int = 1
    """The cost of reading its inputs and outputs."""

    def input(self, name: str) -> EditorSlot | None:
        return next((slot for slot in self.inputs if slot.name == name), None)

    @property
    def is_off(self) -> bool:
        return self.mode in (MUTED, BYPASSED)

    @property
    def is_virtual(self) -> bool:
        """The node exists only in the editor. No server has such a class."""
        return self.type in _VIRTUAL or self.type in _VIRTUAL_OF_PACKS


class EditorGraph(msgspec.Struct, frozen=True):
    nodes: dict[str, EditorNode]
    links: dict[str, EditorLink]
    subgraphs: Mapping[str, EditorGraph]
    """All subgraphs of the file, by id."""
    input_names: tuple[str, ...] = ()
    output_links: dict[int, EditorLink] = {}
    """For a subgraph: what feeds each of its outputs."""
    setters: dict[str, EditorNode] = {}
    """SetNodes by name."""


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
    """The name that a SetNode or GetNode uses."""
    values = node.values
    return values[0] if isinstance(values, list) and values and isinstance(values[0], str) else None


def _node(raw: Mapping[str, Any], widgets: Mapping[str, tuple[str, ...]]) -> EditorNode:
    kind = str(raw.get("type") or "")
    mode = raw.get("mode")
    title = raw.get("title")
    if kind.startswith(_GROUP_NODE) and mode not in (MUTED, BYPASSED):
        raise InvalidWorkflow(
            f"Node {raw.get('id')} is a group node ({kind.partition(kind[8])[2]}), which newer editors do not support: "
            "convert it to nodes or to a subgraph in the editor, or save with 'Export (API)'."
        )
    named, listed = raw.get("widgets_values_named"), raw.get("widgets_values")
    values: list[Any] | dict[str, Any] = listed if isinstance(listed, list | dict) else []
    # Newer editors save both. Editor-only nodes are read by index.
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
        # A type can be a list of all choices.
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
    """The values that a host node holds: for its own inputs, and for promoted widgets."""
    if isinstance(node.values, dict):
        return dict(node.values), {}
    properties = raw.get("properties")
    proxies = properties.get("proxyWidgets") if isinstance(properties, Mapping) else None
    own: dict[str, Any] = {}
    promoted: dict[str, dict[str, Any]] = {}
    if isinstance(proxies, list) and proxies:
        # Releases with a list of promoted widgets save their values in its order, or none.
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
    """The inputs of a subgraph that are linked to an inner widget, in order."""
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
    """Links are lists in old files, and objects in subgraphs and newer files."""
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
            raise InvalidWorkflow(f"Link {number} of the workflow has no valid origin and target.") from None
        # A stale link without an origin slot feeds nothing.
        if wire.slot >= 0:
            yield str(number), wire


def _items(raw: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    listing = raw.get(name)
    return [each for each in listing if isinstance(each, Mapping)] if isinstance(listing, list) else []


def types_match(one: str, other: str) -> bool:
    """The editor's rule: `*` matches any type, and two lists match if they share a type."""
    if one in ("", "*", "0") or other in ("", "*", "0"):
        return True
    return bool(set(one.lower().split(",")) & set(other.lower().split(",")))
