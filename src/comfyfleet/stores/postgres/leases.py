"""Leases jobs in PostgreSQL: a look at the lanes, then a lock on the first free job.

It skips a job that another transaction has locked (SKIP LOCKED), because that is being leased or changed. So
priority holds except against leases in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from comfyfleet.model.dispatch import LeaseOffer, WriteResult
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.tenant import TenantShare
from comfyfleet.ports import Peek
from comfyfleet.stores.postgres import fair_share, lanes, rows
from comfyfleet.stores.postgres.connections import SqlStep
from comfyfleet.stores.postgres.fair_share import LeaseCharge, Standings
from comfyfleet.stores.postgres.lanes import LaneQuery, LaneView

# How many more jobs a lease looks at than it needs. More only if others take all of those.
SPARE = 7
MAX_LOOK = 2048
# How many charged leases are chosen with one look.
MAX_IN_TURN = 16

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

# Looks at the lanes and locks in one statement. Jobs beyond the bound of the last lane are not certain to be
# next, so they are left out. The conditions are checked again on the locked row, because the job may have
# left its lane.
_TOP = f"""
, top AS MATERIALIZED (
    SELECT lane_id, priority, head, workflow_hash, {lanes.SHARE}
    FROM gate, comfyfleet.profile_classes p
    JOIN comfyfleet.lanes l ON l.class_key = p.class_key
    LEFT JOIN comfyfleet.tenants t ON t.tenant = l.tenant
    WHERE p.profile = %(profile)s AND {lanes.IS_FREE} AND {lanes.MAY_HAVE}
    ORDER BY priority DESC, virtual_time, head LIMIT %(lanes)s
)
"""

_SHARE = """
top.tenant, top.virtual_time, top.credit, top.leased, top.is_behind, top.has_terms, top.weight, top.max_leased,
top.held_until
"""

_TAKE_FIRST = (
    lanes.GATE
    + _TOP
    + f"""
