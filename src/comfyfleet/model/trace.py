"""Which trace a job belongs to: the caller's, by the W3C header `traceparent`, else one that follows from the job's id.

So every job has one, nothing need be made up or kept for a caller who has none, and every process finds the same.
"""

from __future__ import annotations

import hashlib
import re

from comfyfleet.model.ids import JobId

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
