"""A workflow as the rest of the package knows it: parse it, hash it, read what it needs, change a copy.

This is the door: the graph's checks are in `workflow_graph.py`, the hashes in `workflow_hash.py`. Whether a worker has
what a workflow needs is decided by policy, and chance comes from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import msgspec

from comfyfleet.model.workflow_graph import (
    MAX_CHAIN,
    MAX_NODES,
    InvalidWorkflow,
    Link,
    Node,
    Workflow,
    check_workflow,
    decode_workflow,
    decoded_graph,
    decoded_node,
    is_wire,
    node_error,
    parse_workflow,
    read_node,
)
from comfyfleet.model.workflow_hash import (
    EXACT_HASH_VERSION,
    MODEL_EXTENSIONS,
    PROSE_INPUTS,
    RESOURCE_INPUTS,
    WORKFLOW_HASH_VERSION,
    exact_hash,
    hash_workflow,
    label,
    names_model_file,
    texts_within,
)

__all__ = [
    "EXACT_HASH_VERSION",
    "MAX_CHAIN",
    "MAX_NODES",
    "MODEL_EXTENSIONS",
    "PROSE_INPUTS",
    "RESOURCE_INPUTS",
    "WORKFLOW_HASH_VERSION",
    "GraphNeeds",
    "InvalidWorkflow",
    "Link",
    "Node",
    "Workflow",
    "asks_for_seed",
    "check_workflow",
    "decode_workflow",
    "decoded_graph",
    "decoded_node",
    "exact_hash",
    "files_of",
    "hash_workflow",
    "is_wire",
    "label",
    "parse_workflow",
    "read_needs",
    "read_node",
    "resolve_seeds",
    "with_filename_prefix",
    "with_input",
    "with_seeds",
]

SEED_INPUTS = ("seed", "noise_seed")
FILE_INPUTS = frozenset({"image", "mask", "audio", "video", "file", "latent", "model_file"})
"""Inputs of loading nodes that name a file in the server's input folder."""


MAX_FILE_NAME = 4_096
"""No file system has longer paths: such a text is something else, whatever it ends with."""


class GraphNeeds(msgspec.Struct, frozen=True):
    """What a graph shows of its needs. Models and files are named as the graph does, with '/' between folders."""

    node_classes: frozenset[str]
    models: frozenset[str]
    """Files with a model extension. Names without one ('taesd', 'None', a hub's repository) are not files."""
    input_files: frozenset[str]
    """What loading nodes read: not a need of the worker, but somebody has to upload it."""
    last_classes: frozenset[str] = frozenset()
    """The classes of nodes that feed no other."""


def read_needs(workflow: Workflow | Mapping[str, Any], not_outputs: Container[str] = ()) -> GraphNeeds:
    """The classes, model files and input files that a graph names.

    `not_outputs`: classes that are no output nodes. A server runs what an output node depends on, so files that only
    other nodes name are no needs. It refuses a class that it does not have wherever that stands.
    """
    workflow = _parsed(workflow)
    nodes = workflow.nodes
    feeding = {link.node for node in nodes.values() for link in node.links.values()}
    running = {node_id for node_id, node in nodes.items() if node.class_type not in not_outputs}
    for node_id in reversed(workflow.order):
        if node_id in running:
            running.update(link.node for link in nodes[node_id].links.values())
    models: set[str] = set()
    files: set[str] = set()
    # Without an output node nothing would run, and the server will say so.
    for node_id in running or nodes:
        its_models, its_files = files_of(nodes[node_id])
        models |= its_models
        files |= its_files
    return GraphNeeds(
        frozenset(node.class_type for node in nodes.values()),
        frozenset(models),
        frozenset(files),
        frozenset(node.class_type for node_id, node in nodes.items() if node_id not in feeding),
    )


def files_of(node: Node) -> tuple[set[str], set[str]]:
    """The model files and the input files that a node names."""
    models: set[str] = set()
    files: set[str] = set()
    is_loader = node.class_type.removeprefix("VHS_").startswith("Load")
    for name, value in node.inputs.items():
        if name in node.links:
            continue
        for text in texts_within(value):
            if len(text) > MAX_FILE_NAME:
                continue
            if names_model_file(name, text):
                models.add(text.replace("\\", "/"))
            elif is_loader and name in FILE_INPUTS and text.strip():
                # The folder is annotated behind the name; the input folder is what is meant without.
                files.add(text.removesuffix(" [input]").replace("\\", "/"))
    return models, files


