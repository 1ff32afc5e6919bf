"""Why an attempt failed, as a value. The table in `policy/retry.py` says what follows from each kind."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec

from comfyfleet.model.errors import ComfyFleetError


class FailureKind(StrEnum):
    # the caller's fault: no worker can run the job
    INVALID_WORKFLOW = "invalid_workflow"
    MISSING_INPUT = "missing_input"
    # another worker may be able to run it
    MISSING_NODE = "missing_node"
    MISSING_MODEL = "missing_model"
    OUT_OF_MEMORY = "out_of_memory"
    # a retry may succeed
    NODE_ERROR = "node_error"
    TRANSIENT = "transient"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    ACCEPT_TIMEOUT = "accept_timeout"
    START_TIMEOUT = "start_timeout"
    STALL_TIMEOUT = "stall_timeout"
    UNKNOWN = "unknown"
    # the worker is lost or broken
    DEAD_WORKER = "dead_worker"
    LEASE_EXPIRED = "lease_expired"
    # the job's own limits, which the sweeper enforces
    TOTAL_TIMEOUT = "total_timeout"
    DEADLINE_PASSED = "deadline_passed"
    DEPENDENCY_FAILED = "dependency_failed"
    UNRUNNABLE = "unrunnable"
    # the payload at the worker is not the submitted one, so it did not run
    PAYLOAD_MISMATCH = "payload_mismatch"
    # the payload cannot be decrypted any more
    UNREADABLE = "unreadable"
    # a paid service may have run it, and nobody knows: another run may cost money a second time
    OUTCOME_UNKNOWN = "outcome_unknown"


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: FailureKind
    message: str
    node_id: str | None = None
    node_type: str | None = None
    exception_type: str | None = None
    traceback: tuple[str, ...] = ()
    node_errors: dict[str, Any] | None = None
    missing: tuple[str, ...] = ()
    """Names of the missing node classes, models or files."""
    vram_gb: float | None = None
    """Memory of the GPU that was too small."""
    server_died: Literal["thread", "process"] | None = None
    """What died while the server ran this prompt: its execution thread or the whole process. Not set if it died before
    the prompt started, or if the death is only likely."""


class FailureText(msgspec.Struct, frozen=True):
    """A worker's report of a failed attempt, stored separately from the attempt."""

    failure: Failure
    data: dict[str, Any]
    """The data of the failure's fact."""


_MAX_MESSAGE = 10_000
_MAX_LINES = 100
_MAX_LINE = 2_000
_MAX_TRACEBACK = 30_000
_MAX_NODE_ERRORS = 60_000


def bounded(failure: Failure) -> Failure:
    """Truncate long texts: every attempt stores its failure, and some services send megabytes."""
    lines = tuple(line[:_MAX_LINE] for line in failure.traceback[-_MAX_LINES:])
    while sum(map(len, lines)) > _MAX_TRACEBACK:
        lines = lines[1:]
    errors = failure.node_errors
    if errors is not None and _size(errors) > _MAX_NODE_ERRORS:
        errors = _shortened(errors)
    changed = msgspec.structs.replace(
        failure, message=failure.message[:_MAX_MESSAGE], traceback=lines, node_errors=errors
    )
    return failure if changed == failure else changed


def _shortened(errors: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the lists of choices that some servers send with each error, then keep as many nodes as fit."""
    kept: dict[str, Any] = {}
    left = _MAX_NODE_ERRORS
    for node_id, entry in errors.items():
        brief = _without_config(entry)
        left -= _size(brief) + len(node_id)
        if left < 0:
            break
        kept[node_id] = brief
    return kept or None


def _without_config(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_config(each) for name, each in value.items() if name != "input_config"}
    return [_without_config(each) for each in value] if isinstance(value, list) else value


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))


class ServiceFailed(ComfyFleetError):
    """A connector raises it when a service fails. Carries the classified failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ServiceBusy(ServiceFailed):
    """The service is occupied by other jobs or is not reachable, and the job did not begin. The job is released;
    this costs no attempt."""


class FileTooLarge(ServiceFailed):
    """A file of the service is too large to fetch. The run is complete, and the file stays on the server."""