, horizon AS MATERIALIZED (
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
SELECT d.envelope, d.fact_count, d.job_phase, d.lane_id, gate.now, first.sequence - first.head, gate.is_fair, {_SHARE}
FROM gate, first JOIN top ON top.lane_id = first.lane_id
JOIN comfyfleet.dispatches d ON d.job_id = first.job_id AND d.lane_id = first.lane_id
ORDER BY first.place LIMIT %(count)s FOR UPDATE OF d SKIP LOCKED
"""
)

# As many per lane as are wanted in all: each lease changes whose turn it is.
_LOOK_IN_TURN = (
    lanes.GATE
    + _TOP
    + f"""
SELECT gate.now, top.lane_id, top.priority, top.head, items.sequence, items.job_id, {_SHARE}
FROM gate CROSS JOIN top LEFT JOIN LATERAL (
    SELECT d.sequence, d.job_id FROM comfyfleet.dispatches d
    WHERE d.lane_id = top.lane_id AND d.sequence >= top.head AND d.job_id <> ALL (gate.blocked)
    ORDER BY d.sequence LIMIT %(depth)s
) AS items ON true
ORDER BY items.sequence
"""
)

_TAKE_CHOSEN = """
SELECT d.envelope, d.fact_count, d.job_phase, d.lane_id
FROM unnest(%(jobs)s::text[], %(lanes)s::bigint[]) WITH ORDINALITY AS c (job_id, lane_id, place)
JOIN comfyfleet.dispatches d ON d.job_id = c.job_id AND d.lane_id = c.lane_id
ORDER BY c.place FOR UPDATE OF d SKIP LOCKED
"""

# If others hold all of the first: any job that is still in its lane.
_TAKE_ANY = """
SELECT d.envelope, d.fact_count, d.job_phase, d.lane_id, (SELECT is_fair FROM comfyfleet.state)
FROM unnest(%(jobs)s::text[]) WITH ORDINALITY AS c (job_id, place)
JOIN comfyfleet.dispatches d ON d.job_id = c.job_id
JOIN comfyfleet.lanes l ON l.lane_id = d.lane_id
JOIN comfyfleet.profile_classes p ON p.class_key = l.class_key AND p.profile = %(profile)s
ORDER BY c.place LIMIT 1 FOR UPDATE OF d SKIP LOCKED
"""

# Workers with a block in force, or with another profile than matched.
_BLOCKED = """
SELECT DISTINCT worker_id FROM comfyfleet.blocks WHERE worker_id = ANY (%(workers)s)
AND blocked_until > coalesce(%(test_now)s::float8, extract(epoch FROM clock_timestamp())::float8)
UNION SELECT worker_id FROM comfyfleet.workers WHERE worker_id = ANY (%(workers)s) AND profile <> %(matched)s
"""


async def peek(step: SqlStep, query: Peek, test_now: float | None) -> LaneView:
    look = LaneQuery(
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
    step: SqlStep, job_id: JobId, offer: LeaseOffer, epoch: int, test_now: float | None, is_fair: bool
) -> WriteResult | None:
    """`is_fair`: tenants have terms, as far as this process knows."""
    row = await step.row(_TAKE, {**_gate_values(offer, test_now), "job_id": job_id})
    if row is None:
        return None
    *found, now, is_charged = row
    held, charge = rows.held(found), None
    _expect(is_fair=is_fair, is_charged=is_charged)
    if is_charged:
        # The job is locked already, and the holder of the lock waits for no job.
        charged = await fair_share.lease(step, held.dispatch.tenant, offer, test_now)
        if charged is None:
            return None
        now, charge = charged
    return rows.grant(step, [(held, offer, charge)], epoch, now)[0]


def _gate_values(offer: LeaseOffer, test_now: float | None) -> dict[str, object]:
    return {
        "worker_id": offer.worker_id,
        "test_now": test_now,
        "profile": offer.profile,
        "matched": offer.profile,
    }


def _expect(*, is_fair: bool, is_charged: bool) -> None:
    if is_charged and not is_fair:
        raise fair_share.FairShareBegan


async def lease_next(
    step: SqlStep, offers: Sequence[LeaseOffer], epoch: int, test_now: float | None, is_fair: bool
) -> tuple[list[WriteResult | None], Sequence[int]]:
    """A lease or None for each offer, and the lanes to tidy. All offers are of one profile."""
    taken: list[WriteResult | None] = []
    untidy: set[int] = set()
    parts = await _alike(step, offers, test_now)
    if is_fair:
        step.add(fair_share.HOLD)
    for alike in parts:
        written: list[WriteResult | None] = []
        while len(written) < len(alike):
            rest = alike[len(written) :]
            if is_fair and len(rest) > 1:
                some, lagging = await _take_in_turn(step, rest[:MAX_IN_TURN], epoch, test_now)
                is_short = not some
            elif written and not is_fair:
                # The first look was for all of them.
                some, lagging, is_short = [], [], True
            else:
                some, lagging = await _take(step, rest, epoch, test_now, is_fair)
                is_short = len(some) < len(rest)
            written += some
            untidy.update(lagging)
            if is_short:
                # Nothing is left, or others hold it, or empty lanes and old bounds are in the way.
                one, found_untidy = await _search(step, alike[len(written)], epoch, test_now, is_fair)
                untidy.update(found_untidy)
                if one is None:
                    break
                written.append(one)
        taken += [*written, *[None] * (len(alike) - len(written))]
    return taken, sorted(untidy)


async def _alike(
    step: SqlStep, offers: Sequence[LeaseOffer], test_now: float | None
) -> list[Sequence[LeaseOffer]]:
    """Splits offers, in order, into groups whose workers may take the same jobs."""
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
    step: SqlStep, offers: Sequence[LeaseOffer], epoch: int, test_now: float | None, is_fair: bool
) -> tuple[list[WriteResult | None], list[int]]:
    slots = len(offers) + SPARE
    values = {"lanes": slots + lanes.MAX_EMPTY, "slots": slots, "count": len(offers)}
    found = await step.rows(_TAKE_FIRST, {**_gate_values(offers[0], test_now), **values})
    taken: list[tuple[rows.LockedDispatch, LeaseOffer, float | None]] = []
    for row, offer in zip(found, offers, strict=False):
        held, charge = rows.held(row[:4]), None
        _expect(is_fair=is_fair, is_charged=row[6])
        if row[6]:
            share = fair_share.share_of(row[7:])
            charge = fair_share.take(step, await Standings(step, [share]).lease(share.tenant, offer))
        taken.append((held, offer, charge))
    written: list[WriteResult | None] = []
    written += rows.grant(step, taken, epoch, found[0][4] if found else 0.0)
    return written, [row[3] for row in found if row[5] > lanes.MAX_LAG]


class _Line(msgspec.Struct):
    """A lane and its waiting jobs, in order."""

    lane_id: int
    priority: int
    head: int
    tenant: TenantId
    bound: tuple[int, float, int]
    """No job in it comes before this."""
    items: deque[tuple[int, JobId]]


class _Choice(msgspec.Struct, frozen=True):
    job_id: JobId
    lane_id: int
    charge: LeaseCharge


async def _take_in_turn(
    step: SqlStep, offers: Sequence[LeaseOffer], epoch: int, test_now: float | None
) -> tuple[list[WriteResult | None], list[int]]:
    """Called under the lock: one query for the lanes and one for the jobs. Each lease counts for the next
    choice. It may take fewer than offered, but always the first ones.
    """
    limit = len(offers) + SPARE + lanes.MAX_EMPTY
    values = {**_gate_values(offers[0], test_now), "lanes": limit, "depth": len(offers)}
    lines: dict[int, _Line] = {}
    known: dict[TenantId, TenantShare] = {}
    seen = await step.rows(_LOOK_IN_TURN, values)
    now = seen[0][0] if seen else 0.0
    for _, lane_id, priority, head, sequence, job_id, *row in seen:
        share = fair_share.share_of(tuple(row))
        bound = (-priority, share.virtual_time, head)
        line = lines.setdefault(lane_id, _Line(lane_id, priority, head, share.tenant, bound, deque()))
        # An empty lane does not show whether its tenant waits elsewhere.
        if sequence is not None:
            known[share.tenant] = share
            line.items.append((sequence, job_id))
    horizon = None
    if len(lines) >= limit:
        horizon = max(line.bound for line in lines.values())
    lagging = [
        each.lane_id for each in lines.values() if each.items and each.items[0][0] - each.head > lanes.MAX_LAG
    ]
    chosen = await _choose(Standings(step, known.values()), list(lines.values()), horizon, offers, now)
    if not chosen:
        return [], lagging
    places = {"jobs": [each.job_id for each in chosen], "lanes": [each.lane_id for each in chosen]}
    found = [rows.held(row) for row in await step.rows(_TAKE_CHOSEN, places)]
    taken: list[tuple[rows.LockedDispatch, LeaseOffer, float | None]] = []
    for held, choice, offer in zip(found, chosen, offers, strict=False):
        if held.dispatch.job_id != choice.job_id:
            # Another transaction has this job, so the later choices are wrong.
            break
        taken.append((held, offer, choice.charge.by))
    written: list[WriteResult | None] = []
    written += rows.grant(step, taken, epoch, now)
    for choice in chosen[: len(taken)]:
        fair_share.take(step, choice.charge)
    return written, lagging


async def _choose(
    standings: Standings,
    lines: Sequence[_Line],
    horizon: tuple[int, float, int] | None,
    offers: Sequence[LeaseOffer],
    now: float,
) -> list[_Choice]:
    """The first job for each offer, as far as the order is certain: up to the bound of the last lane."""

    def place(line: _Line) -> tuple[int, float, int]:
        return -line.priority, standings[line.tenant].virtual_time, line.items[0][0]

    chosen: list[_Choice] = []
    for offer in offers:
        open_lines = [each for each in lines if each.items and not standings[each.tenant].is_out(now)]
        first = min(open_lines, key=place, default=None)
        if first is None or (horizon is not None and place(first) > horizon):
            break
        _, job_id = first.items.popleft()
        chosen.append(_Choice(job_id, first.lane_id, await standings.lease(first.tenant, offer)))
    return chosen


async def _search(
    step: SqlStep, offer: LeaseOffer, epoch: int, test_now: float | None, is_fair: bool
) -> tuple[WriteResult | None, Sequence[int]]:
    slots = SPARE
    while True:
        is_last = slots == MAX_LOOK
        look = LaneQuery(offer.worker_id, offer.profile, test_now, slots, matched=offer.profile)
        seen = await lanes.window(step, look)
        if not seen.candidates:
            return None, seen.untidy
        jobs = [candidate.job_id for candidate in seen.candidates]
        row = await step.row(_TAKE_ANY, {"jobs": jobs, "profile": offer.profile})
        if row is not None:
            held, charge = rows.held(row[:4]), None
            _expect(is_fair=is_fair, is_charged=row[4])
            if row[4]:
                charged = await fair_share.lease(step, held.dispatch.tenant, offer, test_now)
                if charged is None:
                    # Its tenant was excluded after the look.
                    return None, seen.untidy
                charge = charged[1]
            return rows.grant(step, [(held, offer, charge)], epoch, seen.now)[0], seen.untidy
        if is_last:
            # Others hold all of those. Waiting could deadlock; the next look finds what they release.
            return None, seen.untidy
        slots = min(slots * 4, MAX_LOOK)
