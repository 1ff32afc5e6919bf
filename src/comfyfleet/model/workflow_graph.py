"""Parses and checks a workflow graph in ComfyUI's API format, before any server sees it.

Whether a class or a file exists depends on the worker and is not checked here. Other packages import `workflow.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from comfyfleet.model.canonical_json import MAX_NESTING, NotCanonicalError, check_canonical
from comfyfleet.model.errors import Refusal, RefusalCode

MAX_NODES = 5_000
MAX_CHAIN = 400
"""A server validates a graph by recursion along its links. A longer chain exhausts its stack."""
MAX_SLOT = 65_535

WRAPPED = "__value__"
"""ComfyUI's notation for a list that is a value, not a link."""

EXPORT = "'Export (API)' (in older releases 'Save (API Format)')"
"""What ComfyUI's menu calls it."""

_PLAIN = 1 << 64
_CHECKED_PARTS = frozenset({"class_type", "inputs"})


class InvalidWorkflow(Refusal):
    """No server can run the graph. `node_errors` has ComfyUI's form and contains all errors."""

    def __init__(self, message: str, node_errors: Mapping[str, Any] | None = None) -> None:
        self.node_errors: dict[str, Any] = dict(node_errors or {})
        super().__init__(RefusalCode.INVALID_WORKFLOW, message, node_errors=self.node_errors)


class NodeLink(msgspec.Struct, frozen=True, gc=False):
    """A link into an input: the source node and the index of its output."""

    node: str
    slot: int


class Node(msgspec.Struct, frozen=True):
    class_type: str
    inputs: Mapping[str, Any]
    """As submitted, links included."""
    links: Mapping[str, NodeLink]
    """The inputs that are links, ordered by name."""
    content: Mapping[str, Any]
    """The whole node as submitted, with `_meta` and unknown parts."""


class Workflow(msgspec.Struct, frozen=True):
    """A checked graph. Do not change it in place; the functions of `workflow.py` return changed copies."""

    nodes: Mapping[str, Node]
    order: tuple[str, ...]
    """Node ids in topological order."""

    def to_graph(self) -> dict[str, dict[str, Any]]:
        """The API-format graph for a server. Its dictionaries are new, their values are shared."""
        return {
            node_id: {**node.content, "inputs": dict(node.inputs)} for node_id, node in self.nodes.items()
        }


def parse_workflow(
    raw: Mapping[str, Any] | bytes | str, *, max_nodes: int = MAX_NODES, max_chain: int = MAX_CHAIN
) -> Workflow:
    """Parse a graph and check it as far as possible without a server. Raises `InvalidWorkflow`."""
    return check_workflow(decode_workflow(raw), max_nodes=max_nodes, max_chain=max_chain)


def check_workflow(graph: Any, *, max_nodes: int = MAX_NODES, max_chain: int = MAX_CHAIN) -> Workflow:
    """Like `parse_workflow`, for a freshly decoded graph that nobody else uses: it is not copied."""
    _check_shape(graph, max_nodes)
    problems = _Problems(graph)
    nodes: dict[str, Node] = {}
    for node_id, content in graph.items():
        node = _read_node(node_id, content, graph, problems)
        if node is not None:
            nodes[node_id] = node
    problems.raise_if_any()
    return Workflow(nodes, _topological_order(nodes, problems, max_chain))


def read_node(node_id: str, content: Any, graph: Mapping[str, Any]) -> Node | None:
    """One node of such a graph, or None if it has errors, which `check_workflow` reports."""
    problems = _Problems(graph)
    node = _read_node(node_id, content, graph, problems)
    return None if problems.found else node


def is_wire(value: Any) -> bool:
    """ComfyUI's rule: a list of exactly one string and one number is a link. Any other list is a value."""
    return (
        type(value) is list
        and len(value) == 2
        and type(value[0]) is str
        and isinstance(value[1], int | float)
    )


def node_error(
    class_type: Any, kind: str, message: str, details: str = "", **extra_info: Any
) -> dict[str, Any]:
    """One entry of `node_errors` in ComfyUI's form. Only a server knows the dependent outputs."""
    error = {"type": kind, "message": message, "details": details, "extra_info": extra_info}
    return {"errors": [error], "dependent_outputs": [], "class_type": class_type}


