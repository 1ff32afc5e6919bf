"""Progress and events as clients see them, on the stream of a job and of the fleet.

The model has the events themselves (`Fact`, `ProgressEvent`, `FleetEvent`); the hub sends them.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from comfyfleet.model.bounds import Name, Number
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.fact import Fact, FactKind, FleetEvent, ProgressEvent
from comfyfleet.model.failure import Failure
from comfyfleet.model.job import JobResult
from comfyfleet.wire.status_names import status_name

_LONGEST_S = 1e9

_PHASES = {
    FactKind.QUEUED: Phase.QUEUED,
    FactKind.RETRYING: Phase.QUEUED,
    FactKind.RELEASED: Phase.QUEUED,
    FactKind.PAUSED: Phase.QUEUED,
    FactKind.RESUMED: Phase.QUEUED,
    FactKind.LEASED: Phase.LEASED,
    FactKind.CANCEL_REQUESTED: Phase.LEASED,
    FactKind.PAUSE_REQUESTED: Phase.LEASED,
    FactKind.RETRY_REQUESTED: Phase.LEASED,
    FactKind.COMPLETED: Phase.COMPLETED,
    FactKind.FAILED: Phase.FAILED,
    FactKind.CANCELLED: Phase.CANCELLED,
}
"""The phase after a fact. Other facts do not change the phase."""


class StreamQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    last_event_id: Number = 0


class EventsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    job: Name | None = None
    """Only events of this job."""
    worker: Name | None = None
    tenant: Name | None = None
    """Only events of this tenant's jobs."""
    kind: Name | None = None
    """Only events of these kinds, separated by commas."""
    metadata: dict[str, str] = {}
    """Only events of jobs with these metadata, as `metadata[name]=value`."""
    job_id: Name | None = None
    """The same as `job`."""
    worker_id: Name | None = None
    """The same as `worker`."""


class ProgressBody(msgspec.Struct, frozen=True):
    """Unknown values are null."""

    id: str
    status: str
    percentage: float | None = None
    value: float | None = None
    max: float | None = None
    step: int | None = None
    node: str | None = None
    message: str | None = None
    worker_id: str | None = None
    lease: int | None = None
    """The number of the lease."""
    started_at: float | None = None
    updated_at: float | None = None
    estimated_completion: float | None = None
    """When the job is expected to end, from the pace of its steps and from earlier runs of the workflow."""


class FactBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of a job's state. The fact that ends a job has its result or error."""

    id: str
    number: int
    kind: str
    at: float
    round: int
    status: str | None = None
    data: dict[str, Any] | None = None
    result: JobResult | None = None
    error: Failure | None = None


class ProgressEventBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Progress of a running job: accepted, started, a node's output, a preview."""

    id: str
    kind: str
    at: float
    worker_id: str | None = None
    lease: int = 0
    data: dict[str, Any] = {}
    image: bytes | None = None
    """A preview, in base64."""


class FleetBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of a job or a worker."""

    kind: str
    at: float
    job_id: str | None = None
    worker_id: str | None = None
    tenant: str | None = None
    number: int | None = None
    status: str | None = None
    metadata: dict[str, Any] | None = None
    data: dict[str, Any] | None = None


def fact_body(fact: Fact, result: JobResult | None = None, error: Failure | None = None) -> FactBody:
    phase = _PHASES.get(fact.kind)
    status = None if phase is None else status_name(phase)
    return FactBody(
        fact.job_id, fact.number, fact.kind.value, fact.at, fact.round, status, fact.data, result, error
    )


def progress_event_body(progress: ProgressEvent) -> ProgressEventBody:
    return ProgressEventBody(
        progress.job_id,
        progress.kind.value,
        progress.at,
        progress.worker_id,
        progress.lease_number,
        progress.data,
        progress.image,
    )


def fleet_body(
    event: Fact | ProgressEvent | FleetEvent,
    tenant: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> FleetBody:
    if isinstance(event, FleetEvent):
        return FleetBody(event.kind, event.at, worker_id=event.worker_id, data=event.data or None)
    if isinstance(event, ProgressEvent):
        return FleetBody(
            event.kind.value,
            event.at,
            event.job_id,
            event.worker_id,
            tenant,
            metadata=metadata,
            data=event.data or None,
        )
    worker_id = None if event.data is None else event.data.get("worker_id")
    phase = _PHASES.get(event.kind)
    return FleetBody(
        event.kind.value,
        event.at,
        event.job_id,
        worker_id if isinstance(worker_id, str) else None,
        tenant,
        event.number,
        None if phase is None else status_name(phase),
        metadata,
        event.data,
    )


def known_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The known fields of a progress report. Other programs send other fields, which are left out."""
    value, most = _number(data.get("value")), _number(data.get("max"))
    percentage = _number(data.get("percentage", data.get("progress")))
    if percentage is None and value is not None and most:
        percentage = round(100 * value / most, 1)
    step = _number(data.get("step", data.get("nodes_done")))
    node, message = data.get("node"), data.get("message")
    return {
        "percentage": None if percentage is None else min(100.0, max(0.0, percentage)),
        "value": value,
        "max": most,
        "step": None if step is None else int(step),
        "node": None if node is None else str(node),
        "message": None if message is None else str(message),
    }


def remaining_s(data: dict[str, Any]) -> float | None:
    """The worker's estimate of the rest of the run."""
    told_s = _number(data.get("remaining_s"))
    return told_s if told_s is not None and 0 <= told_s <= _LONGEST_S else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value
