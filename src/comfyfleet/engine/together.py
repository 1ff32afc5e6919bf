"""A job's dispatch and its record, read one after the other and yet of one moment, as far as its end is concerned.

A store writes both in one step and is asked for each by itself. Whoever tells of an end and of what came of it must not
take the end from before a change and the result from after it, or the other way round.
"""

from __future__ import annotations

from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.ports import Store

_TRIES = 20


async def read_together(
    store: Store, job_id: JobId, tenant: TenantId | None = None
) -> tuple[Dispatch, Job] | None:
    """None: there is no such job (any more), or it is not this tenant's, whose database is not asked then."""
    for _ in range(_TRIES):
        dispatch = await store.load(job_id)
        if dispatch is None or tenant not in (None, dispatch.tenant):
            return None
        job = await store.records.get(job_id)
        if job is None:
            return None
        if _is_of_one_moment(dispatch, job):
            return dispatch, job
    raise Fault(f"job {job_id} changes faster than it can be read; try again")


def _is_of_one_moment(dispatch: Dispatch, job: Job) -> bool:
    """Both are open, or both tell of the same end."""
    if not dispatch.phase.is_final and not job.phase.is_final:
        return True
    return (dispatch.phase, dispatch.round) == (job.phase, job.round)
