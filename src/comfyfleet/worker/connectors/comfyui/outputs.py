"""What came of a run: a server's history entry, read into a result or a failure.

Pure. Every kind of output is kept as the node reported it; those that name files become `OutputFile`s as well, under
whatever key they came.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import urlencode

from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import JobResult, NodeTiming, OutputFile
from comfyfleet.worker.connectors.comfyui import failures

MAX_FILES = 20_000
"""Of one run: each takes a little time and memory here, and a server may name millions."""


def files_of(node_id: str, output: Mapping[str, Any], base: str) -> Iterator[OutputFile]:
    """The files among what one node reported; entries that are no file records are passed over."""
    for kind, items in output.items():
        for item in items if isinstance(items, list) else ():
            if not isinstance(item, Mapping) or not isinstance(item.get("filename"), str):
                continue
            filename = item["filename"]
            subfolder = str(item.get("subfolder") or "")
            folder = str(item.get("type") or "output")
            query = urlencode({"filename": filename, "subfolder": subfolder, "type": folder})
            yield OutputFile(node_id, kind, filename, subfolder, folder, f"{base}/view?{query}")


def is_included(node_id: str, display_node: str | None, included: Collection[str]) -> bool:
    """Whether the caller wants this node's output; a node made by an expansion counts as the one it came from."""
    return not included or node_id in included or (display_node or node_id.split(".", 1)[0]) in included


def build_result(
    outputs: Mapping[str, Any],
    base: str,
    *,
    included: Collection[str] = (),
    display_nodes: Mapping[str, str] | None = None,
    timings: tuple[NodeTiming, ...] = (),
    cached_nodes: tuple[str, ...] = (),
) -> JobResult | Failure:
    shown = display_nodes or {}
    kept = {
        node_id: dict(output)
        for node_id, output in outputs.items()
        if isinstance(output, Mapping) and is_included(node_id, shown.get(node_id), included)
    }
    named = (file for node_id, output in kept.items() for file in files_of(node_id, output, base))
    files = tuple(islice(named, MAX_FILES + 1))
    if len(files) > MAX_FILES:
        return Failure(
            FailureKind.NODE_ERROR, f"The run left more than {MAX_FILES} files, which are not fetched."
        )
    return JobResult(kept, files, timings, cached_nodes)


def read_entry(
    entry: Mapping[str, Any],
    base: str,
    *,
    included: Collection[str] = (),
    timings: tuple[NodeTiming, ...] = (),
    vram_gb: float | None = None,
) -> JobResult | Failure:
    """History decides: the result of a completed run, or why it did not complete."""
    status = entry.get("status")
    status = status if isinstance(status, Mapping) else {}
    messages = list(_messages(status))
    if status and status.get("status_str") != "success":
        return _failure(messages, vram_gb)
    outputs = entry.get("outputs")
    meta = entry.get("meta")
    return build_result(
        outputs if isinstance(outputs, Mapping) else {},
        base,
        included=included,
        display_nodes=_display_nodes(meta) if isinstance(meta, Mapping) else None,
        timings=timings,
        cached_nodes=_cached(messages),
    )


def _failure(messages: list[tuple[str, Mapping[str, Any]]], vram_gb: float | None) -> Failure:
    for kind, data in reversed(messages):
        if kind == "execution_error" and failures.is_end(data):
            return failures.execution_error(data, vram_gb)
        if kind == "execution_interrupted":
            return failures.interrupted(data)
    return Failure(FailureKind.UNKNOWN, "The server's history says that the run failed and does not say why.")


def _messages(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    messages = status.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, list) and len(message) == 2 and isinstance(message[1], Mapping):
            yield str(message[0]), message[1]


def _cached(messages: list[tuple[str, Mapping[str, Any]]]) -> tuple[str, ...]:
    for kind, data in messages:
        nodes = data.get("nodes")
        if kind == "execution_cached" and isinstance(nodes, list):
            return tuple(map(str, nodes))
    return ()


def _display_nodes(meta: Mapping[str, Any]) -> dict[str, str]:
    return {
        node_id: content["display_node"]
        for node_id, content in meta.items()
        if isinstance(content, Mapping) and isinstance(content.get("display_node"), str)
    }
