"""Encrypted values in the place of a payload, a result or a failure.

An encrypted value has the form of a plain one, so every store can hold it without change. The marker `NAME` cannot
collide with a real node id, because its value has no class.
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
    return Submission(encrypted_data(encrypted))


def encrypted_result(encrypted: bytes) -> JobResult:
    return JobResult(encrypted_data(encrypted))


def encrypted_failure(failure: Failure, encrypted: bytes) -> Failure:
    """The kind stays readable, because failure handling depends on it."""
    return Failure(failure.kind, "encrypted", node_errors=encrypted_data(encrypted))


def encrypted_data(encrypted: bytes) -> dict[str, Any]:
    return {NAME: {_INSIDE: encrypted}}


def in_payload(payload: Submission) -> bytes | None:
    return found_in(payload.workflow)


def in_result(result: JobResult) -> bytes | None:
    return found_in(result.outputs)


def in_failure(failure: Failure) -> bytes | None:
    return found_in(failure.node_errors)


def found_in(values: Mapping[str, Any] | None) -> bytes | None:
    """The encrypted bytes, if `values` holds nothing else. JSON stores return them as base64 text."""
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
    """The job without the parts that cannot be decrypted."""
    payload = job.payload if in_payload(job.payload) is None else Submission({}, reference=job.reference)
    result = None if job.result is None or in_result(job.result) is not None else job.result
    return msgspec.structs.replace(job, payload=payload, result=result, unreadable=why)
