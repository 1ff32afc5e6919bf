"""Reads submitted graphs: checks, hashes, finds their needs. Caches nodes and structures that it has read.

Callers send the same workflow with another seed or prompt, so most nodes are byte for byte known. Nodes may
come as raw text; the reader decodes only new ones. The cache returns exactly what the check in `model/`
finds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgspec

from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.payload import PayloadReading
from comfyfleet.model.workflow import GraphNeeds, asks_for_seed, files_of, read_needs
from comfyfleet.model.workflow_graph import (
    Node,
    Workflow,
    check_workflow,
    decoded_graph,
    decoded_node,
    parse_workflow,
    read_node,
)
from comfyfleet.model.workflow_hash import hash_workflow, label

_MAX_NODES = 4_096
_MAX_NODE_BYTES = 2_048
_MAX_GRAPHS = 1_024
_MAX_GRAPH_NODES = 500
_MAX_GRAPH_CHARACTERS = 16_384
"""Larger graphs are not cached; a full cache is cleared. The next job refills it."""

_PLAIN = 1 << 64
"""Every JSON reader takes smaller integers as numbers."""

_encode = msgspec.msgpack.Encoder().encode

K = TypeVar("K")
T = TypeVar("T")

_Graph = tuple[str | bytes, ...]
"""The node ids, then the node structures, which other graphs share."""


class GraphReading(NamedTuple):
    graph: dict[str, Any]
    """Its own dict, but its nodes may be shared with other jobs: change nothing in place."""
    workflow_hash: WorkflowHash
    needs: GraphNeeds
    drawing: tuple[str, ...]
    """The nodes that ask for a seed."""
    payload: PayloadReading | None = None
    """Of another service than ComfyUI; then `graph` is its payload, and `drawing` has dotted paths."""


class _Seen(NamedTuple):
    """A node as sent, and the digest of its structure. The rest of a reading depends on the digest alone."""

    content: dict[str, Any]
    structure: bytes


class GraphReader:
    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._nodes: dict[bytes, _Seen] = {}
        self._shapes: dict[bytes, bytes] = {}
        """Structures by shape, so that a node with another seed is known."""
        self._graphs: dict[_Graph, GraphReading] = {}

    def read(self, graph: Mapping[str, Any], *, is_own: bool = False) -> GraphReading:
        """Raises `InvalidWorkflow`. `is_own`: the graph comes from decoded JSON and has no other owner."""
        if not is_own:
            # Copy it: the caller may change its graph for the next job.
            workflow = parse_workflow(graph, max_nodes=self._max_nodes)
            return _read(workflow, workflow.to_graph())
        recalled = self._recall(graph)
        if recalled is None:
            graph = decoded_graph(graph)
            return _read(check_workflow(graph, max_nodes=self._max_nodes), graph)
        nodes, structure = recalled
        known = self._graphs.get(structure)
        if known is None:
            known = _read(check_workflow(nodes, max_nodes=self._max_nodes), {})
            # An input or node name may contain a whole file as text.
            if _size(known) + sum(map(len, nodes)) <= _MAX_GRAPH_CHARACTERS:
                _remember(self._graphs, structure, known, _MAX_GRAPHS)
        return GraphReading(nodes, known.workflow_hash, known.needs, known.drawing)

    def read_once(self, graph: Mapping[str, Any]) -> GraphReading:
        """Like `read` with `is_own`, without the cache: for threads and for graphs too large to cache."""
        graph = decoded_graph(graph)
        return _read(check_workflow(graph, max_nodes=self._max_nodes), graph)

    def _recall(self, graph: Mapping[str, Any]) -> tuple[dict[str, Any], _Graph] | None:
        """The graph from cached nodes, and its cache key. None: not worth caching, or wrong."""
        if not isinstance(graph, dict) or len(graph) > _MAX_GRAPH_NODES:
            return None
        nodes: dict[str, Any] = {}
        structures: list[bytes] = []
        for node_id, content in graph.items():
            try:
                # JSON and MessagePack texts never collide: the first byte of an object differs.
                text = bytes(content) if type(content) is msgspec.Raw else _encode(content)
            except OverflowError:
                return None
            seen = self._nodes.get(text)
            if seen is None:
                seen = self._see(node_id, decoded_node(content), graph, text)
                if seen is None:
                    return None
            nodes[node_id] = seen.content
            structures.append(seen.structure)
        return nodes, (*nodes, *structures)

    def _see(self, node_id: str, content: Any, graph: Mapping[str, Any], text: bytes) -> _Seen | None:
        shape = _shape(content)
        structure = None if shape is None else self._shapes.get(shape)
        if structure is None:
            node = read_node(node_id, content, graph)
            if node is None:
                return None
            structure = _structure(node)
            if shape is not None and len(shape) <= _MAX_NODE_BYTES:
                _remember(self._shapes, shape, structure, _MAX_NODES)
        seen = _Seen(content, structure)
        if len(text) <= _MAX_NODE_BYTES:
            _remember(self._nodes, text, seen, _MAX_NODES)
        return seen


def _remember(known: dict[K, T], key: K, value: T, most: int) -> None:
    if len(known) >= most:
        known.clear()
    known[key] = value


def _shape(content: Any) -> bytes | None:
    """The node with 0 for its numbers, which are not part of its structure; -1 stays, as it may ask for a
    seed. None: not worth caching, or wrong."""
    inputs = content.get("inputs") if type(content) is dict else None
    if type(inputs) is not dict:
        return None
    plain = {
        name: 0
        if (type(value) is int or type(value) is float) and value != -1 and -_PLAIN < value < _PLAIN
        else value
        for name, value in inputs.items()
    }
    try:
        return _encode({**content, "inputs": plain})
    except OverflowError:
        return None


def _structure(node: Node) -> bytes:
    models, files = files_of(node)
    sources = [link.node for link in node.links.values()]
    return _digest((label(node), sources, sorted(models), sorted(files), asks_for_seed(node)))


def _digest(parts: tuple[Any, ...]) -> bytes:
    return sha256(_encode(parts)).digest()


def _size(reading: GraphReading) -> int:
    needs = reading.needs
    return sum(map(len, chain(needs.node_classes, needs.models, needs.input_files, reading.drawing)))


def _read(workflow: Workflow, graph: dict[str, Any]) -> GraphReading:
    # Thousands of waiting jobs share one workflow, so they share its text.
    workflow_hash = WorkflowHash(sys.intern(hash_workflow(workflow)))
    drawing = tuple(node_id for node_id, node in workflow.nodes.items() if asks_for_seed(node))
    return GraphReading(graph, workflow_hash, read_needs(workflow), drawing)