def asks_for_seed(node: Node) -> bool:
    """Whether one of its seeds is -1: it shall be drawn."""
    return any(_asks_for_chance(node.inputs.get(name)) for name in SEED_INPUTS)


def with_input(workflow: Workflow | Mapping[str, Any], node: str, input_name: str, value: Any) -> Workflow:
    """A copy in which one input has another value or wire. The whole is checked again."""
    workflow = _parsed(workflow)
    if node not in workflow.nodes:
        raise InvalidWorkflow(
            f"There is no node {node!r} in the workflow, so its {input_name!r} cannot be set."
        )
    graph = workflow.to_graph()
    graph[node]["inputs"][input_name] = value
    # The bounds were the parser's argument when the graph came in; changing an input adds no node.
    return parse_workflow(graph, max_nodes=len(graph), max_chain=max(MAX_CHAIN, len(graph)))


def resolve_seeds(
    workflow: Workflow | Mapping[str, Any], chance: Callable[[], int]
) -> tuple[Workflow, dict[str, int]]:
    """A copy in which every seed of -1 has become a drawn one, and the drawn seeds by node id.

    One number is drawn for each node, whichever of its inputs asks.
    """
    workflow = _parsed(workflow)
    drawn: dict[str, int] = {}
    changes: dict[str, dict[str, Any]] = {}
    for node_id, node in workflow.nodes.items():
        asking = [name for name in SEED_INPUTS if _asks_for_chance(node.inputs.get(name))]
        if asking:
            drawn[node_id] = chance()
            changes[node_id] = dict.fromkeys(asking, drawn[node_id])
    return _with_literals(workflow, changes), drawn


def with_seeds(workflow: Workflow | Mapping[str, Any], seeds: Mapping[str, int]) -> Workflow:
    """A copy in which every seed of -1 has become the one that was drawn for its node."""
    workflow = _parsed(workflow)
    return _with_literals(
        workflow,
        {
            node_id: {
                name: seed
                for name in SEED_INPUTS
                if _asks_for_chance(workflow.nodes[node_id].inputs.get(name))
            }
            for node_id, seed in seeds.items()
            if node_id in workflow.nodes
        },
    )


def with_filename_prefix(workflow: Workflow | Mapping[str, Any], prefix: str) -> Workflow:
    """A copy in which every literal `filename_prefix` lies in the folder `prefix`. Wires are left alone.

    Raises `InvalidWorkflow` if a name leads out of its folder: it would end among the files of somebody else.
    """
    folder = prefix.replace("\\", "/").strip("/")
    if not folder or ".." in folder.split("/"):
        raise ValueError(f"the prefix must name a folder below the output folder, not {prefix!r}")
    workflow = _parsed(workflow)
    changes: dict[str, dict[str, Any]] = {}
    errors: dict[str, Any] = {}
    for node_id, node in workflow.nodes.items():
        name = node.inputs.get("filename_prefix")
        if not isinstance(name, str):
            continue
        if ".." in name.replace("\\", "/").split("/"):
            message = "The filename_prefix leads out of the output folder: leave out '..'"
            errors[node_id] = node_error(
                node.class_type, "invalid_filename_prefix", message, name, input_name="filename_prefix"
            )
        changes[node_id] = {"filename_prefix": f"{folder}/{name.lstrip('/' + chr(92))}"}
    if errors:
        raise InvalidWorkflow("The workflow saves outside the output folder: leave out '..'.", errors)
    return _with_literals(workflow, changes)


def _parsed(workflow: Workflow | Mapping[str, Any]) -> Workflow:
    return workflow if isinstance(workflow, Workflow) else parse_workflow(workflow)


def _asks_for_chance(value: Any) -> bool:
    return isinstance(value, int | float) and value == -1


def _with_literals(workflow: Workflow, changes: Mapping[str, Mapping[str, Any]]) -> Workflow:
    """Literals for literals: the wires stay, so nothing has to be checked again."""
    nodes = dict(workflow.nodes)
    for node_id, values in changes.items():
        node = nodes[node_id]
        inputs = {**node.inputs, **values}
        nodes[node_id] = Node(node.class_type, inputs, node.links, {**node.content, "inputs": inputs})
    return Workflow(nodes, workflow.order)
