"""Classifies a ComfyUI server's errors.

The tables are tested against recorded traffic of real servers. The server's own words stay as they are.
`policy` decides what follows from a kind of failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from comfyfleet.model.failure import Failure, FailureKind, ServiceBusy, ServiceFailed
from comfyfleet.model.workflow_graph import InvalidWorkflow
from comfyfleet.model.workflow_hash import MODEL_EXTENSIONS, RESOURCE_INPUTS

MAX_WORDS = 2_000
MAX_COMPLAINTS = 5
MAX_TRACEBACK = 60

OUT_OF_MEMORY_TYPES = ("OutOfMemoryError", "MemoryError")
"""Suffixes of exception types: torch.OutOfMemoryError, torch.cuda.OutOfMemoryError, MemoryError."""

OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "allocation on device",
    "can't allocate memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "cudaerrormemoryallocation",
    "unable to allocate",
)

_MISSING_MODEL = re.compile(r"Model in folder '[^']*' with filename '(?P<name>[^']+)' not found")
_MISSING_NODE = re.compile(r"Cannot execute because node (?P<name>.+) does not exist")
_INVALID_FILE = re.compile(r"Invalid (?:[\w-]+ )?file: (?P<name>.*)$")
_NO_SUCH_FILE = re.compile(r"No such file or directory: '(?P<name>[^']+)'")

_HINTS = {"prompt_no_outputs": "add a node that saves its result, such as SaveImage"}
"""By type of error: what to do, added to the server's words."""
_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".mp4", ".webm", ".mov", ".mkv")
_FILE_EXTENSIONS = (*_PICTURES, ".wav", ".mp3", ".flac", ".ogg", ".latent", ".glb", ".obj", ".txt", ".json")

# From the kind that every worker would meet to the kind of this worker only.
_SEVERITY = (FailureKind.INVALID_WORKFLOW, FailureKind.MISSING_INPUT, FailureKind.MISSING_MODEL)


class ServerComplaint(msgspec.Struct, frozen=True):
    """One entry of a server's `node_errors`, classified."""

    kind: FailureKind
    node_id: str
    node_type: str | None
    words: str
    missing: str | None = None


def fail(kind: FailureKind, message: str) -> ServiceFailed:
    return ServiceFailed(Failure(kind, message))


def nobody_there(error: Exception) -> ServiceBusy:
    """For a prompt that was not sent."""
    return ServiceBusy(
        Failure(FailureKind.CRASHED, f"The server refuses connections, so its process is gone: {error}")
    )


def invalid_workflow(error: InvalidWorkflow) -> Failure:
    """For a graph that was rejected before any server saw it."""
    node_id = next(iter(error.node_errors), None)
    return Failure(
        FailureKind.INVALID_WORKFLOW, str(error), node_id=node_id, node_errors=error.node_errors or None
    )


def refused_prompt(status: int, body: Any) -> Failure:
    error = body.get("error") if isinstance(body, Mapping) else None
    if isinstance(error, str):
        error = {"message": error}
    if not isinstance(error, Mapping) or not error.get("message"):
        return refused_request(status, body, "the prompt")
    hint = _HINTS.get(_text(error.get("type")), "")
    message = _join(_text(error.get("message")), _text(error.get("details")), hint)
    extra = error.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    errors = body.get("node_errors")
    if isinstance(errors, Mapping) and errors:
        return invalid_nodes(errors, message)
    missing = _missing_class(error, extra)
    if missing is not None:
        return Failure(
            FailureKind.MISSING_NODE,
            message,
            node_id=_optional_text(extra.get("node_id")),
            node_type=missing,
            missing=(missing,),
        )
    if status >= 500:
        return Failure(FailureKind.TRANSIENT, message)
    return Failure(FailureKind.INVALID_WORKFLOW, message, node_id=_optional_text(extra.get("node_id")))


def refused_request(status: int, body: Any, what: str) -> Failure:
    """For an answer without ComfyUI's explanation: from a proxy, or from another program at that address."""
    words = _text(body)[:MAX_WORDS]
    answer = f"The server answered {status} to {what}" + (f": {words}" if words else "")
    if status == 413:
        return Failure(FailureKind.INVALID_WORKFLOW, f"{answer}. It is too large for this server: send less.")
    if status in (401, 403, 407):
        return Failure(
            FailureKind.DEAD_WORKER,
            f"{answer}. It denies access: check the credentials and headers.",
        )
    if status in (408, 425, 429) or status >= 500:
        return Failure(FailureKind.TRANSIENT, answer)
    if status == 400:
        return Failure(FailureKind.INVALID_WORKFLOW, answer)
    return Failure(FailureKind.DEAD_WORKER, f"{answer}. It is not ComfyUI: check the address.")


def refused_upload(status: int, body: Any, filename: str) -> Failure:
    failure = refused_request(status, body, f"the upload of {filename!r}")
    if failure.kind is FailureKind.INVALID_WORKFLOW:
        return msgspec.structs.replace(failure, kind=FailureKind.MISSING_INPUT, missing=(filename,))
    return failure


def refused_file(status: int, what: str) -> Failure:
    if status == 404:
        return Failure(FailureKind.UNKNOWN, f"The server no longer has {what}: it was removed after the run.")
    return refused_request(status, None, f"the request for {what}")


