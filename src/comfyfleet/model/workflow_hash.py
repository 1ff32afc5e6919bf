"""Two identities of a workflow: what it is made of, and what exactly was submitted.

Owns both hashes and the rule by which a value names a resource; docs/workflow-hash.md specifies them for other
languages. A change of any byte here is a new version: hashes are kept in stores, blocks and affinities.

The structural hash is colour refinement on the graph. A first pass goes along the wires and gives each node the hash
of its label and of the colours of its sources; the next goes against them and adds the colours of its consumers. In
a graph without cycles one pass carries information along whole paths, so two passes tell nearly all nodes of real
workflows apart (two prompt encoders differ only in who consumes them), and when all differ the hash is exact: equal
hashes mean equal graphs. Passes go on only while they tell more nodes apart. Where symmetric nodes remain, two graphs
that refinement cannot tell apart would share a hash; for routing that costs precision, never correctness.
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
"""Each pass is linear in the graph; a graph built to need many of them is not worth more."""

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
"""Inputs whose text names a resource whatever it ends with; a number at the end of the input's name is ignored."""

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
"""Inputs whose text never names a resource: a prompt may end with the name of a file. Numbers are ignored here too."""

EDITOR_INPUTS = frozenset({"audioUI", "choose file to upload", "upload"})
"""Inputs of the editor's own (players, buttons), which its exports have and servers do not read. They count as wires
alone, so that an exported workflow and the same one converted here have one hash."""

EDITOR_INPUTS_OF = {
    "Preview3D": frozenset({"image"}),
    "Preview3DAnimation": frozenset({"image"}),
    "PreviewAny": frozenset({"preview", "previewMode", "preview_markdown", "preview_mode", "preview_text"}),
    "SaveGLB": frozenset({"image"}),
}
"""The same, of these classes alone."""

_NONE: frozenset[str] = frozenset()
_NUMBERING = "_0123456789"
_encode = msgspec.json.Encoder(order="sorted").encode


def hash_workflow(workflow: Workflow | Mapping[str, Any]) -> WorkflowHash:
    """The structural hash: classes, wires, input names and named resources count, and nothing else.

    Raises `InvalidWorkflow` for a raw graph that is none.
    """
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
    """The hash of the whole as submitted: every value and node id counts. Only `_meta`, which holds titles, does not.

    Raises `InvalidWorkflow` for a raw graph that is none.
    """
    if not isinstance(workflow, Workflow):
        workflow = parse_workflow(workflow)
    graph: dict[str, Any] = {}
    for node_id, node in workflow.nodes.items():
        graph[node_id] = content = dict(node.content)
        content.pop("_meta", None)
    return sha256(b"comfyfleet-exact/%d\n" % EXACT_HASH_VERSION + canonical_json(graph)).hexdigest()


def names_model_file(name: str, text: str) -> bool:
    """Whether the text of this input is the name of a model file, by its extension."""
    end = text[-_LONGEST_EXTENSION:]
    return (
        "." in end
        and end.lower().endswith(MODEL_EXTENSIONS)
        and name.rstrip(_NUMBERING) not in PROSE_INPUTS
        and "\n" not in text
    )


def names_resource(name: str, text: str) -> bool:
    """Whether the text of this input names a model or another resource, and so belongs to the structure."""
    if name.rstrip(_NUMBERING) in RESOURCE_INPUTS:
        return bool(text) and "\n" not in text
    return names_model_file(name, text)


def texts_within(value: Any) -> Iterator[str]:
    """Every string inside a literal value, in canonical order; keys of objects are not values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from texts_within(item)
    elif isinstance(value, dict):
        for key in sorted(value):
            yield from texts_within(value[key])


def label(node: Node) -> bytes:
    """A node without its neighbours, as canonical JSON. A plain encoder will do: there are no fractions in it."""
    described: dict[str, Any] = {}
    links = node.links
    left_out = EDITOR_INPUTS_OF.get(node.class_type, _NONE)
    for name, value in node.inputs.items():
        if (name in EDITOR_INPUTS or name in left_out) and name not in links:
            continue
        kind = type(value)
        described[name] = None
        if kind is str:
            # Most strings are settled here, without a call: this loop is the dearest part of the hash.
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
    """Each node's colour and, in the order of its inputs' names, the new colours of its sources."""
    refined: list[bytes] = []
    for colour, wired in zip(colours, sources, strict=True):
        if len(wired) == 1:
            colour += refined[wired[0]]
        elif wired:
            colour += b"".join([refined[source] for source in wired])
        refined.append(sha256(colour).digest())
    return refined


def _pass_against(colours: list[bytes], sources: list[list[int]]) -> list[bytes]:
    """Each node's colour and, sorted, the new colour of every consumer with the number of the wire there."""
    taken: list[list[bytes]] = [[] for _ in colours]
    refined = list(colours)
    for index in range(len(colours) - 1, -1, -1):
        entries = taken[index]
        entries.sort()
        refined[index] = colour = sha256(colours[index] + b"".join(entries)).digest()
        # The number of the wire stands for its name and slot: the consumer's colour knows both.
        for number, source in enumerate(sources[index]):
            taken[source].append(colour + number.to_bytes(4, "big"))
    return refined
