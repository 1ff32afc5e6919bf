"""Classifies LangFlow's errors. The server's own words stay as they are.

The tables are tested against recorded traffic of a real server. `policy` decides what follows from a kind of failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from comfyfleet.model.failure import Failure, FailureKind, ServiceBusy, ServiceFailed
from comfyfleet.worker.connectors.comfyui.failures import OUT_OF_MEMORY_TYPES, OUT_OF_MEMORY_WORDS

MAX_WORDS = 2_000
_MAX_TRACEBACK_LINES = 60
_MAX_DEPTH = 8

_REASON = re.compile(r"\*\*([A-Za-z_][\w.]{0,200})\*\*")
_COMPONENT = re.compile(r"Error building Component ([^:]{1,200}): ?\s*(.*)", re.DOTALL)

KEY_REFUSED = (
    "LangFlow refuses the API key (status {status}). Create one in LangFlow under Settings, API Keys, and set `key` "
    "or `key_file` in [connectors.langflow] of this worker."
)


class KeyRefused(ServiceBusy):
    """The worker has a wrong key, which is not the job's fault: the job is released."""

    def __init__(self, status: int) -> None:
        super().__init__(Failure(FailureKind.TRANSIENT, KEY_REFUSED.format(status=status)))


def fail(kind: FailureKind, message: str) -> ServiceFailed:
    return ServiceFailed(Failure(kind, message))


def interrupted(message: str) -> ServiceFailed:
    return fail(FailureKind.INTERRUPTED, message)


def missing_flow(flow: str) -> ServiceFailed:
    return ServiceFailed(
        Failure(
            FailureKind.MISSING_MODEL,
            f"LangFlow has no flow {flow!r} for this worker's key. Create it there, or submit the id, endpoint name "
            "or name of a flow that it has.",
            missing=(flow,),
        )
    )


def refused_request(status: int, body: Any, what: str) -> ServiceFailed:
    """For every answer that is no success and says nothing about a run."""
    code, words = code_of(body), text_of(body)
    answer = f"LangFlow answered {status} to {what}" + (f": {words}" if words else ".")
    if status in (401, 403):
        if code == "FLOW_EXECUTE_FORBIDDEN":
            return ServiceFailed(Failure(FailureKind.MISSING_MODEL, answer))
        return KeyRefused(status)
    if status == 422:
        return fail(FailureKind.INVALID_WORKFLOW, answer)
    if status == 413:
        return fail(FailureKind.INVALID_WORKFLOW, f"{answer} Use a smaller file, or raise LangFlow's limit.")
    if 300 <= status < 400:
        return fail(FailureKind.TRANSIENT, f"{answer} It sends us to another address, which is not followed.")
    return fail(FailureKind.TRANSIENT, answer)


def code_of(body: Any) -> str | None:
    detail = body.get("detail") if isinstance(body, Mapping) else None
    code = detail.get("code") if isinstance(detail, Mapping) else None
    return code if isinstance(code, str) else None


def text_of(body: Any) -> str:
    """The words of an error answer."""
    detail = body.get("detail", body) if isinstance(body, Mapping) else body
    if isinstance(detail, str):
        # `/api/v1/run` puts a JSON text into the detail.
        with_message = _parsed(detail.partition(": ")[2]) or _parsed(detail)
        detail = with_message or detail
    if isinstance(detail, list):
        parts = []
        for each in detail[:5]:
            if isinstance(each, Mapping):
                where = each.get("loc")
                place = ".".join(map(str, where[1:])) if isinstance(where, list) else ""
                parts.append(f"{place}: {each.get('msg')}" if place else str(each.get("msg")))
        return "; ".join(parts)[:MAX_WORDS]
    if isinstance(detail, Mapping):
        for name in ("message", "error", "detail"):
            if isinstance(words := detail.get(name), str) and words:
                return words[:MAX_WORDS].strip()
        return ""
    return str(detail)[:MAX_WORDS].strip() if detail else ""


def failed_job(detail: Mapping[str, Any]) -> Failure | None:
    """For `JOB_FAILED`. None: the server gives no reason yet."""
    error = detail.get("error_detail")
    if error is None:
        return None
    if isinstance(error, Mapping):
        match error.get("type"):
            case "worker_lost":
                return Failure(
                    FailureKind.CRASHED, "LangFlow stopped or restarted while it ran the flow (worker_lost)."
                )
            case "request_overrides_unavailable":
                return Failure(
                    FailureKind.TRANSIENT,
                    "LangFlow cannot read the stored tweaks of the run. Check its secret key.",
                )
        return run_error(error)
    return Failure(FailureKind.NODE_ERROR, f"The flow failed: {text_of(error) or 'no reason was given'}")


def terminated() -> Failure:
    return Failure(
        FailureKind.CRASHED,
        "The run ended without a reason: LangFlow was shut down, or somebody stopped the run.",
    )


def run_error(error: Mapping[str, Any]) -> Failure:
    """From the message with which LangFlow reports an exception."""
    data = error.get("data")
    message = data if isinstance(data, Mapping) else error
    reason = trace = ""
    words = _words(message.get("text")) or _words(error.get("text"))
    for content in _contents(message.get("content_blocks")):
        reason = reason or _words(content.get("reason"))
        trace = trace or _words(content.get("traceback"), 100_000)
        words = words or _words(content.get("text"))
    words = words or text_of(error.get("error") or error)
    named = _REASON.search(reason)
    exception = named[1] if named is not None else None
    source = message.get("properties")
    source = source.get("source") if isinstance(source, Mapping) else None
    source = source if isinstance(source, Mapping) else {}
    component = _words(source.get("display_name")) or None
    built = _COMPONENT.search(words)
    if built is not None:
        component, words = component or built[1], built[2]
    return Failure(
        _kind(exception, f"{words} {reason}"),
        f"{component or 'The flow'} failed: {words.strip() or exception or 'no reason was given'}",
        node_id=_words(source.get("id")) or None,
        node_type=component,
        exception_type=exception,
        traceback=tuple(trace.splitlines()[-_MAX_TRACEBACK_LINES:]),
    )


def invalid_vertex(vertex: str, build: Mapping[str, Any]) -> Failure:
    """From the end of a component that could not be built."""
    words = _words(build.get("params"))
    built = _COMPONENT.search(words)
    component, words = (built[1], built[2]) if built is not None else (None, words)
    return Failure(
        _kind(None, words),
        f"{component or vertex} failed: {words.strip() or 'no reason was given'}",
        node_id=vertex,
        node_type=component,
    )


def _kind(exception: str | None, words: str) -> FailureKind:
    is_memory = exception is not None and exception.endswith(OUT_OF_MEMORY_TYPES)
    low = words.lower()
    if is_memory or any(each in low for each in OUT_OF_MEMORY_WORDS):
        return FailureKind.OUT_OF_MEMORY
    if exception == "TweakRefusedError":
        return FailureKind.INVALID_WORKFLOW
    return FailureKind.NODE_ERROR


def _contents(blocks: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """Blocks can contain blocks."""
    if not isinstance(blocks, list) or depth > _MAX_DEPTH:
        return
    for block in blocks[:100]:
        if isinstance(block, Mapping):
            yield block
            yield from _contents(block.get("contents"), depth + 1)


def _words(value: Any, most: int = MAX_WORDS) -> str:
    return value[:most] if isinstance(value, str) else ""


def _parsed(text: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, Mapping) else None
