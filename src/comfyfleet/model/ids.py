"""Names that must not be mixed up. Each is a plain string at run time; the type checker keeps them apart.

Which trace a job belongs to: the caller's, by the W3C header `traceparent`, else one that follows from the job's id.

So every job has one, nothing need be made up or kept for a caller who has none, and every process finds the same.
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
    """The id an attempt runs under on a server.

    It follows from the attempt alone, so that any agent can look up what became of it, and it has the one form
    every ComfyUI accepts: a canonical lower-case UUID.
    """
    return str(uuid.uuid5(_ATTEMPTS, attempt_id))


_FORM = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.{0,100})?"
)


def parse_traceparent(given: str | None) -> str | None:
    """As it was given, or None where it is not one: a trace is a help and never a reason to refuse."""
    if given is None or _FORM.fullmatch(text := given.strip()) is None:
        return None
    # A later version may have more at its end, which nobody here could pass on rightly.
    return text[:55]


def traceparent_of(job_id: JobId, given: str | None) -> str:
    """The trace of a job whose caller has none is its id, which is a UUID; not sampled, as nobody asked for it."""
    if given is not None:
        return given
    digest = hashlib.sha256(job_id.encode()).hexdigest()
    plain = job_id.replace("-", "").lower()
    own = plain if re.fullmatch(r"(?!0{32})[0-9a-f]{32}", plain) else digest[:32]
    return f"00-{own}-{digest[32:48]}-00"


def trace_id_of(traceparent: str) -> str:
    return traceparent[3:35]
