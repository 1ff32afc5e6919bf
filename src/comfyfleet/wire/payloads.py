"""What was asked for with a job, as it can be read and submitted again."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from comfyfleet.model.job import Job
from comfyfleet.model.requirement import Requirements
from comfyfleet.model.webhook import Webhook
from comfyfleet.wire.bodies import (
    InputBody,
    PreferencesBody,
    RequirementsBody,
    SubmitBody,
    TimeoutsBody,
    WebhookBody,
)
from comfyfleet.wire.webhooks import shown

B = TypeVar("B", bound=msgspec.Struct)

_LEARNED = ("slow_worker_classes", "refused_by", "needs_hub")


class PayloadBody(SubmitBody, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The fields of a submission, beside the job's id. A workflow of the editor is told as it was converted."""

    id: str
    seeds: dict[str, int] | None = None
    """By node id: what a seed of -1 became."""


def payload_body(job: Job) -> PayloadBody:
    asked = job.payload
    return PayloadBody(
        id=job.job_id,
        payload={"workflow": asked.workflow},
        tenant=job.tenant,
        service=asked.requirements.service,
        provider=asked.requirements.provider,
        reference=job.reference,
        inputs=tuple(
            InputBody(each.node, each.input, each.file, each.job, each.output, each.index, each.kind)
            for each in asked.inputs
        ),
        priority=asked.priority if job.priority is None else job.priority,
        urgency=asked.urgency,
        not_before=asked.not_before,
        deadline=asked.deadline,
        on_deadline=asked.on_deadline,
        after=asked.after,
        requirements=_convert(asked_for(asked.requirements), RequirementsBody),
        preferences=_same(asked.preferences, PreferencesBody),
        metadata=asked.metadata,
        max_attempts=asked.max_attempts,
        retry_delay_s=asked.retry_delay_s,
        timeouts=_same(asked.timeouts, TimeoutsBody),
        include_outputs=asked.include_outputs,
        webhook=_webhook(asked.webhook),
        require_workable=asked.require_workable,
        seeds=job.seeds,
    )


def asked_for(needs: Requirements) -> dict[str, Any]:
    """What a caller said that a job needs, beside its service."""
    found: dict[str, Any] = msgspec.to_builtins(needs)
    for name in ("service", "provider", *_LEARNED):
        found.pop(name, None)
    if isinstance(hardware := found.get("hardware"), dict):
        hardware.pop("gpu_memory_above_gb", None)
    return found


def _same(asked: msgspec.Struct, kind: type[B]) -> B | None:
    return _convert(msgspec.to_builtins(asked), kind)


def _convert(found: dict[str, Any], kind: type[B]) -> B | None:
    """None: nothing was said of it."""
    return msgspec.convert(found, kind) if found else None


def _webhook(webhook: Webhook | None) -> WebhookBody | None:
    """Without its query, which may hold a secret."""
    return None if webhook is None else WebhookBody(shown(webhook.url), webhook.events)
