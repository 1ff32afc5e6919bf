"""Events. Facts are durable state changes, numbered for each job; progress may be lost.

A store writes a fact in the same step as the change. Progress and previews travel on the bus only.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from comfyfleet.model.ids import JobId, WorkerId


class FactKind(StrEnum):
    QUEUED = "queued"
    LEASED = "leased"
    COMPLETED = "completed"
    FAILED = "failed"
    """Final: no attempt follows by itself."""
    RETRYING = "retrying"
    RELEASED = "released"
    CANCEL_REQUESTED = "cancel_requested"
    CANCELLED = "cancelled"
    PAUSE_REQUESTED = "pause_requested"
    RETRY_REQUESTED = "retry_requested"
    PAUSED = "paused"
    RESUMED = "resumed"
    PRIORITY_CHANGED = "priority_changed"
    LATE = "late"

    @property
    def is_final(self) -> bool:
        """It ends its round. No fact of the same round follows."""
        return self in _FINAL


_FINAL = frozenset({FactKind.COMPLETED, FactKind.FAILED, FactKind.CANCELLED})


class FactDraft(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A fact before the store has numbered it."""

    kind: FactKind
    data: dict[str, Any] | None = None


class Fact(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    job_id: JobId
    number: int
    kind: FactKind
    at: float
    round: int = 1
    data: dict[str, Any] | None = None


class ProgressKind(StrEnum):
    ACCEPTED = "accepted"
    STARTED = "started"
    PROGRESS = "progress"
    PREVIEW = "preview"
    OUTPUT = "output"


class ProgressEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of a run. Only the newest one matters."""

    job_id: JobId
    kind: ProgressKind
    at: float
    worker_id: WorkerId | None = None
    lease_number: int = 0
    data: dict[str, Any] = {}
    image: bytes | None = None


class RunSnapshot(msgspec.Struct, frozen=True):
    """The status and progress of a run, as the store shows them to clients that read it directly."""

    status: str
    """`started`, `assigned` with progress, `completed`, `failed`, `cancelled`, or `pending` when it waits again."""
    at: float
    worker_id: WorkerId | None = None
    progress: bytes | None = None
    """A JSON object. None: no progress."""
    percentage: float | None = None
    message: str | None = None


class FleetEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of a worker, not of a job: state, block, unblock."""

    kind: str
    at: float
    worker_id: WorkerId
    data: dict[str, Any] = {}


Event = Fact | ProgressEvent | FleetEvent
