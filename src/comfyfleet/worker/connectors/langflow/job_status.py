"""What LangFlow says about a background job, read into one state.

The table follows recordings of a real server: a failed run answers with status 500, which is no fault of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.worker.connectors.comfyui.api import ApiAnswer
from comfyfleet.worker.connectors.langflow import failures

PROBE = "comfyfleet-probe"
"""No component and no session has this name, so a submit with it runs nothing."""


class JobState(Enum):
    QUEUED = "queued"
    RUNNING = "in_progress"
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    FAILED = "failed"
    UNCLEAR = "unclear"
    """It failed without a reason. It was just stopped, or the server was shut down."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The server has no such job."""

    @property
    def is_over(self) -> bool:
        return self not in (JobState.QUEUED, JobState.RUNNING, JobState.SUSPENDED)


class JobStatus(msgspec.Struct, frozen=True):
    state: JobState
    body: Mapping[str, Any] = {}
    failure: Failure | None = None


def read_status(answer: ApiAnswer) -> JobStatus | None:
    """None: the answer says nothing about the job."""
    body = answer.body if isinstance(answer.body, Mapping) else {}
    detail = body.get("detail")
    detail = detail if isinstance(detail, Mapping) else {}
    match answer.status, detail.get("code"):
        case 200, _:
            return _read_state(body)
        case 500, "JOB_FAILED":
            failure = failures.failed_job(detail)
            return JobStatus(JobState.UNCLEAR if failure is None else JobState.FAILED, body, failure)
        case 408, "EXECUTION_TIMEOUT":
            words = failures.text_of(body)
            return JobStatus(
                JobState.FAILED,
                body,
                Failure(
                    FailureKind.NODE_ERROR,
                    f"LangFlow ended the run at its own time limit: {words}. Raise LANGFLOW_BACKGROUND_JOB_TIMEOUT "
                    "there, or shorten the flow.",
                ),
            )
        case 404, "JOB_NOT_FOUND":
            return JobStatus(JobState.UNKNOWN, body)
    return None


def is_probe(body: Mapping[str, Any]) -> bool:
    """Whether the answer is about a probe, completed or refused."""
    detail = body.get("detail")
    error = detail.get("error_detail") if isinstance(detail, Mapping) else None
    refused = error.get("session_id") if isinstance(error, Mapping) else None
    return PROBE in (body.get("session_id"), refused)


def _read_state(body: Mapping[str, Any]) -> JobStatus | None:
    try:
        state = JobState(body.get("status"))
    except ValueError:
        return None
    if state in (JobState.UNCLEAR, JobState.UNKNOWN):
        return None
    if state is JobState.FAILED or (state is JobState.COMPLETED and body.get("has_errors") is True):
        errors = body.get("errors")
        first = errors[0] if isinstance(errors, list) and errors else {}
        return JobStatus(JobState.FAILED, body, failures.run_error({"error": first}))
    return JobStatus(state, body)