class _Problems:
    """Collects errors by node in the form of ComfyUI's `node_errors`."""

    def __init__(self, graph: Mapping[str, Any]) -> None:
        self._graph = graph
        self.found: dict[str, Any] = {}
        self._first = ""

    def add(self, node_id: str, kind: str, message: str, details: str = "", **extra_info: Any) -> None:
        content = self._graph[node_id]
        class_type = content.get("class_type") if isinstance(content, Mapping) else None
        entry = node_error(class_type, kind, message, details, **extra_info)
        if node_id in self.found:
            self.found[node_id]["errors"] += entry["errors"]
        else:
            self.found[node_id] = entry
        self._first = self._first or f"node {node_id!r}: {message}"

    def raise_if_any(self) -> None:
        if self.found:
            count = sum(len(entry["errors"]) for entry in self.found.values())
            more = f" (and {count - 1} more, see node_errors)" if count > 1 else ""
            if not any(isinstance(each, Mapping) and "class_type" in each for each in self._graph.values()):
                more += f". This is no workflow: pass a file saved with {EXPORT}."
            raise InvalidWorkflow(f"The workflow is not valid: {self._first}{more}", self.found)


def decode_workflow(raw: Any) -> Any:
    """Decode a text, or copy a caller's mapping by way of JSON. The graph is not checked."""
    if isinstance(raw, Mapping):
        raw = _to_text(raw)
    elif not isinstance(raw, bytes | str):
        return raw
    text = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    try:
        return msgspec.json.decode(text.removeprefix(b"\xef\xbb\xbf"))
    except RecursionError as error:
        raise InvalidWorkflow(
            f"The workflow is nested deeper than {MAX_NESTING} levels: flatten it."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidWorkflow(f"The workflow is not valid JSON: {_json_error(text, error)}") from error


def _json_error(text: bytes, error: Exception) -> str:
    """Python's own reader knows the line, and accepts what JSON does not have."""
    try:
        json.loads(text)
    except json.JSONDecodeError as found:
        if "truncated" in str(error):
            lines = found.doc.count("\n") + 1
            return f"it ends too early, in line {lines}. Save the whole file again with {EXPORT}."
        words = str(error).removeprefix("JSON is malformed: ").partition(" (byte")[0]
        return (
            f"{words} in line {found.lineno}, column {found.colno}. Correct it there, or save the file again."
        )
    except (ValueError, RecursionError):
        return f"{error}."
    return "JSON has no NaN, infinities and lone surrogates."


def decoded_graph(graph: Mapping[str, Any]) -> dict[str, Any]:
    """The graph with every `msgspec.Raw` node decoded."""
    return {node_id: decoded_node(content) for node_id, content in graph.items()}


def decoded_node(content: Any) -> Any:
    return decode_workflow(bytes(content)) if type(content) is msgspec.Raw else content


def _to_text(graph: Mapping[Any, Any]) -> bytes:
    """Encode a caller's mapping, which copies the graph and proves that it is JSON."""
    for node_id in graph:
        if not isinstance(node_id, str):
            raise InvalidWorkflow(
                f"Node ids are strings, but {node_id!r} is {type(node_id).__name__}: quote it."
            )
    try:
        text = json.dumps(graph, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_plain)
        return text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        problems = _Problems(graph)
        for node_id, content in graph.items():
            inputs = content.get("inputs") if isinstance(content, Mapping) else None
            for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
                _check_value(node_id, str(name), value, problems)
        problems.raise_if_any()
        raise InvalidWorkflow(f"The workflow cannot be written as JSON: {error}.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def _check_value(node_id: str, name: str, value: Any, problems: _Problems) -> None:
    try:
        # Minus one level each for the graph, the node and its inputs.
        check_canonical(value, max_nesting=MAX_NESTING - 3)
    except NotCanonicalError as error:
        problems.add(
            node_id,
            "invalid_input_value",
            f"Input {name!r} is not a JSON value: {error}",
            name,
            input_name=name,
        )


def _check_shape(graph: Any, max_nodes: int) -> None:
    if not isinstance(graph, dict):
        raise InvalidWorkflow(
            f"A workflow is an object of nodes by id, but this is {_json_type(graph)}. "
            f"Pass the content of a file saved with {EXPORT}."
        )
    if not graph:
        raise InvalidWorkflow("The workflow has no nodes.")
    if isinstance(graph.get("nodes"), list):
        raise InvalidWorkflow(
            "This workflow has the format of the ComfyUI editor, which servers do not run: "
            f"save it with {EXPORT}."
        )
    wrapped = graph.get("prompt")
    if isinstance(wrapped, dict) and "class_type" not in wrapped:
        raise InvalidWorkflow("This is the body of a /prompt request: pass only the content of its 'prompt'.")
    if len(graph) > max_nodes:
        raise InvalidWorkflow(f"The workflow has {len(graph)} nodes, and at most {max_nodes} are allowed.")


def _read_node(node_id: str, content: Any, graph: Mapping[str, Any], problems: _Problems) -> Node | None:
    if type(content) is not dict:
        problems.add(node_id, "invalid_node", f"A node is an object, but this is {_json_type(content)}")
        return None
    class_type = content.get("class_type")
    if type(class_type) is not str or not class_type.strip():
        problems.add(node_id, "missing_class_type", "The node has no class_type, which names what it does")
        class_type = ""
    inputs = content.get("inputs")
    if type(inputs) is not dict:
        # A server accepts such a node if no output depends on it. Then its only execution thread dies.
        what = "has no inputs" if "inputs" not in content else f"has inputs that are {_json_type(inputs)}"
        problems.add(node_id, "missing_inputs", f"The node {what}: give it an object, empty if need be")
        return None
    links: dict[str, NodeLink] = {}
    for name, value in inputs.items():
        kind = type(value)
        if kind is str or kind is float or (kind is int and -_PLAIN < value < _PLAIN):
            continue
        if kind is list and len(value) == 2:
            source, slot = value
            if type(slot) is int and 0 <= slot <= MAX_SLOT and type(source) is str and source in graph:
                links[name] = NodeLink(source, slot)
                continue
            if is_wire(value):
                _explain_link(node_id, name, value, graph, problems)
                continue
        _check_value(node_id, name, value, problems)
        if kind is dict and WRAPPED in value:
            _check_wrapped(node_id, name, value, problems)
    if len(links) > 1:
        links = dict(sorted(links.items()))
    for name in content:
        if name not in _CHECKED_PARTS and not _is_title(content[name]):
            _check_value(node_id, name, content[name], problems)
    return Node(class_type, inputs, links, content)


def _is_title(value: Any) -> bool:
    """The usual content of `_meta`."""
    return type(value) is dict and len(value) == 1 and type(value.get("title")) is str


def _explain_link(node_id: str, name: str, value: Any, graph: Mapping[str, Any], problems: _Problems) -> None:
    source, slot = value
    extra = {"input_name": name, "received_value": value}
    if source not in graph:
        problems.add(
            node_id,
            "linked_node_missing",
            f"Input {name!r} is linked to node {source!r}, which is not in the workflow; a list of a string "
            "and a number is always a link",
            name,
            **extra,
        )
    if type(slot) is not int or not 0 <= slot <= MAX_SLOT:
        problems.add(
            node_id,
            "bad_linked_input",
            f"Input {name!r} is linked to output {slot!r} of node {source!r}: "
            f"an output is an integer from 0 to {MAX_SLOT}",
            name,
            **extra,
        )


def _check_wrapped(node_id: str, name: str, value: Any, problems: _Problems) -> None:
    """A server unwraps such a value in place and then reads it as a link. If the linked node does not exist, the
    server's only execution thread dies."""
    while type(value) is dict and WRAPPED in value:
        value = value[WRAPPED]
    if is_wire(value):
        problems.add(
            node_id,
            "value_looks_like_link",
            f"Input {name!r} has the list {value!r} as a value, which ComfyUI would read as a link and stop "
            "working: a list of a string and a number cannot be a value",
            name,
            input_name=name,
            received_value=value,
        )


def _topological_order(nodes: Mapping[str, Node], problems: _Problems, max_chain: int) -> tuple[str, ...]:
    missing: dict[str, int] = {}
    consumers: dict[str, list[str]] = {}
    layer: list[str] = []
    for node_id, node in nodes.items():
        links = node.links
        if links:
            missing[node_id] = len(links)
            for link in links.values():
                source = link.node
                if source in consumers:
                    consumers[source].append(node_id)
                else:
                    consumers[source] = [node_id]
        else:
            layer.append(node_id)
    order: list[str] = []
    chain = 0
    while layer:
        chain += 1
        order += layer
        following: list[str] = []
        for source in layer:
            for node_id in consumers.get(source, ()):
                missing[node_id] -= 1
                if not missing[node_id]:
                    following.append(node_id)
        layer = following
    if len(order) < len(nodes):
        for node_id in _on_cycles(nodes, set(nodes).difference(order)):
            problems.add(node_id, "dependency_cycle", "The node depends on its own output")
        problems.raise_if_any()
    if chain > max_chain:
        raise InvalidWorkflow(
            f"The longest chain of links has {chain} nodes, and at most {max_chain} are allowed: split the workflow."
        )
    return tuple(order)


def _on_cycles(nodes: Mapping[str, Node], unordered: set[str]) -> list[str]:
    """The nodes on a cycle, without those that only depend on one."""
    waiting = dict.fromkeys(unordered, 0)
    for node_id in unordered:
        for link in nodes[node_id].links.values():
            source = link.node
            if source in waiting:
                waiting[source] += 1
    unused = [node_id for node_id, consumers in waiting.items() if not consumers]
    while unused:
        node_id = unused.pop()
        del waiting[node_id]
        for link in nodes[node_id].links.values():
            source = link.node
            if source in waiting:
                waiting[source] -= 1
                if not waiting[source]:
                    unused.append(source)
    return [node_id for node_id in nodes if node_id in waiting]


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list | tuple) else type(value).__name__
