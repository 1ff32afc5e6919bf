"""The options of a submission and the updates of a job: wire bodies under Python names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.failure import Failure
from comfyfleet.model.job import JobResult, Urgency
from comfyfleet.model.payload import COMFYUI
from comfyfleet.model.workflow import read_payload_file, read_workflow_file, workflow_in
from comfyfleet.wire.bodies import (
    InputBody,
    PreferencesBody,
    RequirementsBody,
    SubmitBody,
    TimeoutsBody,
    WebhookBody,
)

FINAL = frozenset({"completed", "failed", "cancelled"})

WorkflowLike = Mapping[str, Any] | str | Path
"""A graph in API or editor format, or the path of a JSON file or picture that contains one. With another `service`
than ComfyUI its payload, or the path of a JSON file."""


class SubmitOptions(TypedDict, total=False):
    """docs/protocol.md describes each option."""

    service: str | None
    provider: str | None
    reference: str | None
    priority: int
    urgency: Urgency
    not_before: float | datetime | None
    deadline: float | datetime | None
    on_deadline: Literal["fail", "flag"]
    after: Sequence[str]
    inputs: Sequence[InputBody | Mapping[str, Any]]
    requirements: RequirementsBody | None
    preferences: PreferencesBody | None
    metadata: dict[str, Any] | None
    max_attempts: int | None
    retry_delay_s: float | None
    timeouts: TimeoutsBody | None
    include_outputs: tuple[str, ...]
    webhook: WebhookBody | str | None
    require_workable: bool
    tenant: str | None


class JobUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of a job's state, which has a number, or its progress, which has none."""

    kind: str
    """queued, leased, completed, …, or progress, preview, output."""
    number: int | None = None
    status: str | None = None
    percentage: float | None = None
    value: float | None = None
    max: float | None = None
    step: int | None = None
    node: str | None = None
    message: str | None = None
    worker_id: str | None = None
    blocked_s: float | None = None
    """For `retrying`: how long the worker on which it failed does not get it again."""
    lease: int | None = None
    started_at: float | None = None
    updated_at: float | None = None
    estimated_completion: float | None = None
    result: JobResult | None = None
    error: Failure | None = None
    data: dict[str, Any] = {}
    """Everything that the hub sent, unchanged."""

    @property
    def is_end(self) -> bool:
        """The end of a round. A retried job has more updates."""
        return self.kind in FINAL


def read_workflow(workflow: WorkflowLike) -> dict[str, Any]:
    if isinstance(workflow, Mapping):
        return workflow_in(workflow)
    path = Path(workflow)
    try:
        with path.open("rb") as file:
            return read_workflow_file(file, str(path))
    except OSError as error:
        raise Refusal(RefusalCode.INVALID_WORKFLOW, f"cannot read {path}: {error.strerror}") from error


def read_payload(payload: WorkflowLike) -> dict[str, Any]:
    """Of another service than ComfyUI: the object itself, or the path of a JSON file."""
    if isinstance(payload, Mapping):
        return dict(payload)
    path = Path(payload)
    try:
        with path.open("rb") as file:
            return read_payload_file(file, str(path))
    except OSError as error:
        raise Refusal(RefusalCode.INVALID_WORKFLOW, f"cannot read {path}: {error.strerror}") from error


def submission(workflow: WorkflowLike, options: SubmitOptions) -> SubmitBody:
    given: dict[str, Any] = dict(options)
    given["after"] = tuple(options.get("after", ()))
    try:
        given["inputs"] = msgspec.convert(list(options.get("inputs", ())), tuple[InputBody, ...])
    except msgspec.ValidationError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"the inputs are not valid: {error}") from error
    if options.get("service") in (None, COMFYUI):
        return SubmitBody({"workflow": read_workflow(workflow)}, **given)
    return SubmitBody(read_payload(workflow), **given)


def attached_to(target: str, file_id: str) -> InputBody:
    """`10.image` means the input `image` of node 10."""
    node, dot, name = target.partition(".")
    if not (node and dot and name):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{target!r} does not name an input of a node: write it like '10.image'",
        )
    return InputBody(node, name, file_id)


def update_of(kind: str, data: str) -> JobUpdate:
    """For an event of a stream. Fields that this version does not know are only in `data`."""
    sent = msgspec.json.decode(data.encode())
    members: dict[str, Any] = sent if isinstance(sent, dict) else {"message": sent}
    # A change of state has its details one level below.
    inner = members.get("data")
    every = {**(inner if isinstance(inner, dict) else {}), **members}
    known: dict[str, Any] = {}
    for field in msgspec.structs.fields(JobUpdate):
        if field.name in ("kind", "data") or every.get(field.name) is None:
            continue
        try:
            known[field.name] = msgspec.convert(every[field.name], field.type)
        except msgspec.ValidationError:
            continue
    return JobUpdate(kind, **known, data=members)