def invalid_nodes(
    node_errors: Mapping[str, Any], message: str = "Prompt outputs failed validation"
) -> Failure:
    """For the `node_errors` of a refused or partly accepted prompt."""
    complaints = list(_complaints(node_errors))
    kind = min((complaint.kind for complaint in complaints), key=_SEVERITY.index, default=_SEVERITY[0])
    worst = [complaint for complaint in complaints if complaint.kind is kind]
    shown = "; ".join(
        f"node {complaint.node_id} ({complaint.node_type}): {complaint.words}"
        for complaint in worst[:MAX_COMPLAINTS]
    )
    more = f" (and {len(complaints) - MAX_COMPLAINTS} more)" if len(complaints) > MAX_COMPLAINTS else ""
    return Failure(
        kind,
        _join(message, shown)[:MAX_WORDS] + more,
        node_id=worst[0].node_id if worst else None,
        node_type=worst[0].node_type if worst else None,
        node_errors=dict(node_errors),
        missing=tuple(dict.fromkeys(complaint.missing for complaint in worst if complaint.missing)),
    )


def execution_error(data: Mapping[str, Any], vram_gb: float | None = None) -> Failure:
    exception_type = _text(data.get("exception_type"))
    message = _text(data.get("exception_message")).strip()
    kind, missing = _kind_of_exception(exception_type, message)
    traceback = data.get("traceback")
    return Failure(
        kind,
        message[:MAX_WORDS] or exception_type or "A node failed and gave no reason",
        node_id=_optional_text(data.get("node_id")),
        node_type=_optional_text(data.get("node_type")),
        exception_type=exception_type or None,
        traceback=tuple(map(_text, traceback[-MAX_TRACEBACK:])) if isinstance(traceback, list) else (),
        missing=missing,
        vram_gb=vram_gb if kind is FailureKind.OUT_OF_MEMORY else None,
    )


def interrupted(data: Mapping[str, Any]) -> Failure:
    node_type = _optional_text(data.get("node_type"))
    node_id = _optional_text(data.get("node_id"))
    return Failure(
        FailureKind.INTERRUPTED,
        f"The run was interrupted at node {node_id} ({node_type}).",
        node_id=node_id,
        node_type=node_type,
    )


def is_end(data: Mapping[str, Any]) -> bool:
    """Whether an `execution_error` ends the run. A blocked branch also reports one, and the rest goes on."""
    return data.get("exception_type") != "ExecutionBlocked"


def looks_like_model(name: str) -> bool:
    return name.lower().endswith(MODEL_EXTENSIONS)


def _complaints(node_errors: Mapping[str, Any]) -> Iterator[ServerComplaint]:
    for node_id, entry in node_errors.items():
        if not isinstance(entry, Mapping):
            continue
        errors = entry.get("errors")
        for error in errors if isinstance(errors, list) else ():
            if isinstance(error, Mapping):
                kind, missing = _kind_of_complaint(error)
                words = _join(_text(error.get("message")), _text(error.get("details")))
                yield ServerComplaint(kind, node_id, _optional_text(entry.get("class_type")), words, missing)


def _kind_of_complaint(error: Mapping[str, Any]) -> tuple[FailureKind, str | None]:
    extra = error.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    match error.get("type"):
        case "value_not_in_list":
            value = extra.get("received_value")
            if isinstance(value, str):
                return _kind_of_choice(_text(extra.get("input_name")), value, extra.get("input_config"))
        case "custom_validation_failed":
            found = _INVALID_FILE.search(_text(error.get("details")))
            if found:
                name = found["name"].strip()
                is_model = looks_like_model(name)
                return (FailureKind.MISSING_MODEL if is_model else FailureKind.MISSING_INPUT), name or None
    return FailureKind.INVALID_WORKFLOW, None


def _kind_of_choice(input_name: str, value: str, config: Any) -> tuple[FailureKind, str | None]:
    choices = choices_of(config)
    if looks_like_model(value) or input_name.rstrip("0123456789") in RESOURCE_INPUTS:
        return FailureKind.MISSING_MODEL, value
    if any(looks_like_model(choice) for choice in choices):
        return FailureKind.MISSING_MODEL, value
    if value.lower().endswith(_FILE_EXTENSIONS):
        return FailureKind.MISSING_INPUT, value
    return FailureKind.INVALID_WORKFLOW, None


def choices_of(config: Any) -> list[str]:
    """The choices of a combo input in either notation: `[[…], {}]` and `["COMBO", {"options": […]}]`."""
    if not isinstance(config, list) or not config:
        return []
    choices = config[0]
    if choices == "COMBO" and len(config) > 1 and isinstance(config[1], Mapping):
        choices = config[1].get("options")
    return [choice for choice in choices if isinstance(choice, str)] if isinstance(choices, list) else []


def _missing_class(error: Mapping[str, Any], extra: Mapping[str, Any]) -> str | None:
    if error.get("type") == "missing_node_type":
        return _optional_text(extra.get("class_type"))
    found = _MISSING_NODE.search(_text(error.get("message")))
    return found["name"] if found else None


def _kind_of_exception(exception_type: str, message: str) -> tuple[FailureKind, tuple[str, ...]]:
    words = message.lower()
    if exception_type.endswith(OUT_OF_MEMORY_TYPES) or any(word in words for word in OUT_OF_MEMORY_WORDS):
        return FailureKind.OUT_OF_MEMORY, ()
    found = _MISSING_MODEL.search(message)
    if found is None and exception_type == "FileNotFoundError":
        found = _NO_SUCH_FILE.search(message)
        found = found if found and looks_like_model(found["name"]) else None
    if found:
        return FailureKind.MISSING_MODEL, (found["name"],)
    return FailureKind.NODE_ERROR, ()


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else str(value)


def _optional_text(value: Any) -> str | None:
    return None if value is None else str(value)


def _join(*parts: str) -> str:
    return ": ".join(part for part in parts if part)
