"""Classifies what Comfy Cloud says: whose fault it is, and whether it may have cost money.

The tables follow the documentation and the recorded proxy of the same interface; nobody has compared them with an
account. `policy` decides what follows from a kind of failure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from comfyfleet.model.failure import Failure, FailureKind, ServiceBusy, ServiceFailed
from comfyfleet.worker.connectors.comfy_cloud.api import CloudAnswer
from comfyfleet.worker.connectors.comfyui import failures as comfyui_failures

_MAX_WORDS = 2_000
_MAX_TRACEBACK = 60

_PAYMENT_CODES = (
    "insufficient_credits",
    "payment_required",
    "free_tier",
    "partner_node_payment_required",
    "subscription",
)
_WAIT_CODES = ("queue_full", "queue_limit", "rate_limited", "deployment_not_ready", "too_many")
_ACCOUNT_ERRORS = ("InsufficientFundsError", "InactiveSubscriptionError")
_NOT_FOUND_NODE = re.compile(r"Node '(?P<name>[^']+)' not found")
_QUOTED_NAME = re.compile(r"['\"`](?P<name>[^'\"`]{1,300})['\"`]")


class Refusal429(Enum):
    """One status has two meanings."""

    WAIT = "wait"
    PAYMENT = "payment"


def fail(kind: FailureKind, message: str, **details: Any) -> ServiceFailed:
    return ServiceFailed(Failure(kind, message, **details))


def not_begun(message: str) -> ServiceBusy:
    """No job was made, and another try later may succeed. After this kind the agent does not ask how the run ended,
    which would only add requests to a service that limits them."""
    return ServiceBusy(Failure(FailureKind.INTERRUPTED, message))


def unknown_outcome(mark: str, why: str, job_id: str | None = None) -> ServiceFailed:
    """For a run that may have been accepted and paid. The operator decides about another one."""
    where = (
        f"look for the job {job_id} at Comfy Cloud"
        if job_id is not None
        else f"look in the list of jobs at Comfy Cloud for the outputs named {mark}"
    )
    return fail(
        FailureKind.OUTCOME_UNKNOWN,
        f"{why} It may have run and cost credits, so it is not repeated: {where}. If it is not there, retry this job.",
    )


def meaning_of_429(answer: CloudAnswer) -> Refusal429:
    code, message = answer.code.lower(), answer.message.lower()
    if any(each in code for each in _WAIT_CODES):
        return Refusal429.WAIT
    if any(each in code for each in _PAYMENT_CODES):
        return Refusal429.PAYMENT
    # v1 documents this status only as "subscription inactive".
    if answer.retry_after_s is None and ("subscription" in message or "has not paid" in message):
        return Refusal429.PAYMENT
    return Refusal429.WAIT


def refused_workflow(answer: CloudAnswer) -> Failure | None:
    """None: the answer says nothing about the workflow."""
    message = answer.message or f"Comfy Cloud refused the workflow (status {answer.status})"
    if answer.status == 413:
        return Failure(FailureKind.INVALID_WORKFLOW, f"{message}. The workflow is too large for Comfy Cloud.")
    if answer.status not in (400, 422):
        return None
    if answer.code == "missing_asset":
        return Failure(FailureKind.MISSING_INPUT, message)
    details = answer.error.get("details")
    errors = details.get("node_errors") if isinstance(details, Mapping) else answer.error.get("node_errors")
    if isinstance(errors, Mapping) and errors:
        return comfyui_failures.invalid_nodes(_in_full(errors), message)
    if (found := _NOT_FOUND_NODE.search(message)) is not None:
        name = found["name"]
        return Failure(FailureKind.MISSING_NODE, message, node_type=name, missing=(name,))
    return Failure(FailureKind.INVALID_WORKFLOW, message)


def _in_full(errors: Mapping[str, Any]) -> dict[str, Any]:
    """The specification shows lists of field and reason; the recorded proxy sends ComfyUI's own form."""
    full: dict[str, Any] = {}
    for node_id, entry in errors.items():
        if not isinstance(entry, list):
            full[node_id] = entry
            continue
        found = [each for each in entry if isinstance(each, Mapping)]
        full[node_id] = {
            "class_type": None,
            "errors": [
                {
                    "type": str(each.get("reason") or "invalid"),
                    "message": str(each.get("reason") or "invalid"),
                    "details": str(each.get("field") or ""),
                    "extra_info": {"input_name": str(each.get("field") or "")},
                }
                for each in found
            ],
        }
    return full


def refused_upload(answer: CloudAnswer, name: str) -> Failure:
    words = answer.message or f"status {answer.status}"
    return Failure(
        FailureKind.MISSING_INPUT,
        f"Comfy Cloud refused the input file {name!r}: {words}"[:_MAX_WORDS],
        missing=(name,),
    )


def not_comfy_cloud(answer: CloudAnswer, what: str) -> ServiceFailed:
    return fail(
        FailureKind.DEAD_WORKER,
        f"What answers {what} is not Comfy Cloud (status {answer.status}). Is the address right?",
    )


class RunFailure(msgspec.Struct, frozen=True):
    failure: Failure
    is_of_account: bool = False
    """The account lacks money or a subscription, so the job is not to blame."""


def failed_run(error: Any) -> RunFailure:
    """For the `error` of a failed job."""
    found = error if isinstance(error, Mapping) else {}
    code, message = _text(found.get("code")), _text(found.get("message")).strip()
    traceback = _text(found.get("traceback")).splitlines()
    named = " ".join((code, message[:_MAX_WORDS], *traceback[-1:]))
    failure = comfyui_failures.execution_error(
        {
            "exception_type": code or None,
            "exception_message": message or "The run failed, and Comfy Cloud does not say why.",
            "node_id": found.get("node_id"),
            "node_type": found.get("class_type"),
            "traceback": traceback[-_MAX_TRACEBACK:],
        }
    )
    kind, missing = failure.kind, failure.missing
    if "OOMError" in named:
        kind = FailureKind.OUT_OF_MEMORY
    elif "ModelDownloadError" in named:
        kind, missing = FailureKind.MISSING_MODEL, missing or _names_in(message)
    elif "ImageDownloadError" in named:
        kind, missing = FailureKind.MISSING_INPUT, missing or _names_in(message)
    elif "ValidationError" in named:
        kind = FailureKind.INVALID_WORKFLOW
    elif "timeout" in code.lower() or "time_limit" in code.lower():
        kind = FailureKind.TOTAL_TIMEOUT
    changed = msgspec.structs.replace(failure, kind=kind, missing=missing)
    return RunFailure(changed, any(each in named for each in _ACCOUNT_ERRORS))


def _names_in(message: str) -> tuple[str, ...]:
    return tuple(match["name"] for match in _QUOTED_NAME.finditer(message))[:5]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)[:_MAX_WORDS]
