"""Requests of callers, and how they become values of the model.

Limits of single fields are in their types, and so in the OpenAPI document; `policy/` checks the rest. `answers.py` has
the responses.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from comfyfleet.model.bounds import Amount, Count, Name, Names, PageSize, Priority, Reason, Seconds, Url
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import FactKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import JobInput, Submission, Timeouts, Urgency
from comfyfleet.model.payload import COMFYUI
from comfyfleet.model.requirement import CostTier, Environment, Isolation, Preferences, Requirements
from comfyfleet.model.webhook import ENDINGS, Webhook
from comfyfleet.model.workflow_graph import decoded_graph
from comfyfleet.wire.status_names import KNOWN_STATUSES, OLD_SERVICE_NAMES, OLD_TENANT_NAMES

MAX_BATCH = 1_000
IDEMPOTENCY_PREFIX = "idempotency-key:"
"""The reference of a job with an Idempotency-Key begins so; a caller's own reference must not."""

Status = Annotated[str, Meta(extra_json_schema={"enum": list(KNOWN_STATUSES)})]
Events = Annotated[tuple[FactKind, ...], Meta(min_length=1, max_length=len(FactKind))]
Time = Annotated[float, Meta(ge=0, le=1e11, description="Seconds since 1970")] | datetime
"""Seconds since 1970, or a date in ISO 8601; without a zone it is UTC."""

M = TypeVar("M", bound=msgspec.Struct)

_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _NodeLike(msgspec.Struct):
    class_type: Any


_NODE = msgspec.json.Decoder(_NodeLike)


class _Sent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Unknown fields are refused: a misspelled option must not be ignored silently."""


class HardwareBody(_Sent, frozen=True):
    gpu_count: Count = 0
    gpu_memory_gb: Amount = 0
    gpu_model: Name | None = None
    cpu_cores: Count = 0
    ram_gb: Amount = 0
    cpu_threads: Count = 0


class LocationBody(_Sent, frozen=True):
    region: Name | None = None
    compliance: Names = ()


class RequirementsBody(_Sent, frozen=True):
    """Hard requirements: a worker that misses one never gets the job."""

    hardware: HardwareBody | None = None
    models: Names | None = None
    node_classes: Names | None = None
    isolation: Isolation | None = None
    location: LocationBody | None = None
    max_processing_s: Seconds | None = None
    environment: Environment | None = None
    max_cost_tier: CostTier | None = None
    workers: Names | None = None
    exclude_workers: Names | None = None
    needs_files: bool | None = None
    """Only workers that exchange files with the hub; `inputs` imply it."""
    quality: Name | None = None
    """Only workers that offer this quality level."""


class PreferencesBody(_Sent, frozen=True):
    """Preferences rank the workers that can run the job."""

    workers: Names | None = None
    models: Names | None = None
    quality: Name | None = None
    region: Name | None = None
    cost_tier: CostTier | None = None


class TimeoutsBody(_Sent, frozen=True):
    accept_s: Seconds | None = None
    start_s: Seconds | None = None
    stall_s: Seconds | None = None
    total_s: Seconds | None = None


class InputBody(_Sent, frozen=True):
    """A node's input and its source: an uploaded `file`, or an output of an earlier `job`."""

    node: Name
    input: Name
    file: Name | None = None
    job: Name | None = None
    """The id or reference of an earlier job. The new job waits for it, as with `after`."""
    output: Name | None = None
    """Which output: a node id, or a pattern of file names such as `*.png`. Default: any."""
    index: Count = 0
    """Which of several outputs, in the order of the result."""
    kind: Literal["image", "mask"] = "image"
    """How ComfyUI stores the file: as an image or as a mask."""


class ConvertBody(_Sent, frozen=True):
    """The request has the editor's format, the answer the graph that servers run."""

    workflow: dict[str, Any]
    service: Name | None = None
    """Only `comfyui`: payloads of other services are submitted as they are."""


class WebhookBody(_Sent, frozen=True):
    """Where events of the job are delivered, and which; by default those that end it."""

    url: Url
    events: Events | None = None


class SubmitBody(_Sent, frozen=True):
    """Only the workflow is required: as `payload` (`{"workflow": …}` or the graph itself), `workflow` or `prompt`.
    Another service than ComfyUI has its own `payload`; `GET /api/services` tells its schema."""

    payload: dict[str, Any] | None = None
    service: Name | None = None
    provider: Name | None = None
    reference: Name | None = None
    """Your own id of the job, unique within the tenant. A repeat with the same body returns the same job."""
    inputs: Annotated[tuple[InputBody, ...], Meta(max_length=1_000)] = ()
    priority: Priority = 0
    urgency: Urgency = "normal"
    not_before: Time | None = None
    deadline: Time | None = None
    on_deadline: Literal["fail", "flag"] = "fail"
    after: Names = ()
    """Jobs that must complete first, by id or reference. If one fails or is cancelled, this job fails with
    `dependency_failed`."""
    requirements: RequirementsBody | None = None
    preferences: PreferencesBody | None = None
    metadata: dict[str, Any] | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=1_000)] | None = None
    retry_delay_s: Seconds | None = None
    timeouts: TimeoutsBody | None = None
    include_outputs: Names = ()
    webhook: WebhookBody | Url | None = None
    require_workable: bool = False
    tenant: Name | None = None
    """The tenant, if it is not the key's tenant. Only for operators."""
    workflow: dict[str, Any] | None = None
    """The workflow, in place of `payload`."""
    prompt: dict[str, Any] | None = None
    """The workflow in place of `payload`, named as in ComfyUI's own API."""


