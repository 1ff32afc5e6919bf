"""What stands in the place of a payload, a result or a failure that is sealed: bytes that only who has the key opens.

A sealed value keeps the form of a plain one, so every store keeps it without knowing. A workflow, an output or a fact
never has the name it stands under: a node without a class is no node.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

from comfyfleet.model.failure import Failure
from comfyfleet.model.job import Job, JobResult, Submission

NAME = "comfyfleet:sealed"
_INSIDE = "value"


def encrypted_payload(encrypted: bytes) -> Submission:
    return Submission({NAME: {_INSIDE: encrypted}})


def encrypted_result(encrypted: bytes) -> JobResult:
    return JobResult({NAME: {_INSIDE: encrypted}})


def encrypted_failure(failure: Failure, encrypted: bytes) -> Failure:
    """Its kind stays to be read: what follows from a failure follows from that."""
    return Failure(failure.kind, "sealed", node_errors={NAME: {_INSIDE: encrypted}})


def encrypted_data(encrypted: bytes) -> dict[str, Any]:
    return {NAME: {_INSIDE: encrypted}}


def in_payload(payload: Submission) -> bytes | None:
    return found_in(payload.workflow)


def in_result(result: JobResult) -> bytes | None:
    return found_in(result.outputs)


def in_failure(failure: Failure) -> bytes | None:
    return found_in(failure.node_errors)


def found_in(values: Mapping[str, Any] | None) -> bytes | None:
    """The sealed bytes where nothing else is. A store that keeps JSON gives them back as text."""
    if not values or len(values) > 1 or NAME not in values:
        return None
    inside = values[NAME]
    value = inside.get(_INSIDE) if isinstance(inside, dict) and len(inside) == 1 else None
    if isinstance(value, str):
        try:
            return binascii.a2b_base64(value, strict_mode=True)
        except ValueError:
            return None
    return value if isinstance(value, bytes) else None


def unreadable(job: Job, why: str) -> Job:
    """Without what cannot be opened; all else that is known of it stays."""
    payload = job.payload if in_payload(job.payload) is None else Submission({}, reference=job.reference)
    result = None if job.result is None or in_result(job.result) is not None else job.result
    return msgspec.structs.replace(job, payload=payload, result=result, unreadable=why)
