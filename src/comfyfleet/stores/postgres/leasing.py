"""Choosing and leasing in PostgreSQL: a look at the lanes, then a lock on the first job nobody else is taking.

A job that another transaction holds at this moment is stepped over (SKIP LOCKED), never waited for: it is being leased,
or changed. Priority therefore holds except against a lease in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from comfyfleet.model.dispatch import LeaseOffer, Written
from comfyfleet.model.ids import JobId
from comfyfleet.ports import Peek
from comfyfleet.stores.postgres import lanes, rows
from comfyfleet.stores.postgres.lanes import Look, Seen
from comfyfleet.stores.postgres.pool import Step

# How many of the first jobs a lease looks at; more only when others are taking all of those.
FIRST_LOOK = 8
MAX_LOOK = 2048

_TAKE = (
    lanes.GATE
    + """
SELECT d.envelope, d.fact_count, d.job_phase, d.lane_id, gate.now
FROM gate, comfyfleet.dispatches d
JOIN comfyfleet.lanes l ON l.lane_id = d.lane_id
JOIN comfyfleet.profile_classes p ON p.class_key = l.class_key AND p.profile = %(profile)s
WHERE d.job_id = %(job_id)s AND d.job_id <> ALL (gate.blocked) AND l.workflow_hash <> ALL (gate.blocked)
FOR UPDATE OF d SKIP LOCKED
"""
)

# A job may have moved to another class since it was seen; its workflow never changes.
_TAKE_FIRST = """
SELECT d.envelope, d.fact_count, d.job_phase, d.lane_id
FROM unnest(%(jobs)s::text[]) WITH ORDINALITY AS c (job_id, place)
JOIN comfyfleet.dispatches d ON d.job_id = c.job_id
JOIN comfyfleet.lanes l ON l.lane_id = d.lane_id
JOIN comfyfleet.profile_classes p ON p.class_key = l.class_key AND p.profile = %(profile)s
ORDER BY c.place LIMIT 1 FOR UPDATE OF d SKIP LOCKED
"""


async def peek(step: Step, query: Peek, test_now: float | None) -> Seen:
    look = Look(
        query.worker_id,
        query.profile,
        test_now,
        slots=query.slots,
        lanes=query.lanes,
        quantum_s=query.quantum_s,
        skip=query.skip,
    )
    return await lanes.window(step, look)


async def lease(
    step: Step, job_id: JobId, offer: LeaseOffer, epoch: int, test_now: float | None
) -> Written | None:
    values = {
        "job_id": job_id,
        "worker_id": offer.worker_id,
        "profile": offer.profile,
        "test_now": test_now,
    }
    row = await step.row(_TAKE, values)
    if row is None:
        return None
    *found, now = row
    return await rows.grant(step, rows.held(found), offer, epoch, now)


async def lease_next(
    step: Step, offer: LeaseOffer, epoch: int, test_now: float | None
) -> tuple[Written | None, Sequence[int]]:
    """The lease, if any, and the lanes that want tidying."""
    slots = FIRST_LOOK
    while True:
        seen = await lanes.window(step, Look(offer.worker_id, offer.profile, test_now, slots))
        if not seen.candidates:
            return None, seen.untidy
        jobs = [candidate.job_id for candidate in seen.candidates]
        row = await step.row(_TAKE_FIRST, {"jobs": jobs, "profile": offer.profile})
        if row is not None:
            return await rows.grant(step, rows.held(row), offer, epoch, seen.now), seen.untidy
        # Others hold all of those. They will be gone from the lanes in a moment, or free again.
        slots = min(slots * 4, MAX_LOOK)
