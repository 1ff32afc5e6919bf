"""The events of one run: reads the stream's text, and remembers what the events say.

It knows no connection. A replay repeats events, so everything is remembered by component or path.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.model.failure import Failure
from comfyfleet.model.job import OutputFile
from comfyfleet.worker.connectors.langflow import failures
from comfyfleet.worker.connectors.langflow.api import AnswerTooLarge, decode_object

MAX_FILES = 20_000
"""Bounds the files of one run: a server may name millions."""
MAX_VERTICES = 100_000

_END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_STORED = re.compile(
    r"(?:^|/)([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})/([^/\\\x00-\x1f]{1,500})$"
)
"""A file in LangFlow's storage, relative or with the server's folder before it: of a flow or of a user."""
_ENDS = frozenset({"cancelled", "timed_out", "worker_lost"})


class StreamEvent(NamedTuple):
    event_id: str | None
    content: dict[str, Any]


class EventReader:
    """Cuts a stream into events. Blocks without `data:` are whole JSON objects, as `/api/v1/run` sends them."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` bounds the whole stream."""
        self._rest = bytearray()
        self._left = max_bytes
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> Iterator[StreamEvent]:
        """Raises `AnswerTooLarge`."""
        self._left -= len(chunk)
        if self._left < 0:
            raise AnswerTooLarge(f"its events have more than {self._max_bytes} bytes")
        # An end can lie across two chunks, so a few bytes are searched twice.
        begin = max(0, len(self._rest) - 3)
        self._rest += chunk
        parts, at = [], 0
        for end in _END_OF_EVENT.finditer(self._rest, begin):
            parts.append(bytes(self._rest[at : end.start()]))
            at = end.end()
        del self._rest[:at]
        for part in parts:
            if (event := _read_block(part)) is not None:
                yield event

    def finish(self) -> Iterator[StreamEvent]:
        """The last event, if the stream ended without an empty line."""
        rest, self._rest = self._rest, bytearray()
        if (event := _read_block(bytes(rest))) is not None:
            yield event


def _read_block(block: bytes) -> StreamEvent | None:
    data: list[bytes] = []
    event_id = None
    for line in block.splitlines():
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"id:"):
            event_id = line[3:].strip().decode("utf-8", "replace")
    content = decode_object(b"\n".join(data) if data else block)
    return None if content is None else StreamEvent(event_id, content)


class RunEvents:
    """What the events of a run have said so far."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        self.has_started = False
        self.has_ended = False
        self.outputs: dict[str, dict[str, Any]] = {}
        """Of components, from `output` events."""
        self.failure: Failure | None = None
        self.invalid: Failure | None = None
        """A component that could not be built. LangFlow reports such a run as completed."""
        self.result: Mapping[str, Any] | None = None
        """The result that ends a stream of `/api/v1/run`."""
        self.files: dict[str, OutputFile] = {}
        self.component: str | None = None
        """The component of the last event that names one."""
        self._to_run: frozenset[str] = frozenset()
        self._done: set[str] = set()

    @property
    def progress(self) -> tuple[int, int]:
        """Finished components, and how many will run."""
        return len(self._done & self._to_run), len(self._to_run)

    @property
    def ran_nothing(self) -> bool:
        """It has ended and had no component to run."""
        return self.has_ended and self.has_started and not self._to_run

    def take(self, event: StreamEvent) -> str:
        """Remembers the event and returns its kind."""
        if event.event_id:
            self.last_id = event.event_id
        content = event.content
        kind = content.get("event") or content.get("type")
        kind = kind if isinstance(kind, str) else ""
        data = content.get("data")
        data = data if isinstance(data, Mapping) else {}
        match kind:
            case "vertices_sorted":
                self.has_started = True
                named = data.get("to_run")
                named = named[:MAX_VERTICES] if isinstance(named, list) else []
                self._to_run = frozenset(each for each in named if isinstance(each, str))
            case "end_vertex":
                self._end_vertex(data.get("build_data"))
            case "add_message":
                self.collect_files(data, None)
            case "output":
                component = data.get("component_id")
                if isinstance(component, str) and len(self.outputs) < MAX_VERTICES:
                    self.outputs[component] = {
                        name: each for name, each in data.items() if name != "component_id"
                    }
            case "log" | "build_start":
                self.has_started = True
                if isinstance(component := data.get("component_id"), str):
                    self.component = component
            case "error":
                # The message that names the component comes before the one that ends a `/api/v1/run`.
                if self.failure is None or self.failure.node_id is None:
                    self.failure = failures.run_error(data)
            case "end":
                self.has_ended = True
                if isinstance(result := data.get("result"), Mapping):
                    self.result = result
            case _ if kind in _ENDS:
                self.has_ended = True
        return kind

    def _end_vertex(self, build: Any) -> None:
        if not isinstance(build, Mapping) or not isinstance(vertex := build.get("id"), str):
            return
        self.component = vertex
        if len(self._done) < MAX_VERTICES:
            self._done.add(vertex)
        if build.get("valid") is False:
            self.invalid = self.invalid or failures.invalid_vertex(vertex, build)
            return
        data = build.get("data")
        results = data.get("results") if isinstance(data, Mapping) else None
        for message in results.values() if isinstance(results, Mapping) else ():
            if isinstance(message, Mapping):
                self.collect_files(message, vertex)

    def collect_files(self, message: Mapping[str, Any], vertex: str | None) -> None:
        """`vertex`: the component that returned it. None: the message may say who made it."""
        inner = message.get("data")
        inner = inner if isinstance(inner, Mapping) else message
        named = inner.get("files")
        if not isinstance(named, list) or not named or inner.get("sender") == "User":
            return
        properties = inner.get("properties")
        source = properties.get("source") if isinstance(properties, Mapping) else None
        component = vertex or (source.get("id") if isinstance(source, Mapping) else None) or ""
        for each in named[:MAX_FILES]:
            path = each.get("path") if isinstance(each, Mapping) else each
            if (file := stored_file(path, str(component))) is None:
                continue
            key = f"{file.subfolder}/{file.filename}"
            if (vertex is not None or key not in self.files) and len(self.files) < MAX_FILES:
                self.files[key] = file


def stored_file(path: Any, component: str) -> OutputFile | None:
    """The file in LangFlow's storage. None for another path, which no route serves."""
    found = _STORED.search(path) if isinstance(path, str) else None
    if found is None or found[2] in (".", ".."):
        return None
    return OutputFile(component, "files", found[2], found[1], "langflow")
