"""Workflows: read one from a file, find what it needs, change a copy.

`workflow_graph.py` checks graphs, `workflow_hash.py` computes the hashes, and `file_metadata.py` reads media files.
Policy decides whether a worker has what a workflow needs.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Container, Mapping
from typing import Any, BinaryIO

import msgspec

from comfyfleet.model.file_metadata import MAX_TEXT_BYTES, BadFile, kind_of, texts_in
from comfyfleet.model.workflow_graph import (
    EXPORT,
    MAX_CHAIN,
    InvalidWorkflow,
    Node,
    Workflow,
    decode_workflow,
    node_error,
    parse_workflow,
)
from comfyfleet.model.workflow_hash import names_model_file, texts_within

SEED_INPUTS = ("seed", "noise_seed")
FILE_INPUTS = frozenset({"image", "mask", "audio", "video", "file", "latent", "model_file"})
"""Inputs of loader nodes that name a file in the server's input folder."""
MAX_FILE_NAME = 4_096
"""No file system has longer paths, so a longer text is not a file name."""


class GraphNeeds(msgspec.Struct, frozen=True):
    """What a graph needs. Models and files have the graph's names, with '/' between folders."""

    node_classes: frozenset[str]
    models: frozenset[str]
    """Files with a model extension. Names without one ('taesd', 'None', a repository) are not files."""
    input_files: frozenset[str]
    """Files that loader nodes read. The worker need not have them, but somebody must upload them."""
    last_classes: frozenset[str] = frozenset()
    """The classes of nodes that feed no other node."""


def read_needs(workflow: Workflow | Mapping[str, Any], not_outputs: Container[str] = ()) -> GraphNeeds:
    """The classes, model files and input files that a graph names.

    `not_outputs`: classes that are not output nodes. A server runs only what an output node depends on, so it does not
    need files of other nodes. But it refuses a graph with an unknown class anywhere.
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
    # Without an output node nothing would run, and the server reports that.
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
                # The name may end with its folder. The default is the input folder.
                files.add(text.removesuffix(" [input]").replace("\\", "/"))
    return models, files


def loaders_and_samplers(graph: Mapping[str, Any]) -> tuple[dict[str, frozenset[str]], frozenset[str]]:
    """By node, the model files that it names; and the nodes that sample. Of a graph that was checked before."""
    loaders: dict[str, frozenset[str]] = {}
    samplers: set[str] = set()
    for node_id, node in graph.items():
        inputs = (msgspec.json.decode(node) if isinstance(node, msgspec.Raw) else node).get("inputs") or {}
        if "latent_image" in inputs:
            samplers.add(node_id)
        models = {
            text.replace("\\", "/")
            for name, value in inputs.items()
            for text in texts_within(value)
            if len(text) <= MAX_FILE_NAME and names_model_file(name, text)
        }
        if models:
            loaders[node_id] = frozenset(models)
    return loaders, frozenset(samplers)


def asks_for_seed(node: Node) -> bool:
    """Whether one of its seeds is -1, which asks for a random one."""
    return any(_asks_for_chance(node.inputs.get(name)) for name in SEED_INPUTS)


def with_input(workflow: Workflow | Mapping[str, Any], node: str, input_name: str, value: Any) -> Workflow:
    """A copy in which one input has another value or link. The copy is checked again."""
    workflow = _parsed(workflow)
    if node not in workflow.nodes:
        raise InvalidWorkflow(
            f"The workflow has no node {node!r}, so its input {input_name!r} cannot be set."
        )
    graph = workflow.to_graph()
    graph[node]["inputs"][input_name] = value
    # The caller chose the limits when the graph was parsed. A changed input adds no node.
    return parse_workflow(graph, max_nodes=len(graph), max_chain=max(MAX_CHAIN, len(graph)))


def with_seeds(workflow: Workflow | Mapping[str, Any], seeds: Mapping[str, int]) -> Workflow:
    """A copy in which every seed of -1 is replaced by the seed that was drawn for its node."""
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
    """A copy in which every literal `filename_prefix` is inside the folder `prefix`. Links do not change.

    Raises `InvalidWorkflow` if a name leads out of its folder, to files of other jobs.
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
    """Replace literals only. The links stay, so the graph needs no new check."""
    nodes = dict(workflow.nodes)
    for node_id, values in changes.items():
        node = nodes[node_id]
        inputs = {**node.inputs, **values}
        nodes[node_id] = Node(node.class_type, inputs, node.links, {**node.content, "inputs": inputs})
    return Workflow(nodes, workflow.order)


MAX_JSON_BYTES = 256 * 1024 * 1024
"""The maximum size of a JSON file. A hub accepts less."""
MAX_VALUES = 2_000_000
"""A decoded value takes at least a hundred bytes, however short its text is."""
_MAX_AROUND = 8
"""The maximum number of objects around a workflow."""
_HEAD = 64
_OWN_FOLDER = re.compile(r"\A(comfyfleet/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/)+")


def read_workflow_file(file: BinaryIO, shown: str) -> dict[str, Any]:
    """Read a workflow in editor or API format. Raises `InvalidWorkflow`.

    `file` need not be seekable. `shown` is its name in errors.
    """
    if not file.seekable():
        file = io.BytesIO(file.read(MAX_JSON_BYTES + 1))
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if not size:
        raise InvalidWorkflow(f"{shown} is empty: export the workflow again.")
    head = file.read(_HEAD)
    file.seek(0)
    kind = kind_of(head)
    if kind is None:
        if size > MAX_JSON_BYTES:
            raise InvalidWorkflow(f"{shown} has more than {MAX_JSON_BYTES} bytes, which is too large.")
        return _from_json(file.read(), head, shown)
    try:
        texts = texts_in(file, kind)
    except BadFile as error:
        raise InvalidWorkflow(f"{shown} cannot be read as a {kind.value} file: {error}.") from error
    return _from_texts(texts, shown)


