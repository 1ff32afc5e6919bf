"""Choosing and leasing in PostgreSQL: a look at the lanes, then a lock on the first job nobody else is taking.

A job that another transaction holds at this moment is stepped over (SKIP LOCKED), never waited for: it is being leased,
or changed. Priority therefore holds except against a lease in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from comfyfleet.model.dispatch import LeaseOffer, Written
from comfyfleet.model.ids import JobId
from comfyfleet.ports import Peek
from comfyfleet.stores.postgres import lanes, rows, shares
from comfyfleet.stores.postgres.lanes import Look, Seen
from comfyfleet.stores.postgres.pool import Step

# How many jobs a lease looks at beyond those it wants; more only when others are taking all of those.
SPARE = 7
MAX_LOOK = 2048

_TAKE = (
    lanes.GATE
    + f"""
SELECT d.envelope, d.fact_count, d.job_phase, d.lane_id, gate.now, gate.is_fair
FROM gate, comfyfleet.dispatches d
JOIN comfyfleet.lanes l ON l.lane_id = d.lane_id
JOIN comfyfleet.profile_classes p ON p.class_key = l.class_key AND p.profile = %(profile)s
WHERE d.job_id = %(job_id)s AND d.job_id <> ALL (gate.blocked) AND {lanes.IS_FREE}
FOR UPDATE OF d SKIP LOCKED
"""
)

# The look at the lanes and the locks in one statement. What stands behind the bound of the last lane looked at is
# not certain to be next, so it is left. A job that has left its lane since the statement began is found out when its
# row is locked: what is asked of the row is asked again then.
_TAKE_FIRST = (
    lanes.GATE
    + f"""
, top AS MATERIALIZED (
    SELECT lane_id, priority, head, coalesce(t.virtual_time, 0) AS virtual_time, workflow_hash
    FROM gate, comfyfleet.profile_classes p
    JOIN comfyfleet.lanes l ON l.class_key = p.class_key
    LEFT JOIN comfyfleet.tenants t ON t.tenant = l.tenant
    WHERE p.profile = %(profile)s AND {lanes.IS_FREE} AND {lanes.MAY_HAVE}
    ORDER BY priority DESC, virtual_time, head LIMIT %(lanes)s
), horizon AS MATERIALIZED (
    SELECT priority, virtual_time, head FROM top ORDER BY priority, virtual_time DESC, head DESC
    LIMIT CASE WHEN (SELECT count(*) FROM top) < %(lanes)s THEN 0 ELSE 1 END
), first AS MATERIALIZED (
    SELECT top.lane_id, top.head, items.job_id, items.sequence,
        row_number() OVER (ORDER BY top.priority DESC, top.virtual_time, items.sequence) AS place
    FROM gate, top CROSS JOIN LATERAL (
        SELECT d.sequence, d.job_id FROM comfyfleet.dispatches d
        WHERE d.lane_id = top.lane_id AND d.sequence >= top.head AND d.job_id <> ALL (gate.blocked)
        ORDER BY d.sequence LIMIT %(slots)s
    ) AS items
    LEFT JOIN horizon ON true
    WHERE horizon.head IS NULL OR (-top.priority, top.virtual_time, items.sequence)
        <= (-horizon.priority, horizon.virtual_time, horizon.head)
    ORDER BY place LIMIT %(slots)s
)
SELECT d.envelope, d.fact_count, d.job_phase, d.lane_id, gate.now, first.sequence - first.head, gate.is_fair
FROM gate, first JOIN comfyfleet.dispatches d ON d.job_id = first.job_id AND d.lane_id = first.lane_id
ORDER BY first.place LIMIT %(count)s FOR UPDATE OF d SKIP LOCKED
"""
)

# Where others hold all of the first: those that are still in their lanes, however far behind.
_TAKE_ANY = """
SELECT d.envelope, d.fact_count, d.job_phase, d.lane_id, (SELECT is_fair FROM comfyfleet.state)
FROM unnest(%(jobs)s::text[]) WITH ORDINALITY AS c (job_id, place)
JOIN comfyfleet.dispatches d ON d.job_id = c.job_id
JOIN comfyfleet.lanes l ON l.lane_id = d.lane_id
JOIN comfyfleet.profile_classes p ON p.class_key = l.class_key AND p.profile = %(profile)s
ORDER BY c.place LIMIT 1 FOR UPDATE OF d SKIP LOCKED
"""

# Who of these has something that must be kept from it now, or is not any more what it was matched as.
_BLOCKED = """
SELECT DISTINCT worker_id FROM comfyfleet.blocks WHERE worker_id = ANY (%(workers)s)
AND blocked_until > coalesce(%(test_now)s::float8, extract(epoch FROM clock_timestamp())::float8)
UNION SELECT worker_id FROM comfyfleet.workers WHERE worker_id = ANY (%(workers)s) AND profile <> %(matched)s
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
    step: Step, job_id: JobId, offer: LeaseOffer, epoch: int, test_now: float | None, is_fair: bool
) -> Written | None:
    """`is_fair`: tenants have terms, as far as is known here."""
    if is_fair:
        step.add(shares.HOLD)
    values = {
        "job_id": job_id,
        "worker_id": offer.worker_id,
        "profile": offer.profile,
        "matched": offer.profile,
        "test_now": test_now,
    }
    row = await step.row(_TAKE, values)
    if row is None:
        return None
    *found, now, is_charged = row
    held = rows.held(found)
    if not await _charge(step, held, offer, now, is_fair=is_fair, is_charged=is_charged):
        return None
    return rows.grant(step, [(held, offer)], epoch, now)[0]


