"""Examples in the OpenAPI document, made from the types of bodies and answers.

`BODIES` has whole examples by struct; any other struct shows its required fields with the values of `VALUES`. A test
decodes every example as its type.
"""

from __future__ import annotations

import enum
import functools
import types
import typing
from typing import Any

import msgspec

_JOB = "01a1ecc7-4726-7d7c-9eda-3e50303d3ea1"
_HASH = "9f2c4b1e5d6a7f8091a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708"
_AT = 1767225600.0
_WORKFLOW = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 0}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "demo"}},
}
_LINK = "/api/files/file-1/content?expires=1767229200&signature=c2lnbmF0dXJl"
_CAPABILITIES = {
    "services": [{"name": "comfyui", "node_classes": ["EmptyImage", "SaveImage"]}],
    "hardware": {"gpu": {"count": 1, "memory_gb": 24, "model": "RTX 4090"}},
}

VALUES: dict[str, Any] = {
    "amount": 1000,
    "at": _AT,
    "available": 900,
    "balance": 1000,
    "capabilities": _CAPABILITIES,
    "capabilities_hash": _HASH[:32],
    "connected_at": _AT,
    "created_at": _AT,
    "day": None,
    "definitions": {"EmptyImage": [["width", 512], ["height", 512]]},
    "environment": "self_hosted",
    "epoch": 1,
    "event": "job.completed",
    "expires_at": 1767229200.0,
    "failed": 0,
    "file_id": "file-1",
    "held": 100,
    "id": _JOB,
    "jobId": _JOB,
    "job_id": _JOB,
    "key_id": "key-1",
    "grant_id": "invoice-17",
    "heartbeat_s": 10.0,
    "last_seen_at": _AT,
    "lost_after_s": 60.0,
    "method": "GET",
    "name": "portrait.png",
    "note": "Correction of invoice 17",
    "opened_at": _AT,
    "priority": 10,
    "profile": "p-1",
    "reference": "invoice-17",
    "secret": "whsec_c2VjcmV0",
    "service": "comfyui",
    "services": ["comfyui"],
    "sha256": _HASH,
    "since": _AT,
    "size": 24576,
    "submitted_at": _AT,
    "summary": "No connected worker has the node class SaveImage.",
    "target": _HASH,
    "tenant": "acme",
    "tenant_id": "acme",
    "token": "cfe_c2VjcmV0",
    "token_id": "token-1",
    "type": "image/png",
    "until": _AT + 86400,
    "url": "https://example.com/hooks/comfyfleet",
    "uses": 10,
    "uses_left": 9,
    "webhook": "wh_1",
    "webhook_id": "wh_1",
    "worker_id": "gpu-a",
    "workflow": _WORKFLOW,
    "workflow_hash": _HASH,
    "AuditView.action": "revoke_key",
    "BlockBody.reason": "out_of_memory",
    "DeliveryView.id": "delivery-1",
    "EnrolmentView.id": "token-1",
    "FailBody.failure": {"kind": "out_of_memory", "message": "CUDA out of memory", "node_id": "1"},
    "FileDetails.id": "file-1",
    "FileGrant.url": _LINK,
    "FileView.id": "file-1",
    "FindingView.kind": "old_hold",
    "FindingView.message": "Credits are held for a job that the store does not know.",
    "GrantView.id": "invoice-17",
    "KeyView.id": "key-1",
    "LeaseRef.token": "b2XkQ0",
    "ReportAnswer.status": "completed",
    "RoundReceipt.status": "completed",
    "WebhookTested.id": "delivery-1",
    "WebhookTested.is_delivered": True,
    "WebhookView.events": ["completed", "failed", "cancelled"],
    "WebhookView.id": "wh_1",
    "WorkerBody.id": "gpu-a",
    "WorkerDetails.id": "gpu-a",
    "delivery_id": "delivery-1",
    "status": "queued",
}
"""By property, or by struct and property: what examples show."""

