"""What a worker reported of a failure: its words lie in the tenant's database, and the central store has in their place
where they are found. Which kind of failure it was, and what policy goes by, stays there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from comfyfleet.model.dispatch import Attempt, Write, Written
from comfyfleet.model.fact import Fact, FactDraft, FactKind
from comfyfleet.model.failure import Failure, FailureKind
from comfyfleet.model.job import Job
from comfyfleet.tenancy.database import FailureText

_ELSEWHERE = "what was said of it lies in its tenant's database: "
_TELLING = (FactKind.FAILED, FactKind.RETRYING)
_PUBLIC = ("kind", "worker_id", "lease", "not_before")
"""Of the data of a fact."""

_OWN = (FailureKind.LEASE_EXPIRED, FailureKind.TOTAL_TIMEOUT)
"""No worker reports these: an engine finds them out, also while a tenant's database is away."""

Texts = Mapping[str, FailureText]
"""By the id of the attempt that was reported."""


def text_of(write: Write) -> FailureText | None:
    """What is private in it. What the product itself says of a lease that ran out, or of the job's time, is not."""
    end = write.attempt_end
    if end is None or end.failure is None or end.failure.kind in _OWN:
        return None
    data = next((fact.data for fact in write.facts if fact.kind in _TELLING), None)
    return FailureText(end.failure, data or {})


def without_text(write: Write, attempt_id: str) -> Write:
    job, end = write.job, write.attempt_end
    if job is not None and isinstance(failure := job.get("failure"), Failure):
        job = {**job, "failure": _withheld(failure, attempt_id)}
    if end is not None and end.failure is not None:
        end = msgspec.structs.replace(end, failure=_withheld(end.failure, attempt_id))
    facts = tuple(
        FactDraft(each.kind, _withheld_data(each.data, attempt_id)) if each.kind in _TELLING else each
        for each in write.facts
    )
    return msgspec.structs.replace(write, job=job, attempt_end=end, facts=facts)


def told(written: Written, write: Write) -> Written:
    """As it was asked for: whoever hears of it now need not look for the words."""
    facts = tuple(
        msgspec.structs.replace(fact, data=draft.data)
        for fact, draft in zip(written.facts, write.facts, strict=True)
    )
    return Written(written.dispatch, facts)


def _withheld(failure: Failure, attempt_id: str) -> Failure:
    return Failure(
        failure.kind, _ELSEWHERE + attempt_id, vram_gb=failure.vram_gb, server_died=failure.server_died
    )


def _withheld_data(data: dict[str, Any] | None, attempt_id: str) -> dict[str, Any]:
    public = {name: value for name, value in (data or {}).items() if name in _PUBLIC}
    return {**public, "message": _ELSEWHERE + attempt_id}


# on the way out


def place_of(value: Job | Attempt | Fact) -> str | None:
    """The attempt under which its words are found, where they lie elsewhere."""
    if isinstance(value, Fact):
        message = (value.data or {}).get("message") if value.kind in _TELLING else None
    else:
        message = None if value.failure is None else value.failure.message
    if not isinstance(message, str) or not message.startswith(_ELSEWHERE):
        return None
    return message.removeprefix(_ELSEWHERE)


def job_with(job: Job, texts: Texts) -> Job:
    found = texts.get(place_of(job) or "")
    return job if found is None else msgspec.structs.replace(job, failure=found.failure)


def attempt_with(attempt: Attempt, texts: Texts) -> Attempt:
    found = texts.get(place_of(attempt) or "")
    return attempt if found is None else msgspec.structs.replace(attempt, failure=found.failure)


def fact_with(fact: Fact, texts: Texts) -> Fact:
    found = texts.get(place_of(fact) or "")
    return fact if found is None else msgspec.structs.replace(fact, data=found.data)
