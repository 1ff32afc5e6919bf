"""Lists jobs by a filter.

Stores page by tenant and phase. This module applies the other conditions page by page within a bound, and
returns where the next call continues. Ids grow with time, so a list from a time starts at the first id of
that time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Sequence

import msgspec

from comfyfleet.model.calls import JobFilter, JobPage
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Job
from comfyfleet.ports import RecordQuery, Records

MAX_RECORDS_READ = 2_000
"""Records that one call reads; each comes with its payload."""
_TIME_LIMIT_S = 2.0
"""A call that takes this long returns where to continue."""

_PAGE = 20
"""Small, so that other requests in the process are not delayed."""
_OUT_OF_ORDER_S = 5.0
"""Stores list jobs in the order in which they were written. A submission whose write took long is listed after jobs
that were submitted later, at most by this time."""


async def list_jobs(
    records: Records,
    wanted: JobFilter,
    limit: int,
    after: JobId | None,
    *,
    newest_first: bool = False,
    select: Callable[[Sequence[Job]], Awaitable[Container[JobId]]] | None = None,
) -> JobPage:
    """The next `limit` jobs that match, and the cursor to go on if one call did not read them all.

    `select`: returns the ids of the jobs of a page that match conditions which need more than the record."""
    found: list[Job] = []
    records_read = 0
    after = _start(wanted, after, newest_first)
    # Stores cannot apply these conditions: most of a page may not match.
    filters_records = bool(wanted.workflow_hash or wanted.metadata or select)
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + _TIME_LIMIT_S
    while records_read < MAX_RECORDS_READ and (loop.time() < ends_at or not records_read):
        size = _PAGE if filters_records else limit - len(found) + 1
        page = await records.listing(
            RecordQuery(
                tenant=wanted.tenant, phase=wanted.phase, limit=size, after=after, newest_first=newest_first
            )
        )
        chosen = None if select is None else await select(page)
        for job in page:
            if _is_past(job, wanted, newest_first):
                return JobPage(tuple(found))
            if _is_wanted(job, wanted) and (chosen is None or job.job_id in chosen):
                if len(found) == limit:
                    return JobPage(tuple(found), after)
                found.append(job)
            after = job.job_id
        records_read += len(page)
        if len(page) < size:
            return JobPage(tuple(found))
        # An in-process store never yields, and there may be a hundred pages.
        await asyncio.sleep(0)
    return JobPage(tuple(found), after)


def _start(wanted: JobFilter, after: JobId | None, newest_first: bool) -> JobId | None:
    """The id to start after, so that jobs outside the time range are not read."""
    if after is not None:
        return after
    if not newest_first:
        return None if wanted.submitted_after is None else _first_id_at(wanted.submitted_after)
    # Include the whole last millisecond.
    return None if wanted.submitted_before is None else _first_id_at(wanted.submitted_before + 0.001)


def _is_past(job: Job, wanted: JobFilter, newest_first: bool) -> bool:
    """Whether no wanted job can follow."""
    if newest_first:
        after = wanted.submitted_after
        return after is not None and job.submitted_at < after - _OUT_OF_ORDER_S
    before = wanted.submitted_before
    return before is not None and job.submitted_at >= before + _OUT_OF_ORDER_S


def _is_wanted(job: Job, wanted: JobFilter) -> bool:
    if wanted.workflow_hash is not None and job.workflow_hash != wanted.workflow_hash:
        return False
    if wanted.submitted_after is not None and job.submitted_at < wanted.submitted_after:
        return False
    if wanted.submitted_before is not None and job.submitted_at >= wanted.submitted_before:
        return False
    metadata = job.payload.metadata or {}
    return all(name in metadata and _text(metadata[name]) == text for name, text in wanted.metadata.items())


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _first_id_at(time: float) -> JobId:
    """Sorts before every version 7 UUID from that millisecond on, and after every earlier one."""
    milliseconds = f"{min(max(0, int(time * 1000)), (1 << 48) - 1):012x}"
    return JobId(f"{milliseconds[:8]}-{milliseconds[8:]}-0000-0000-000000000000")


async def records_of(records: Records, job_ids: Sequence[JobId]) -> list[Job]:
    """The records that exist. A tenant database that is away does not hide the others."""
    if (many := getattr(records, "many", None)) is not None:
        found: list[Job] = await many(job_ids)
        return found
    return [job for job_id in job_ids if (job := await records.get(job_id)) is not None]
