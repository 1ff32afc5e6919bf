"""What a submitted graph is: checked, hashed, and what it needs. Nodes and graphs that were seen before are recalled.

Callers send the same workflow again and again with another seed or another prompt. Of such a graph all nodes but one or
two are, byte for byte, nodes that were checked before, and its structure is one whose hash and needs are known. What is
recalled is exactly what the check would find; whatever is new or wrong goes through the check itself (`model/`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.workflow import (
    GraphNeeds,
    Node,
    Workflow,
    asks_for_seed,
    check_workflow,
    files_of,
    hash_workflow,
    label,
    parse_workflow,
    read_needs,
    read_node,
)

_MAX_NODES = 4_096
_MAX_NODE_BYTES = 2_048
_MAX_GRAPHS = 1_024
_MAX_GRAPH_NODES = 500
"""Beyond them nothing is remembered, or everything is forgotten: what matters comes back with the next job."""

_encode = msgspec.msgpack.Encoder().encode


class Reading(NamedTuple):
    graph: dict[str, Any]
    """Nobody else's, though its nodes may be those of other jobs: nothing in it is changed in place."""
    workflow_hash: WorkflowHash
    needs: GraphNeeds
    drawing: tuple[str, ...]
    """Nodes that ask for a seed."""


class _Seen(NamedTuple):
    """A node as it was sent, and the number of its structure: all of it that the rest of a reading depends on."""

    content: dict[str, Any]
    structure: int


class Reader:
    def __init__(self, max_nodes: int) -> None:
        self._max_nodes = max_nodes
        self._nodes: dict[bytes, _Seen] = {}
        self._structures: dict[tuple[Any, ...], int] = {}
        self._graphs: dict[tuple[Any, ...], Reading] = {}
        self._numbers = 0

    def read(self, graph: Mapping[str, Any], *, is_own: bool = False) -> Reading:
        """Raises `InvalidWorkflow`. `is_own`: it was decoded from JSON, and nobody else has it."""
        if not is_own:
            # A copy of our own: the caller may go on changing its graph for the next job.
            workflow = parse_workflow(graph, max_nodes=self._max_nodes)
            return _read(workflow, workflow.to_graph())
        recalled = self._recall(graph)
        if recalled is None:
            return _read(check_workflow(graph, max_nodes=self._max_nodes), dict(graph))
        nodes, structures = recalled
        known = self._graphs.get(structures)
        if known is None:
            known = _read(check_workflow(nodes, max_nodes=self._max_nodes), {})
            if len(self._graphs) >= _MAX_GRAPHS:
                self._graphs.clear()
            self._graphs[structures] = known
        return known._replace(graph=nodes)

    def _recall(self, graph: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Any, ...]] | None:
        """The graph made of nodes that are known, and what it is known by. None: it is not worth it, or wrong."""
        if not isinstance(graph, dict) or len(graph) > _MAX_GRAPH_NODES:
            return None
        nodes: dict[str, Any] = {}
        structures: list[int] = []
        for node_id, content in graph.items():
            try:
                text = _encode(content)
            except OverflowError:
                return None
            seen = self._nodes.get(text)
            if seen is None:
                seen = self._see(node_id, content, graph, text)
                if seen is None:
                    return None
            nodes[node_id] = seen.content
            structures.append(seen.structure)
        return nodes, (*nodes, *structures)

    def _see(self, node_id: str, content: Any, graph: Mapping[str, Any], text: bytes) -> _Seen | None:
        node = read_node(node_id, content, graph)
        if node is None:
            return None
        seen = _Seen(content, self._structure(node))
        if len(text) <= _MAX_NODE_BYTES:
            if len(self._nodes) >= _MAX_NODES:
                self._nodes.clear()
            self._nodes[text] = seen
        return seen

    def _structure(self, node: Node) -> int:
        models, files = files_of(node)
        structure = (
            label(node),
            tuple(link.node for link in node.links.values()),
            frozenset(models),
            frozenset(files),
            asks_for_seed(node),
        )
        number = self._structures.get(structure)
        if number is None:
            if len(self._structures) >= _MAX_NODES:
                # Numbers are not given twice, so what is known by the old ones is merely not found any more.
                self._structures.clear()
            self._numbers += 1
            number = self._structures[structure] = self._numbers
        return number


def _read(workflow: Workflow, graph: dict[str, Any]) -> Reading:
    # Thousands of waiting jobs share one workflow: they share its text too.
    workflow_hash = WorkflowHash(sys.intern(hash_workflow(workflow)))
    drawing = tuple(node_id for node_id, node in workflow.nodes.items() if asks_for_seed(node))
    return Reading(graph, workflow_hash, read_needs(workflow), drawing)
