"""A page of jobs by what a caller asks for.

Stores page by tenant and phase, in order of submission. Whatever else is asked for is looked for here, page by page and
within a bound: a page that found too little in it says where to go on. Ids grow with time, so a list that begins at a
time begins at the first id of that time and looks at nothing before.
"""

from __future__ import annotations

import msgspec

from comfyfleet.model.calls import JobFilter, JobPage
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Job
from comfyfleet.ports import Records

MAX_LOOKED_AT = 2_000
"""Records a call looks at. Each is read whole, payload and all."""

_PAGE = 250


async def list_jobs(records: Records, wanted: JobFilter, limit: int, after: JobId | None) -> JobPage:
    found: list[Job] = []
    looked_at = 0
    if wanted.submitted_after is not None:
        first = _first_id_at(wanted.submitted_after)
        after = first if after is None else max(after, first)
    looks_inside = bool(wanted.workflow_hash or wanted.metadata)
    while looked_at < MAX_LOOKED_AT:
        size = _PAGE if looks_inside else limit - len(found) + 1
        page = await records.listing(tenant=wanted.tenant, phase=wanted.phase, limit=size, after=after)
        for job in page:
            if wanted.submitted_before is not None and job.submitted_at >= wanted.submitted_before:
                return JobPage(tuple(found))
            if _is_wanted(job, wanted):
                if len(found) == limit:
                    return JobPage(tuple(found), after)
                found.append(job)
            after = job.job_id
        looked_at += len(page)
        if len(page) < size:
            return JobPage(tuple(found))
    return JobPage(tuple(found), after)


def _is_wanted(job: Job, wanted: JobFilter) -> bool:
    if wanted.workflow_hash is not None and job.workflow_hash != wanted.workflow_hash:
        return False
    if wanted.submitted_after is not None and job.submitted_at < wanted.submitted_after:
        return False
    metadata = job.payload.metadata or {}
    return all(name in metadata and _text(metadata[name]) == text for name, text in wanted.metadata.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _first_id_at(time: float) -> JobId:
    """Below every version 7 UUID of that millisecond and after; above every one before."""
    milliseconds = f"{min(max(0, int(time * 1000)), (1 << 48) - 1):012x}"
    return JobId(f"{milliseconds[:8]}-{milliseconds[8:]}-0000-0000-000000000000")
