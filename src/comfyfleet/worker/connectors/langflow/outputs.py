"""Reads the result of a run: texts and data by component, and the files that its messages name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from comfyfleet.model.job import JobResult, OutputFile
from comfyfleet.worker.connectors.langflow.events import RunEvents
from comfyfleet.worker.connectors.langflow.payload import FlowCall


def read_result(
    body: Mapping[str, Any], events: RunEvents, call: FlowCall, included: tuple[str, ...], base: str
) -> JobResult:
    """From the status of a completed job."""
    found = body.get("outputs")
    outputs = {
        name: dict(each)
        for name, each in (found.items() if isinstance(found, Mapping) else ())
        if isinstance(each, Mapping)
    }
    return _selected({**events.outputs, **outputs}, events, call, included, base)


def read_streamed(
    result: Mapping[str, Any], events: RunEvents, call: FlowCall, included: tuple[str, ...], base: str
) -> JobResult:
    """From the `end` of `/api/v1/run`, in the form of a job's outputs."""
    outputs: dict[str, dict[str, Any]] = {}
    for run in _list(result.get("outputs")):
        for each in _list(run.get("outputs") if isinstance(run, Mapping) else None):
            if not isinstance(each, Mapping) or not isinstance(name := each.get("component_id"), str):
                continue
            artifacts, results = each.get("artifacts"), each.get("results")
            artifacts = artifacts if isinstance(artifacts, Mapping) else {}
            for message in results.values() if isinstance(results, Mapping) else ():
                if isinstance(message, Mapping):
                    events.collect_files(message, name)
            outputs[name] = {
                "type": "message" if isinstance(artifacts.get("message"), str) else "data",
                "status": "completed",
                "display_name": each.get("component_display_name"),
                "content": artifacts["message"] if isinstance(artifacts.get("message"), str) else results,
                "metadata": {"component_type": name.rpartition("-")[0] or name},
            }
    return _selected(outputs, events, call, included, base)


def _selected(
    outputs: dict[str, dict[str, Any]],
    events: RunEvents,
    call: FlowCall,
    included: tuple[str, ...],
    base: str,
) -> JobResult:
    wanted = frozenset(call.output_ids) or frozenset(included)
    if call.output_ids and included:
        wanted &= frozenset(included)
    is_limited = bool(call.output_ids or included)
    kept = {
        name: output
        for name, output in outputs.items()
        if (not is_limited or name in wanted) and _is_of_type(output, call.output_type)
    }
    files = tuple(
        msgspec.structs.replace(file, url=f"{base}{download_path(file)}")
        for file in events.files.values()
        if not is_limited or file.node_id in wanted
    )
    return JobResult(kept, files)


def download_path(file: OutputFile) -> str:
    return f"/api/v1/files/download/{quote(file.subfolder, safe='')}/{quote(file.filename, safe='')}"


def _is_of_type(output: Mapping[str, Any], wanted: str | None) -> bool:
    if wanted not in ("chat", "text"):
        return True
    metadata = output.get("metadata")
    kind = metadata.get("component_type") if isinstance(metadata, Mapping) else None
    return not isinstance(kind, str) or wanted in kind.lower()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