def read_payload_file(file: BinaryIO, shown: str) -> dict[str, Any]:
    """Read the payload of another service than ComfyUI: a JSON object. Raises `InvalidWorkflow`."""
    content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES or _values_in(content) > MAX_VALUES:
        raise InvalidWorkflow(f"{shown} is too large for a payload: send large parts as files of the hub.")
    try:
        found = decode_workflow(content)
    except InvalidWorkflow as error:
        raise InvalidWorkflow(f"{shown}: {error.message.replace('workflow', 'payload', 1)}") from error
    if not isinstance(found, dict):
        raise InvalidWorkflow(f"{shown} contains no payload: its top level is not an object.")
    return found


def workflow_in(found: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow in `{"workflow": …}`, in `{"prompt": …}` (a request to ComfyUI), or the object itself. The prompt
    has precedence, because servers run it unchanged."""
    for _ in range(_MAX_AROUND):
        if isinstance(found.get("nodes"), list) or any(_is_node(each) for each in found.values()):
            break
        inner = next(filter(None, (_inside(found.get(name)) for name in ("prompt", "workflow"))), None)
        if inner is None:
            break
        found = inner
    return dict(found)


def _inside(given: Any) -> Mapping[str, Any] | None:
    inner = _decoded(given) if isinstance(given, str) else given
    return inner if isinstance(inner, Mapping) else None


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_type" in value


def _from_json(content: bytes, head: bytes, shown: str) -> dict[str, Any]:
    if not content.strip():
        raise InvalidWorkflow(f"{shown} is empty: export the workflow again.")
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        content = content.decode("utf-16", "replace").encode()
    start = content.removeprefix(codecs.BOM_UTF8).lstrip()[:_HEAD]
    if start[:1] not in b'{["' and start.strip() not in (b"null", b"true", b"false"):
        raise InvalidWorkflow(
            f"{shown} contains no workflow: it is {_what(start, head)}. Pass a JSON file of ComfyUI, or a picture that "
            "ComfyUI saved."
        )
    if _values_in(content) > MAX_VALUES:
        raise InvalidWorkflow(f"{shown} has more than {MAX_VALUES} values, which is too many.")
    try:
        found = decode_workflow(content)
    except InvalidWorkflow as error:
        if isinstance(error.__cause__, UnicodeDecodeError):
            raise InvalidWorkflow(f"{shown} is text, but not UTF-8: save it as UTF-8.") from error
        raise InvalidWorkflow(f"{shown}: {error}") from error
    if not isinstance(found, dict):
        what = "a list" if isinstance(found, list) else "a single value"
        raise InvalidWorkflow(
            f"{shown} contains no workflow: its top level is {what}, not an object. Pass a file saved with {EXPORT}."
        )
    return workflow_in(found)


def _what(start: bytes, head: bytes) -> str:
    if start[:15].lower().startswith((b"<!doctype html", b"<html")):
        return "a web page (did you save the page instead of the file?)"
    if head.startswith(b"PK\x03\x04"):
        return "a ZIP archive"
    if head.startswith(b"GIF8"):
        return "a GIF picture, in which ComfyUI saves no workflow"
    if b"\x00" in head:
        return "a binary file of another kind"
    return "text that is not JSON"


def _from_texts(texts: Mapping[str, str], shown: str) -> dict[str, Any]:
    """The prompt first, because the server ran it. A video may have both in one comment."""
    for name in ("prompt", "workflow", "comment"):
        text = texts.get(name)
        if text is None:
            continue
        found = _decoded(text)
        if isinstance(found, dict) and found:
            inner = workflow_in(found)
            if isinstance(inner.get("nodes"), list) or any(_is_node(each) for each in inner.values()):
                return _without_own_folders(inner)
        if name != "comment":
            raise InvalidWorkflow(
                f"{shown} carries a {name} that is not a workflow: the text is truncated or changed."
            )
    # Names in a file can contain anything.
    names = ", ".join(name if name.isprintable() else repr(name) for name in sorted(texts)[:5])
    why = (
        f"its metadata has {names}, but neither prompt nor workflow"
        if texts
        else "it was saved without metadata"
    )
    if "parameters" in texts:
        why = "another program saved it, with parameters only"
    raise InvalidWorkflow(
        f"{shown} carries no workflow: {why}. Pass the file as ComfyUI saved it, or a JSON file saved with {EXPORT}."
    )


def _without_own_folders(workflow: dict[str, Any]) -> dict[str, Any]:
    """Remove the folder that an earlier run through this package added to the prompt. Otherwise folders would nest."""
    for node in workflow.values():
        inputs = node.get("inputs") if isinstance(node, dict) else None
        prefix = inputs.get("filename_prefix") if isinstance(inputs, dict) else None
        if isinstance(inputs, dict) and isinstance(prefix, str):
            inputs["filename_prefix"] = _OWN_FOLDER.sub("", prefix)
    return workflow


def _decoded(text: str) -> Any:
    """ComfyUI writes NaN, which is not JSON, for changed inputs. Nothing that runs depends on it."""
    if len(text) > MAX_TEXT_BYTES or _values_in(text.encode("utf-8", "surrogatepass")) > MAX_VALUES:
        return None
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def _values_in(text: bytes) -> int:
    """An upper bound: commas in prompts count too."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")
