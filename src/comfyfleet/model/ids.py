"""Id types, prompt ids and trace ids. Each id is a plain string at run time; the type checker tells them apart.

The trace of a job is the caller's W3C `traceparent`, else it follows from the job id, so every process finds the same.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from typing import NewType

JobId = NewType("JobId", str)
WorkerId = NewType("WorkerId", str)
TenantId = NewType("TenantId", str)
WorkflowHash = NewType("WorkflowHash", str)
ClassKey = NewType("ClassKey", str)
ProfileKey = NewType("ProfileKey", str)
PollId = NewType("PollId", str)
LeaseToken = NewType("LeaseToken", str)

DEFAULT_TENANT = TenantId("default")

_ATTEMPTS = uuid.UUID("6b0f3f0c-5d0a-5c57-9f43-2c7f1e6c0a11")


def prompt_id_of(attempt_id: str) -> str:
    """The id under which an attempt runs on a server: a lower-case UUID, which every ComfyUI accepts.

    It depends only on the attempt, so any agent can look up the attempt's state.
    """
    return str(uuid.uuid5(_ATTEMPTS, attempt_id))


_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.{0,100})?"
)


def parse_traceparent(given: str | None) -> str | None:
    """The valid `traceparent`, or None: a wrong one is ignored, never refused."""
    if given is None or _TRACEPARENT.fullmatch(text := given.strip()) is None:
        return None
    # A later version may have more fields, which this version does not understand.
    return text[:55]


def traceparent_of(job_id: JobId, given: str | None) -> str:
    """The caller's trace, else one that follows from the job id and is not sampled."""
    if given is not None:
        return given
    digest = hashlib.sha256(job_id.encode()).hexdigest()
    plain = job_id.replace("-", "").lower()
    own = plain if re.fullmatch(r"(?!0{32})[0-9a-f]{32}", plain) else digest[:32]
    return f"00-{own}-{digest[32:48]}-00"


def trace_id_of(traceparent: str) -> str:
    return traceparent[3:35]