async def _charge(
    step: Step, held: rows.Held, offer: LeaseOffer, now: float, *, is_fair: bool, is_charged: bool
) -> bool:
    if is_charged and not is_fair:
        raise shares.NowFair
    return not is_charged or await shares.lease(step, held.dispatch, offer, now)


async def lease_next(
    step: Step, offers: Sequence[LeaseOffer], epoch: int, test_now: float | None, is_fair: bool
) -> tuple[list[Written | None], Sequence[int]]:
    """A lease for each offer, if any, and the lanes that want tidying. All offers are of one profile."""
    taken: list[Written | None] = []
    untidy: set[int] = set()
    if is_fair:
        step.add(shares.HOLD)
    # Where tenants are charged, each lease changes whose turn is next.
    for alike in [[offer] for offer in offers] if is_fair else await _alike(step, offers, test_now):
        written, lagging = await _take(step, alike, epoch, test_now, is_fair)
        untidy.update(lagging)
        for offer in alike[len(written) :]:
            # Nothing is left, or others hold it, or empty lanes and old bounds stand in the way.
            one, found_untidy = await _search(step, offer, epoch, test_now, is_fair)
            untidy.update(found_untidy)
            if one is None:
                break
            written.append(one)
        taken += [*written, *[None] * (len(alike) - len(written))]
    return taken, sorted(untidy)


async def _alike(
    step: Step, offers: Sequence[LeaseOffer], test_now: float | None
) -> list[Sequence[LeaseOffer]]:
    """Parts, in order, whose workers may all take the same jobs."""
    workers = sorted({offer.worker_id for offer in offers})
    if len(workers) == 1:
        return [offers]
    values = {"workers": workers, "test_now": test_now, "matched": offers[0].profile}
    found = await step.rows(_BLOCKED, values)
    blocked = {worker_id for (worker_id,) in found}
    parts: list[list[LeaseOffer]] = []
    for offer in offers:
        is_alone = offer.worker_id in blocked
        if not parts or is_alone or parts[-1][0].worker_id in blocked:
            parts.append([])
        parts[-1].append(offer)
    return list(parts)


async def _take(
    step: Step, offers: Sequence[LeaseOffer], epoch: int, test_now: float | None, is_fair: bool
) -> tuple[list[Written | None], list[int]]:
    slots = len(offers) + SPARE
    values = {
        "worker_id": offers[0].worker_id,
        "test_now": test_now,
        "profile": offers[0].profile,
        "matched": offers[0].profile,
        "lanes": slots + lanes.MAX_EMPTY,
        "slots": slots,
        "count": len(offers),
    }
    found = await step.rows(_TAKE_FIRST, values)
    held = [(rows.held(row[:4]), offer) for row, offer in zip(found, offers, strict=False)]
    for row, (each, offer) in zip(found, held, strict=True):
        may_have = await _charge(step, each, offer, row[4], is_fair=is_fair, is_charged=row[6])
        assert may_have, "whose tenant is out is not seen, and nobody else changes that now"
    written: list[Written | None] = []
    written += rows.grant(step, held, epoch, found[0][4] if found else 0.0)
    return written, [row[3] for row in found if row[5] > lanes.MAX_LAG]


async def _search(
    step: Step, offer: LeaseOffer, epoch: int, test_now: float | None, is_fair: bool
) -> tuple[Written | None, Sequence[int]]:
    slots = SPARE
    while True:
        is_last = slots == MAX_LOOK
        look = Look(offer.worker_id, offer.profile, test_now, slots, matched=offer.profile)
        seen = await lanes.window(step, look)
        if not seen.candidates:
            return None, seen.untidy
        jobs = [candidate.job_id for candidate in seen.candidates]
        row = await step.row(_TAKE_ANY, {"jobs": jobs, "profile": offer.profile})
        if row is not None:
            held = rows.held(row[:4])
            await _charge(step, held, offer, seen.now, is_fair=is_fair, is_charged=row[4])
            return rows.grant(step, [(held, offer)], epoch, seen.now)[0], seen.untidy
        if is_last:
            # Others hold all of those. Two who hold what the other looks for would wait for each other for ever; what
            # comes free again, if any, is found at the next look.
            return None, seen.untidy
        slots = min(slots * 4, MAX_LOOK)
