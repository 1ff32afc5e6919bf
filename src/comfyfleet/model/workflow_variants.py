"""One workflow of the editor as servers of several releases run it.

Which value belongs to which input depends on the server, so the graphs may differ; their nodes and wires do not. One
graph is kept whole, and for every other release the nodes in which its own differs. What is common to all of them
gives the workflow its hash, so that it is one workflow whichever server runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

MAX_GRAPHS = 4
"""Different graphs that one workflow is converted to. Servers of further releases get the first."""

WorkflowGraph = dict[str, dict[str, Any]]


class WorkflowVariant(msgspec.Struct, frozen=True, omit_defaults=True):
    signatures: tuple[str, ...]
    """Of the servers that it is for."""
    nodes: dict[str, Any]
    """Those in which their graph differs."""


def variant_of(graph: WorkflowGraph, other: WorkflowGraph, signatures: Iterable[str]) -> WorkflowVariant:
    changed = {node_id: node for node_id, node in other.items() if graph.get(node_id) != node}
    return WorkflowVariant(tuple(sorted(signatures)), changed)


def graph_for(
    graph: dict[str, Any], variants: Iterable[WorkflowVariant], signature: str | None
) -> dict[str, Any]:
    """As a server with this signature runs it."""
    if signature is not None:
        for variant in variants:
            if signature in variant.signatures:
                return with_nodes(graph, variant)
    return graph


def with_nodes(graph: dict[str, Any], variant: WorkflowVariant) -> dict[str, Any]:
    return {node_id: variant.nodes.get(node_id, node) for node_id, node in graph.items()}


def common_to(graph: WorkflowGraph, others: Iterable[WorkflowGraph]) -> WorkflowGraph:
    """The graph with those inputs alone that it has in every release, and equal values of them where they are equal."""
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
