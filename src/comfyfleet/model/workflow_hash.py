"""The structural hash and the exact hash of a workflow. docs/workflow-hash.md specifies them.

A change of any byte here needs a new version: stores, blocks and affinities hold hashes.

The structural hash is colour refinement on the graph. The first pass follows the links and hashes the label of each
node with the colours of its sources. The next pass goes backwards and adds the colours of the consumers. Two passes
distinguish nearly all nodes of real workflows; then equal hashes mean equal graphs. Further passes run only while they
distinguish more nodes. Graphs with symmetric nodes may share a hash, which only makes routing less precise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import msgspec

from comfyfleet.model.canonical_json import canonical_json
from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.workflow_graph import Node, Workflow, parse_workflow

WORKFLOW_HASH_VERSION = 1
EXACT_HASH_VERSION = 1
MAX_PASSES = 16
"""Each pass is linear in the graph. This bounds the work for a hostile graph."""

MODEL_EXTENSIONS = (
    ".safetensors",
    ".sft",
    ".ckpt",
    ".pt",
    ".pt2",
    ".pth",
    ".bin",
    ".gguf",
    ".onnx",
    ".pkl",
    ".engine",
    ".vae",
    ".trt",
    ".torchscript",
)
_LONGEST_EXTENSION = max(map(len, MODEL_EXTENSIONS))

RESOURCE_INPUTS = frozenset(
    {
        "audio_encoder_name",
        "ckpt_name",
        "clip_name",
        "clip_vision_name",
        "control_net_name",
        "controlnet_name",
        "gligen_name",
        "hypernetwork_name",
        "instantid_file",
        "ipadapter_file",
        "lora_name",
        "model_name",
        "photomaker_model_name",
        "pulid_file",
        "style_model_name",
        "text_encoder_name",
        "unet_name",
        "upscale_model_name",
        "vae_name",
    }
)
"""Inputs whose text always names a resource. A number at the end of the input's name is ignored."""

PROSE_INPUTS = frozenset(
    {
        "clip_g",
        "clip_l",
        "filename_prefix",
        "negative",
        "negative_prompt",
        "positive",
        "positive_prompt",
        "prompt",
        "t5xxl",
        "text",
        "text_g",
        "text_l",
    }
)
"""Inputs whose text never names a resource: a prompt may end with a file name. Numbers are ignored here too."""

EDITOR_INPUTS = frozenset({"audioUI", "choose file to upload", "upload"})
"""Inputs of the editor (players, buttons) that servers do not read. They count only as links, so that an exported
workflow and the same workflow converted here have one hash."""

EDITOR_INPUTS_OF = {
    "Preview3D": frozenset({"image"}),
    "Preview3DAnimation": frozenset({"image"}),
    "PreviewAny": frozenset({"preview", "previewMode", "preview_markdown", "preview_mode", "preview_text"}),
    "SaveGLB": frozenset({"image"}),
}
"""Further editor inputs of these classes."""

_NONE: frozenset[str] = frozenset()
_NUMBERING = "_0123456789"
_encode = msgspec.json.Encoder(order="sorted").encode


def hash_workflow(workflow: Workflow | Mapping[str, Any]) -> WorkflowHash:
    """The structural hash of classes, links, input names and named resources. Raises `InvalidWorkflow`."""
    if not isinstance(workflow, Workflow):
        workflow = parse_workflow(workflow)
    position = {node_id: index for index, node_id in enumerate(workflow.order)}
    nodes = [workflow.nodes[node_id] for node_id in workflow.order]
    sources = [[position[link.node] for link in node.links.values()] for node in nodes]
    colours = [label(node) for node in nodes]
    count = len(nodes)
    distinct = 0
    for number in range(MAX_PASSES):
        colours = _pass_against(colours, sources) if number % 2 else _pass_along(colours, sources)
        before, distinct = distinct, len(set(colours))
        if distinct in (count, before):
            break
    return WorkflowHash(
        sha256(b"comfyfleet-workflow/%d\n" % WORKFLOW_HASH_VERSION + b"".join(sorted(colours))).hexdigest()
    )


def exact_hash(workflow: Workflow | Mapping[str, Any]) -> str:
    """The hash of all values and node ids, without `_meta`, which holds titles. Raises `InvalidWorkflow`."""
    if not isinstance(workflow, Workflow):
        workflow = parse_workflow(workflow)
    graph: dict[str, Any] = {}
    for node_id, node in workflow.nodes.items():
        graph[node_id] = content = dict(node.content)
        content.pop("_meta", None)
    return sha256(b"comfyfleet-exact/%d\n" % EXACT_HASH_VERSION + canonical_json(graph)).hexdigest()


def names_model_file(name: str, text: str) -> bool:
    """Whether the text of this input names a model file, by its extension."""
    end = text[-_LONGEST_EXTENSION:]
    return (
        "." in end
        and end.lower().endswith(MODEL_EXTENSIONS)
        and name.rstrip(_NUMBERING) not in PROSE_INPUTS
        and "\n" not in text
    )


def names_resource(name: str, text: str) -> bool:
    """Whether the text of this input names a model or another resource, and so is part of the structure."""
    if name.rstrip(_NUMBERING) in RESOURCE_INPUTS:
        return bool(text) and "\n" not in text
    return names_model_file(name, text)


def texts_within(value: Any) -> Iterator[str]:
    """Every string inside a literal value, in canonical order, without object keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_within(item)
    elif isinstance(value, dict):
        for key in sorted(value):
            yield from texts_within(value[key])


def label(node: Node) -> bytes:
    """A node without its neighbours, as canonical JSON. It has no fractions, so a plain encoder is enough."""
    described: dict[str, Any] = {}
    links = node.links
    left_out = EDITOR_INPUTS_OF.get(node.class_type, _NONE)
    for name, value in node.inputs.items():
        if (name in EDITOR_INPUTS or name in left_out) and name not in links:
            continue
        kind = type(value)
        described[name] = None
        if kind is str:
            # This avoids a call for most strings: the loop is the slowest part of the hash.
            if (
                "." in value[-_LONGEST_EXTENSION:] or name in RESOURCE_INPUTS or name[-1:] in _NUMBERING
            ) and names_resource(name, value):
                described[name] = [value.replace("\\", "/")]
        elif name in links:
            described[name] = links[name].slot
        elif kind is list or kind is dict:
            texts = [text for text in texts_within(value) if names_resource(name, text)]
            described[name] = [text.replace("\\", "/") for text in texts] or None
    return _encode([node.class_type, described])


def _pass_along(colours: list[bytes], sources: list[list[int]]) -> list[bytes]:
    """Hash each colour with the new colours of its sources, ordered by input name."""
    refined: list[bytes] = []
    for colour, wired in zip(colours, sources, strict=True):
        if len(wired) == 1:
            colour += refined[wired[0]]
        elif wired:
            colour += b"".join([refined[source] for source in wired])
        refined.append(sha256(colour).digest())
    return refined


def _pass_against(colours: list[bytes], sources: list[list[int]]) -> list[bytes]:
    """Hash each colour with the sorted new colours of its consumers and the index of the link there."""
    taken: list[list[bytes]] = [[] for _ in colours]
    refined = list(colours)
    for index in range(len(colours) - 1, -1, -1):
        entries = taken[index]
        entries.sort()
        refined[index] = colour = sha256(colours[index] + b"".join(entries)).digest()
        # The index stands for name and slot of the link, because the consumer's colour includes both.
        for number, source in enumerate(sources[index]):
            taken[source].append(colour + number.to_bytes(4, "big"))
    return refined