class LegacySubmitBody(SubmitBody, frozen=True):
    """A submission that may use old field names. It is only read, never written."""

    service_type: Name | None = None
    job_type: Name | None = None
    service_required: Name | None = None
    customer_id: Name | None = None
    tenant_id: Name | None = None
    id: Name | None = None


class RawSubmitBody(LegacySubmitBody, frozen=True, kw_only=True):
    """The nodes of the workflow stay encoded: most of them were decoded before and are cached."""

    payload: dict[str, msgspec.Raw] | None = None
    workflow: dict[str, msgspec.Raw] | None = None
    prompt: dict[str, msgspec.Raw] | None = None


_SUBMIT_FIELDS = frozenset(RawSubmitBody.__struct_fields__)
_IN_EDITOR_FILES = frozenset({"id"})
"""Fields of a submission that files of the editor have too."""


class SubmitDecoder:
    """Decodes a submission, or a workflow without a submission around it."""

    def __init__(self) -> None:
        self._submissions = msgspec.json.Decoder(RawSubmitBody)

    def decode(self, body: bytes | bytearray | msgspec.Raw, /) -> RawSubmitBody:
        try:
            return self._submissions.decode(body)
        except msgspec.ValidationError:
            parts = _PARTS.decode(body)
            if not _is_workflow(parts):
                raise
            return RawSubmitBody(payload=parts)


class BatchBody(_Sent, frozen=True):
    """Each job is decoded and answered by itself."""

    jobs: Annotated[tuple[msgspec.Raw, ...], Meta(min_length=1, max_length=MAX_BATCH)]
    """Submissions, as in `POST /api/jobs`."""


class ChangeBody(_Sent, frozen=True):
    priority: Priority


class CancelRequest(_Sent, frozen=True):
    reason: Reason = ""
    """Why the job is cancelled. The worker gets it, and the job keeps it."""


class PurgeBody(_Sent, frozen=True):
    before: Time | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 1_000
    """The most jobs that are deleted."""


class ListQuery(_Sent, frozen=True):
    status: Status | None = None
    """Only jobs with this status."""
    tenant: Name | None = None
    """Only jobs of this tenant."""
    workflow_hash: Name | None = None
    """Only jobs of this workflow."""
    metadata: dict[str, str] = {}
    """Only jobs with these metadata, as `metadata[name]=value`."""
    submitted_after: Time | None = None
    submitted_before: Time | None = None
    unrunnable: bool = False
    """Only waiting jobs that no connected worker can run."""
    order: Literal["newest", "oldest"] = "newest"
    """Which jobs come first."""
    cursor: Name | None = None
    """Continue after this job."""
    limit: PageSize = 100


class PageQuery(_Sent, frozen=True):
    cursor: Name | None = None
    limit: PageSize = 100


class OptionalPageQuery(_Sent, frozen=True):
    cursor: Annotated[str, Meta(min_length=1, max_length=1_024)] | None = None
    limit: PageSize | None = None
    """The most entries of a page. Default: the whole list."""


class WorkersQuery(OptionalPageQuery, frozen=True):
    status: Literal["active", "idle", "busy", "draining", "paused", "offline"] | None = None
    """Only workers with this status; `active`: all that are not offline."""


class CapacityQuery(_Sent, frozen=True):
    within: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    """Within how many seconds the waiting work should be done."""


def seconds_of(time: float | datetime | None) -> float | None:
    if isinstance(time, datetime):
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    return time


def submission(
    body: SubmitBody, tenant: TenantId, idempotency_key: str | None = None, traceparent: str | None = None
) -> Submission:
    """The submission as the model has it. The hub finds the tenant by the key."""
    requirements, given = _requirements(body), _given_workflow(body)
    return Submission(
        # Only a graph may be inside a `workflow` or a `prompt`: these are fields of other services' payloads.
        workflow=_workflow(given) if requirements.service == COMFYUI else given,
        reference=_reference(body, idempotency_key),
        tenant=tenant,
        priority=body.priority,
        urgency=body.urgency,
        requirements=requirements,
        preferences=converted(body.preferences, Preferences),
        metadata=body.metadata,
        max_attempts=body.max_attempts,
        retry_delay_s=body.retry_delay_s,
        timeouts=converted(body.timeouts, Timeouts),
        not_before=seconds_of(body.not_before),
        deadline=seconds_of(body.deadline),
        on_deadline=body.on_deadline,
        include_outputs=body.include_outputs,
        require_workable=body.require_workable,
        after=tuple(map(JobId, body.after)),
        inputs=tuple(converted(each, JobInput) for each in body.inputs),
        webhook=_webhook(body.webhook),
        traceparent=traceparent,
    )


