"""Workflows in files: JSON of any usual shape, and the pictures, sounds and videos in which ComfyUI leaves a workflow.

Owns the shapes and what is said of a file that holds no workflow. How each kind of file is read is
`file_metadata.py`'s; whether a graph is sound is `workflow_graph.py`'s.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Mapping
from typing import Any, BinaryIO

from comfyfleet.model.file_metadata import MAX_TEXT_BYTES, BadFile, kind_of, texts_in
from comfyfleet.model.workflow_graph import InvalidWorkflow, decode_workflow

MAX_JSON_BYTES = 256 * 1024 * 1024
"""No file of JSON is read beyond this; a hub takes less."""
MAX_VALUES = 2_000_000
"""Decoded, a value takes a hundred bytes and more, however short its text."""
_MAX_AROUND = 8
"""Objects around a workflow; a file may have as many as it likes."""
_HEAD = 64
_OWN_FOLDER = re.compile(r"\A(comfyfleet/[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/)+")


def read_workflow_file(file: BinaryIO, shown: str) -> dict[str, Any]:
    """The workflow in a file, as the editor saves it or as servers run it. Raises `InvalidWorkflow` in words.

    `file` need not be seekable. `shown` is what it is called in an error.
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
            raise InvalidWorkflow(f"{shown} has more than {MAX_JSON_BYTES} bytes: no workflow has.")
        return _from_json(file.read(), head, shown)
    try:
        texts = texts_in(file, kind)
    except BadFile as error:
        raise InvalidWorkflow(f"{shown} cannot be read as a {kind.value} file: {error}.") from error
    return _from_texts(texts, shown)


def workflow_in(found: Mapping[str, Any]) -> dict[str, Any]:
    """The workflow in an object that holds one: `{"workflow": …}`, `{"prompt": …}` (as ComfyUI is sent it), or the
    workflow itself. Where it has both, the prompt: servers run that as it is."""
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
    if start[:1] not in b'{["':
        raise InvalidWorkflow(
            f"{shown} holds no workflow: it is {_what(start, head)}. A workflow is a JSON file of ComfyUI, or a "
            "picture that ComfyUI saved."
        )
    if _values_in(content) > MAX_VALUES:
        raise InvalidWorkflow(f"{shown} has more than {MAX_VALUES} values: no workflow has.")
    try:
        found = decode_workflow(content)
    except InvalidWorkflow as error:
        if isinstance(error.__cause__, UnicodeDecodeError):
            raise InvalidWorkflow(f"{shown} is text, but not UTF-8: save it as UTF-8.") from error
        raise InvalidWorkflow(f"{shown}: {error}") from error
    if not isinstance(found, dict):
        what = "a list" if isinstance(found, list) else "a single value"
        raise InvalidWorkflow(f"{shown} holds no workflow: its top level is {what}, and not an object.")
    return workflow_in(found)


def _what(start: bytes, head: bytes) -> str:
    if start[:15].lower().startswith((b"<!doctype html", b"<html")):
        return "a web page (was the page saved in place of the file?)"
    if head.startswith(b"PK\x03\x04"):
        return "a ZIP archive"
    if head.startswith(b"GIF8"):
        return "a GIF picture, in which ComfyUI keeps no workflow"
    if b"\x00" in head:
        return "a binary file of another kind"
    return "text that is not JSON"


def _from_texts(texts: Mapping[str, str], shown: str) -> dict[str, Any]:
    """The prompt first: it is what the server ran. In a video both may stand in one comment."""
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
                f"{shown} carries a {name} that is no workflow: the text is cut off, or changed."
            )
    if not texts:
        raise InvalidWorkflow(f"{shown} carries no workflow: it was saved without metadata.")
    if "parameters" in texts:
        raise InvalidWorkflow(
            f"{shown} carries no workflow: its metadata is of another program, which saves parameters alone."
        )
    # A file has whatever names it likes.
    names = ", ".join(name if name.isprintable() else repr(name) for name in sorted(texts)[:5])
    raise InvalidWorkflow(
        f"{shown} carries no workflow: its metadata has {names}, and neither prompt nor workflow."
    )


def _without_own_folders(workflow: dict[str, Any]) -> dict[str, Any]:
    """A run through this package saves into a folder of its own, which is part of the prompt in the picture. The next
    run gets another one, not one inside that."""
    for node in workflow.values():
        inputs = node.get("inputs") if isinstance(node, dict) else None
        prefix = inputs.get("filename_prefix") if isinstance(inputs, dict) else None
        if isinstance(inputs, dict) and isinstance(prefix, str):
            inputs["filename_prefix"] = _OWN_FOLDER.sub("", prefix)
    return workflow


def _decoded(text: str) -> Any:
    """ComfyUI writes NaN, which is no JSON, beside inputs that changed; nothing that runs depends on it."""
    if len(text) > MAX_TEXT_BYTES or _values_in(text.encode("utf-8", "surrogatepass")) > MAX_VALUES:
        return None
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def _values_in(text: bytes) -> int:
    """At least as many as there are: commas in prompts count too."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")
