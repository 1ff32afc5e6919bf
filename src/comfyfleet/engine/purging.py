"""Forgets what has ended, a little at a time: a store that forgets thousands at once answers nobody else meanwhile."""

from __future__ import annotations

from comfyfleet.model.dispatch import TOMBSTONE_S, Dispatch, Phase
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.ids import JobId
from comfyfleet.ports import Moving, Store

_STEP = 200
_TRIES = 20


async def purge(store: Store, phase: Phase, before: float, limit: int) -> int:
    """How many went. Fewer than the limit: there are no more."""
    purged = 0
    while purged < limit:
        step = min(_STEP, limit - purged)
        gone = await store.purge(phase, before, step)
        purged += gone
        if gone < step:
            break
    return purged


async def ended_job(store: Store, job_id: JobId) -> Dispatch:
    """One that may be forgotten now."""
    dispatch = await store.load(job_id)
    if dispatch is None:
        raise Refusal(RefusalCode.NOT_FOUND, f"there is no job {job_id!r} (any more)")
    if not dispatch.phase.is_final:
        raise Refusal(
            RefusalCode.WRONG_PHASE,
            f"cannot delete a job that is {dispatch.phase.value}: cancel it first, and delete it once it has ended",
            phase=dispatch.phase.value,
        )
    if dispatch.is_apart:
        now = await store.now()
        left_s = TOMBSTONE_S if dispatch.settled_at is None else dispatch.settled_at + TOMBSTONE_S - now
        if left_s > 0:
            raise Refusal(
                RefusalCode.WRONG_PHASE,
                f"job {job_id!r} has only just ended and is being settled: delete it in {left_s:.0f} s",
                retry_after_s=left_s,
            )
    return dispatch


async def forget(store: Store, job_id: JobId) -> Dispatch:
    """A job that has ended, as it was."""
    moving: Moving | None = getattr(store, "moving", None)
    if moving is None:
        raise Refusal(RefusalCode.NOT_ALLOWED, "this store forgets jobs by their age alone: wait for it")
    for _ in range(_TRIES):
        dispatch = await ended_job(store, job_id)
        if (await moving.discard([dispatch]))[0]:
            return dispatch
    raise Fault(f"job {job_id!r} is being changed by others all the time; try again")