def named_tenant(body: SubmitBody) -> tuple[str, str] | None:
    """The name of the field and the tenant in it. None: the tenant of the key."""
    names = ("tenant", *OLD_TENANT_NAMES) if isinstance(body, LegacySubmitBody) else ("tenant",)
    found = {name: given for name in names if (given := getattr(body, name)) is not None}
    if len(set(found.values())) > 1:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{' and '.join(found)} name different tenants: send one of them",
            field="tenant",
        )
    return next(iter(found.items()), None)


def named_jobs(body: SubmitBody) -> set[str]:
    """Ids or references of the jobs that must complete before this one."""
    return {*body.after, *(each.job for each in body.inputs if each.job is not None)}


def converted(body: msgspec.Struct | None, kind: type[M], **more: Any) -> M:
    """A part of a request as its struct of the model, with the model's defaults for what is left out or null."""
    return msgspec.convert({**(msgspec.to_builtins(body) if body is not None else {}), **more}, kind)


def _webhook(given: WebhookBody | str | None) -> Webhook | None:
    if given is None:
        return None
    if isinstance(given, str):
        return Webhook(given)
    return Webhook(given.url, tuple(dict.fromkeys(given.events or ENDINGS)))


def _given_workflow(body: SubmitBody) -> dict[str, Any]:
    given = [each for each in (body.payload, body.workflow, body.prompt) if each is not None]
    if len(given) != 1:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            "a submission has one workflow, and this one has "
            f'{len(given) or "none"}: send {{"payload": {{"workflow": …}}}}, {{"workflow": …}} or {{"prompt": …}}',
        )
    return given[0]


def _is_workflow(parts: dict[str, msgspec.Raw]) -> bool:
    """Whether a body is a graph or a file of the editor, and not a submission with a mistake, whose options would be
    lost."""
    if "nodes" in parts and "links" in parts:
        return _SUBMIT_FIELDS.isdisjoint(parts.keys() - _IN_EDITOR_FILES)
    # A node can have any name, also that of a field.
    named_as_fields = _SUBMIT_FIELDS & parts.keys()
    return all(_is_node(parts[name]) for name in named_as_fields) and any(map(_is_node, parts.values()))


def _is_node(given: object) -> bool:
    if not isinstance(given, msgspec.Raw):
        return isinstance(given, dict) and "class_type" in given
    try:
        _NODE.decode(given)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return True


def _workflow(payload: dict[str, Any]) -> dict[str, Any]:
    # If there are both, the prompt counts, as in files: servers run it without conversion.
    held = {name: inner for name in ("prompt", "workflow") if (inner := _held(payload.get(name))) is not None}
    if held and any(_is_node(each) for name, each in payload.items() if name not in held):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"there are nodes beside {' and '.join(map(repr, held))}: send one workflow, not two",
        )
    found = [each for each in held.values() if len(held) == 1 or _holds_nodes(each)]
    workflow = found[0] if found else held.get("workflow", payload)
    if isinstance(workflow.get("nodes"), msgspec.Raw):
        # Most likely a file of the editor, whose parts are not nodes yet.
        return decoded_graph(workflow)
    return workflow


def _held(given: object) -> dict[str, Any] | None:
    """A dict that can be a workflow and is not a node."""
    inner = _parts(given) if isinstance(given, msgspec.Raw) else given
    return inner if isinstance(inner, dict) and "class_type" not in inner else None


def _holds_nodes(graph: dict[str, Any]) -> bool:
    return "nodes" in graph or any(map(_is_node, graph.values()))


def _parts(text: msgspec.Raw) -> dict[str, msgspec.Raw] | None:
    try:
        return _PARTS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # The code that decodes nodes reports the error.
        return None


def _reference(body: SubmitBody, key: str | None) -> str | None:
    own = body.reference
    if isinstance(body, LegacySubmitBody):
        own = own or body.id
    if own is not None and own.startswith(IDEMPOTENCY_PREFIX):
        raise Refusal(RefusalCode.INVALID_REQUEST, f"a reference must not begin with {IDEMPOTENCY_PREFIX!r}")
    if own is not None and "\0" in own:
        # PostgreSQL cannot store it, and a job must be able to move between stores.
        raise Refusal(
            RefusalCode.INVALID_REQUEST, "a reference must not contain a NUL character", field="reference"
        )
    if key is None:
        return own
    if own is not None:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            "send either a reference or an Idempotency-Key, not both",
        )
    return IDEMPOTENCY_PREFIX + key


def _requirements(body: SubmitBody) -> Requirements:
    service = body.service
    if isinstance(body, LegacySubmitBody):
        for name in OLD_SERVICE_NAMES:
            service = service or getattr(body, name)
    return converted(body.requirements, Requirements, service=service or COMFYUI, provider=body.provider)
