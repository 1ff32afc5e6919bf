"""One editor workflow as servers of several releases run it.

The values of inputs depend on the server's release; nodes and links do not. One graph is stored whole, and for every
other release only the nodes that differ. The common part gives the workflow its hash, so all variants share one hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

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
