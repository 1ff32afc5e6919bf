"""What became of an attempt that did not complete, and whose fault it was.

A failure is a value. `policy/retry.py` holds the table that says what follows from each kind.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec

from comfyfleet.model.errors import ComfyFleetError


class FailureKind(StrEnum):
    # the caller's fault: the job can run nowhere
    INVALID_WORKFLOW = "invalid_workflow"
    MISSING_INPUT = "missing_input"
    # this worker cannot, another may
    MISSING_NODE = "missing_node"
    MISSING_MODEL = "missing_model"
    OUT_OF_MEMORY = "out_of_memory"
    # it may work next time
    NODE_ERROR = "node_error"
    TRANSIENT = "transient"
    CRASHED = "crashed"
    INTERRUPTED = "interrupted"
    ACCEPT_TIMEOUT = "accept_timeout"
    START_TIMEOUT = "start_timeout"
    STALL_TIMEOUT = "stall_timeout"
    UNKNOWN = "unknown"
    # the worker is gone or useless
    DEAD_WORKER = "dead_worker"
    LEASE_EXPIRED = "lease_expired"
    # the job's own limits, fired by the sweeper
    TOTAL_TIMEOUT = "total_timeout"
    DEADLINE_PASSED = "deadline_passed"
    DEPENDENCY_FAILED = "dependency_failed"
    UNRUNNABLE = "unrunnable"
    # what arrived at the worker is not what was submitted, so it was not run
    PAYLOAD_MISMATCH = "payload_mismatch"
    # what was sealed cannot be opened any more
    UNREADABLE = "unreadable"


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: FailureKind
    message: str
    node_id: str | None = None
    node_type: str | None = None
    exception_type: str | None = None
    traceback: tuple[str, ...] = ()
    node_errors: dict[str, Any] | None = None
    missing: tuple[str, ...] = ()
    """Names of the node classes, models or files that were not there."""
    vram_gb: float | None = None
    """Memory of the card that was too small."""
    server_died: Literal["thread", "process"] | None = None
    """What of the server died while it ran this very prompt: its execution thread, or the whole of it. Not set where
    that happened before the prompt started, or is merely likely."""


class FailureText(msgspec.Struct, frozen=True):
    """What a worker reported of an attempt that failed, where it is kept apart from the attempt."""

    failure: Failure
    data: dict[str, Any]
    """Of the fact that tells of it."""


_MAX_MESSAGE = 10_000
_MAX_LINES = 100
_MAX_LINE = 2_000
_MAX_TRACEBACK = 30_000
_MAX_NODE_ERRORS = 60_000


def bounded(failure: Failure) -> Failure:
    """As much of it as helps: what a service says is kept with each attempt, and some say a lot."""
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
    """Without the whole list of choices that some servers send with each complaint; then as many nodes as fit."""
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
    """Raised by a connector when a service did not do what it was asked. Carries the classified failure."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ServiceBusy(ServiceFailed):
    """The service does not come to the job because of somebody else's, or is not there; the job never began there. No
    fault of the job's: it is given back uncharged."""


class FileTooLarge(ServiceFailed):
    """A file of the service has more than there is room for. The work is done: the file stays where it is."""