BODIES: dict[str, Any] = {
    "BatchAnswer": {
        "items": [{"status": 201, "job": {"id": _JOB, "status": "queued", "workflow_hash": _HASH, "jobId": _JOB}}],
        "accepted": 1,
        "refused": 0,
    },
    "BatchBody": {"jobs": [{"workflow": _WORKFLOW}, {"workflow": _WORKFLOW, "priority": 10}]},
    "CancelRequest": {"reason": "not needed any more"},
    "CompleteBody": {
        "lease": {"job_id": _JOB, "round": 1, "number": 1, "epoch": 1, "token": "b2XkQ0"},
        "result": {"files": [{"node_id": "2", "filename": "demo_00001_.png", "kind": "images"}]},
        "seconds": 12.5,
    },
    "CommandsAnswer": {"commands": [{"action": "cancel", "job_id": _JOB, "lease_number": 1}]},
    "CreatedKey": {"id": "key-1", "role": "tenant", "created_at": _AT, "tenant": "acme", "key": "cfk_c2VjcmV0"},
    "EnrolmentBody": {"uses": 10, "expires_in_s": 3600},
    "FileBody": {"name": "portrait.png", "type": "image/png", "size": 24576, "sha256": _HASH},
    "HealthBody": {"status": "ok", "version": "0.1.0"},
    "KeyBody": {"role": "tenant", "name": "web shop", "tenant": "acme"},
    "MoveBody": {"database": "default"},
    "ServiceList": {
        "services": [{"name": "simulated", "workers": 1, "payload_schema": {"type": "object"}}],
    },
    "PayloadBody": {"id": _JOB, "payload": {"workflow": _WORKFLOW}, "service": "comfyui", "priority": 10},
    "ProgressBody": {"id": _JOB, "status": "leased", "percentage": 40.0, "node": "1", "worker_id": "gpu-a"},
    "PurgeBody": {"before": _AT, "limit": 1000},
    "ResultBody": {
        "id": _JOB,
        "status": "completed",
        "result": {"files": [{"node_id": "2", "filename": "demo_00001_.png", "kind": "images"}]},
    },
    "RotateBody": {"overlap_s": 3600},
    "SecretBody": {"overlap_s": 86400},
    "SubmitBody": {"workflow": _WORKFLOW, "priority": 10, "metadata": {"order": "17"}},
    "TenantBody": {"id": "acme", "price": {"by": "flat", "credits": 10}, "caps": {"max_running": 4}},
    "TenantChange": {"weight": 2.0},
    "TenantView": {
        "id": "acme", "database": "default", "pool": "default", "state": "active", "created_at": _AT, "name": "Acme",
        "price": {"by": "flat", "credits": 10}, "weight": 1.0, "tier": 0, "isolation": "none", "location": {},
        "allows_direct": False, "node_classes": None, "denied_node_classes": [], "models": None,
        "denied_models": [], "caps": {"max_running": 4},
    },
    "WebhookChange": {"name": "orders"},
}  # fmt: skip
"""By struct: the whole example."""


@functools.cache
def hints_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


@functools.cache
def example_of(kind: Any) -> Any:
    """An example of a body or an answer, as JSON."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if kind.__name__ in BODIES:
            return BODIES[kind.__name__]
        hints = hints_of(kind)
        return {
            field.encode_name: value_of(kind.__name__, field.encode_name, hints[field.name])
            for field in msgspec.structs.fields(kind)
            if field.required
        }
    return _by_type(kind)


def value_of(struct: str, field: str, kind: Any) -> Any:
    for name in (f"{struct}.{field}", field):
        if name in VALUES and _fits(VALUES[name], kind):
            return VALUES[name]
    return example_of(kind)


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _by_type(kind: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind)).value
    if origin is typing.Literal:
        return inner[0]
    if origin in (typing.Union, types.UnionType):
        return example_of(inner[0])
    if origin in (tuple, list, frozenset):
        return [example_of(inner[0])]
    if origin is dict or kind is dict:
        return {}
    return {bool: False, int: 1, float: 1.0}.get(kind, "text")
