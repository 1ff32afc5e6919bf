"""What workers reported of attempts that failed, in the servers' own words. Each function is one transaction."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from comfyfleet.model.failure import FailureText
from comfyfleet.model.ids import JobId
from comfyfleet.model.ledger import HoldId
from comfyfleet.stores.packing import pack
from comfyfleet.tenancy.databases.rounds import check_open
from comfyfleet.tenancy.databases.work import Work, row, rows

_texts = msgspec.msgpack.Decoder(FailureText)

_KEEP = """
INSERT INTO @failures (job_id, round, attempt_id, failure, at)
SELECT job_id, round, :attempt_id, :failure, :at FROM @rounds
WHERE job_id = :job_id AND round = :round AND phase = 'open'
ON CONFLICT (job_id, round, attempt_id) DO UPDATE SET failure = excluded.failure, at = excluded.at RETURNING job_id
"""


def keep_failure(hold_id: HoldId, attempt_id: str, text: FailureText, at: float) -> Work[bool]:
    yield from check_open(hold_id)
    named = {"job_id": hold_id.job_id, "round": hold_id.round, "attempt_id": attempt_id}
    return (yield from row(_KEEP, **named, failure=pack(text), at=at)) is not None


def failures_of(job_ids: Sequence[JobId]) -> Work[dict[str, FailureText]]:
    if not job_ids:
        return {}
    values = {f"job_{place}": job_id for place, job_id in enumerate(job_ids)}
    places = ", ".join(f":{name}" for name in values)
    found = yield from rows(f"SELECT attempt_id, failure FROM @failures WHERE job_id IN ({places})", **values)
    return {attempt_id: _texts.decode(failure) for attempt_id, failure in found}
