"""Reads a server's history entry into a result or a failure, and collects pictures that were only sent.

Outputs stay as their nodes reported them; records that name files also become `OutputFile`s.
`SaveImageWebsocket` sends its pictures once and saves none: they are held until the run ends and then
uploaded to the server's output folder like other outputs. Pictures that were sent on a lost connection are
missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import urlencode

import msgspec

from comfyfleet.model.failure import Failure, FailureKind, ServiceFailed
from comfyfleet.model.job import JobResult, NodeTiming, OutputFile
from comfyfleet.worker.connectors.comfyui import failures
from comfyfleet.worker.connectors.comfyui.api import ComfyApi, UploadedImage
from comfyfleet.worker.connectors.comfyui.settings import ComfyUISettings
from comfyfleet.worker.connectors.comfyui.submission import upload_with_retries

MAX_FILES = 20_000
"""Bounds the files of one run: a server may name millions."""


def files_of(node_id: str, output: Mapping[str, Any], base: str) -> Iterator[OutputFile]:
    """The files in one node's output; other entries are skipped."""
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
    """Whether the caller wants this node's output. A node from an expansion counts as its origin."""
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
            FailureKind.NODE_ERROR, f"The run produced more than {MAX_FILES} files; they are not fetched."
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
    return Failure(FailureKind.UNKNOWN, "The run failed, and the server's history does not say why.")


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


SENDING_CLASS = "SaveImageWebsocket"
_ENDINGS = {"image/jpeg": "jpg", "image/webp": "webp"}
_UNSAFE = re.compile(r"[^A-Za-z0-9.-]")


class SentPictures:
    """The pictures of one run, in the order in which they came. Connections are known by their numbers."""

    def __init__(self, graph: Mapping[str, Any], included: Collection[str], max_bytes: int) -> None:
        """`max_bytes` bounds all pictures together."""
        self._senders = frozenset(
            node
            for node, content in graph.items()
            if isinstance(content, Mapping) and content.get("class_type") == SENDING_CLASS
        )
        self._wanted = frozenset(node for node in self._senders if is_included(node, None, included))
        self._max_bytes = max_bytes
        self._room = max_bytes
        self._count = 0
        self._begun: dict[str, int] = {}
        self._submitted_on: int | None = None
        self._ended_on: int | None = None
        self._pictures: dict[str, list[tuple[str, bytes]]] = {}

    @property
    def are_wanted(self) -> bool:
        """Whether the caller wants any such pictures."""
        return bool(self._wanted)

    @property
    def by_node(self) -> Mapping[str, list[tuple[str, bytes]]]:
        return self._pictures

    def submitted(self, connection: int | None) -> None:
        self._submitted_on = connection

    def begins(self, node: str, connection: int) -> None:
        self._begun.setdefault(node, connection)

    def ended(self, connection: int) -> None:
        self._ended_on = connection

    def on_picture(self, node: str | None, kind: str, image: bytes | None) -> bool:
        """Whether it is an output of such a node, and not a preview."""
        if node is None or node not in self._senders:
            return False
        if node in self._wanted and image is not None:
            self._room -= len(image)
            self._count += 1
            if self._room >= 0 and self._count <= MAX_FILES:
                self._pictures.setdefault(node, []).append((kind, image))
        return True

    def may_be_complete(self, connection: int) -> bool:
        """Whether all wanted pictures were sent on this connection, or will be."""
        return all(self._begun.get(node, self._submitted_on) == connection for node in self._wanted)

    def failure(self) -> Failure | None:
        """Why pictures are missing, if any are."""
        if self._room < 0:
            return Failure(
                FailureKind.NODE_ERROR,
                f"{SENDING_CLASS} sent more than {self._max_bytes} bytes of pictures, which is the limit. "
                "Let the workflow save them (SaveImage), or raise max_message_bytes.",
            )
        if self._count > MAX_FILES:
            return Failure(
                FailureKind.NODE_ERROR,
                f"{SENDING_CLASS} sent more than {MAX_FILES} pictures, which is the limit.",
            )
        for node in sorted(self._wanted):
            if self._ended_on is None or self._begun.get(node, self._submitted_on) != self._ended_on:
                return Failure(
                    FailureKind.TRANSIENT,
                    f"The pictures of node {node} ({SENDING_CLASS}) were sent while the WebSocket to the server was "
                    "lost, and the server did not save them. The job must run again; SaveImage avoids this.",
                    node_id=node,
                )
        return None


async def with_pictures(
    result: JobResult, sent: SentPictures, api: ComfyApi, settings: ComfyUISettings, folder: str
) -> JobResult:
    """Uploads the sent pictures to this output folder and adds them to the result. Raises `ServiceFailed`."""
    if (failure := sent.failure()) is not None:
        raise ServiceFailed(failure)
    numbers: dict[str, int] = {}
    outputs, files = dict(result.outputs), list(result.files)
    for node, pictures in sent.by_node.items():
        stem = f"websocket_{_UNSAFE.sub('_', node)}"
        records = []
        for kind, image in pictures:
            numbers[stem] = number = numbers.get(stem, 0) + 1
            name = f"{stem}_{number:05}_.{_ENDINGS.get(kind, 'png')}"
            await upload_with_retries(api, settings, UploadedImage(name, image, folder, place="output"))
            records.append({"filename": name, "subfolder": folder, "type": "output"})
        output = {"images": records}
        outputs[node] = {**outputs.get(node, {}), **output}
        files += files_of(node, output, api.address.base)
    return msgspec.structs.replace(result, outputs=outputs, files=tuple(files))
