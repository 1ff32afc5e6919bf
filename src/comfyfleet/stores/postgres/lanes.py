"""Finds the first waiting jobs for a profile: the lanes by their bounds, then their first jobs.

A lane's row keeps a lower bound of its head. A look takes the lanes with the lowest bounds and reads their
true heads. Jobs up to the bound of the last lane are certain; if they are not enough, the look is repeated
with more lanes. It reads no more of a lane than it can use. Afterwards, old bounds are corrected and empty
lanes removed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from comfyfleet.model.dispatch import Candidate, LaneKey
from comfyfleet.model.ids import ClassKey, JobId, TenantId, WorkflowHash
from comfyfleet.ports import Peek
from comfyfleet.ports.queue import MAX_WARM_LANES
from comfyfleet.stores.postgres.connections import SqlStep

# Such an old bound makes every look pass over the jobs leased since.
MAX_LAG = 256
# A few empty lanes are kept for the next job of their kind.
MAX_EMPTY = 16

_LANE = """
SELECT lane_id, head FROM comfyfleet.lanes
WHERE class_key = %s AND tenant = %s AND priority = %s AND workflow_hash = %s FOR KEY SHARE
"""

_NEW_LANE = """
INSERT INTO comfyfleet.lanes (class_key, tenant, priority, workflow_hash, head) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT DO NOTHING RETURNING lane_id
"""

# Admission comes first: a paused queue shows nothing, nor does a worker see what is blocked for it.
GATE = """
WITH gate AS MATERIALIZED (
    SELECT moment.now, is_fair, ARRAY(
        SELECT target FROM comfyfleet.blocks
        WHERE worker_id IN (%(worker_id)s, '*') AND blocked_until > moment.now) AS blocked
    FROM comfyfleet.state, (
        SELECT coalesce(%(test_now)s::float8, extract(epoch FROM clock_timestamp())::float8) AS now OFFSET 0
    ) AS moment
    WHERE NOT is_paused
)
"""

# A workflow is blocked for all tenants, or for one (see `tenant_target`).
IS_FREE = """
workflow_hash <> ALL (gate.blocked) AND workflow_hash || '@' || l.tenant <> ALL (gate.blocked)
"""

# Excludes a tenant that is held or at its cap.
_MAY_HAVE = """
(t.max_leased IS NULL OR t.leased < t.max_leased) AND (t.held_until IS NULL OR t.held_until <= gate.now)
"""

_LOOK = (
    GATE
    + f"""
SELECT lane_id, class_key, tenant, priority, workflow_hash, virtual_time, weight, head,
    (SELECT sum(t.waiting) FROM comfyfleet.lane_tallies t WHERE t.lane_id = top.lane_id)::bigint,
    sequence, job_id, queued_at, place
FROM gate CROSS JOIN LATERAL (
    SELECT lane_id, l.class_key, l.tenant, priority, workflow_hash, head, coalesce(t.virtual_time, 0) AS virtual_time,
        CASE WHEN gate.is_fair THEN coalesce(t.weight, 1) ELSE 0 END AS weight
    FROM comfyfleet.profile_classes p
    JOIN comfyfleet.lanes l ON l.class_key = p.class_key
    LEFT JOIN comfyfleet.tenants t ON t.tenant = l.tenant
    WHERE p.profile = %(profile)s AND {IS_FREE} AND workflow_hash <> ALL (%(skip)s) AND {_MAY_HAVE} {{only}}
    ORDER BY priority DESC, virtual_time, head LIMIT %(lanes)s
) AS top
LEFT JOIN LATERAL (
    SELECT d.sequence, d.job_id, d.queued_at, coalesce((d.envelope ->> 'place')::bigint, 0) AS place
    FROM comfyfleet.dispatches d
    WHERE d.lane_id = top.lane_id AND d.sequence >= top.head AND d.job_id <> ALL (gate.blocked)
    ORDER BY d.sequence LIMIT %(depth)s
) AS items ON true
"""
)

_LOOK_AT_WARM = _LOOK.format(
    only="AND l.class_key = ANY (%(warm)s) AND priority = %(priority)s "
    "AND coalesce(t.virtual_time, 0) <= %(latest)s"
)
_LOOK = _LOOK.format(only="")

_TIDY_LOCK = "SELECT lane_id FROM comfyfleet.lanes WHERE lane_id = ANY (%s) FOR UPDATE SKIP LOCKED"

_EMPTY_LANES = """
SELECT lane_id FROM comfyfleet.lanes l
WHERE NOT EXISTS (SELECT FROM comfyfleet.dispatches d WHERE d.lane_id = l.lane_id AND d.sequence >= l.head) LIMIT %s
"""

_TIDY = """
WITH heads AS (
    SELECT l.lane_id, first.sequence FROM comfyfleet.lanes l
    LEFT JOIN LATERAL (
        SELECT d.sequence FROM comfyfleet.dispatches d WHERE d.lane_id = l.lane_id AND d.sequence >= l.head
        ORDER BY d.sequence LIMIT 1
    ) AS first ON true
    WHERE l.lane_id = ANY (%s)
), gone AS (
    DELETE FROM comfyfleet.lanes l USING heads h WHERE l.lane_id = h.lane_id AND h.sequence IS NULL
), uncounted AS (
    DELETE FROM comfyfleet.lane_tallies t USING heads h WHERE t.lane_id = h.lane_id AND h.sequence IS NULL
)
UPDATE comfyfleet.lanes l SET head = h.sequence FROM heads h WHERE l.lane_id = h.lane_id AND l.head < h.sequence
"""


async def place(step: SqlStep, lane: LaneKey, sequence: int) -> int:
    """The lane's number. Locks its row, so that nobody removes it or raises its bound meanwhile."""
    while True:
        row = await step.row(_LANE, lane)
        if row is not None:
            lane_id, head = row
            if head > sequence:
                step.add(
                    "UPDATE comfyfleet.lanes SET head = least(head, %s) WHERE lane_id = %s",
                    (sequence, lane_id),
                )
            return int(lane_id)
        row = await step.row(_NEW_LANE, (*lane, sequence))
        if row is not None:
            return int(row[0])


_ALL: Mapping[str, object] = {}

# (−priority, virtual time, sequence): the store's order
_Key = tuple[int, float, int]


class _Page(msgspec.Struct):
    """One look: jobs in order, and how far the order is certain (None: to the end)."""

    items: list[tuple[_Key, Candidate]]
    horizon: _Key | None
    lagging: list[int]
    empty: list[int]


async def window(step: SqlStep, query: Peek, test_now: float | None) -> tuple[list[Candidate], Sequence[int]]:
    """As many jobs as there are slots, in order; then heads of further lanes, of the same priority and of
    tenants within a quantum of the least served, lanes of warm classes before older ones. Also the lanes to
    tidy.
    """
    first_limit = limit = query.slots + query.lanes + MAX_EMPTY
    while True:
        page = await _page(step, query, test_now, limit)
        found, is_certain = _choose(page, query)
        if is_certain:
            break
        limit *= 4
    if query.warm:
        found = await _with_warm(step, query, test_now, found)
    untidy = page.lagging
    # If one look was not enough, empty lanes and old bounds were in the way.
    if limit > first_limit or len(page.empty) > MAX_EMPTY:
        untidy = [*untidy, *page.empty]
    return found, untidy


async def _with_warm(
    step: SqlStep, query: Peek, test_now: float | None, found: list[Candidate]
) -> list[Candidate]:
    """Heads of warm lanes take the places of the youngest other lanes, if the window is full."""
    first, further = found[: query.slots], found[query.slots :]
    level = found[-1].lane.priority if found else 0
    shown = [each for each in found if each.lane.priority == level]
    seen, jobs = {each.lane for each in shown}, {each.job_id for each in shown}
    if not further or len(seen) < query.lanes:
        # All lanes of the window are shown.
        return found
    only = {
        "warm": list(query.warm),
        "priority": level,
        "latest": shown[0].virtual_time + query.quantum_s,
        "depth": 1,
    }
    page = await _page(step, query, test_now, MAX_WARM_LANES, _LOOK_AT_WARM, only)
    warm = [each for _, each in page.items if each.lane not in seen and each.job_id not in jobs]
    cold = [each for each in further if each.lane.class_key not in query.warm]
    gone = {each.job_id for each in cold[max(0, len(cold) - len(warm)) :]}
    further = [each for each in further if each.job_id not in gone] + warm[: len(cold)]
    return first + sorted(further, key=lambda each: (each.virtual_time, each.sequence))


async def _page(
    step: SqlStep,
    query: Peek,
    test_now: float | None,
    limit: int,
    look: str = _LOOK,
    only: Mapping[str, object] = _ALL,
) -> _Page:
    rows = await step.rows(
        look,
        {
            "worker_id": query.worker_id,
            "test_now": test_now,
            "profile": query.profile,
            "skip": list(query.skip),
            "lanes": limit,
            "depth": max(query.slots, 1),
            **only,
        },
    )
    page = _Page([], None, [], [])
    bounds: dict[int, _Key] = {}
    for (
        lane_id,
        class_key,
        tenant,
        priority,
        workflow_hash,
        virtual_time,
        weight,
        head,
        waiting,
        sequence,
        job_id,
        queued_at,
        place,
    ) in rows:
        is_first = lane_id not in bounds
        bounds[lane_id] = (-priority, virtual_time, head)
        if sequence is None:
            page.empty.append(lane_id)
            continue
        if is_first and sequence - head > MAX_LAG:
            page.lagging.append(lane_id)
        lane = LaneKey(ClassKey(class_key), TenantId(tenant), priority, WorkflowHash(workflow_hash))
        candidate = Candidate(
            JobId(job_id), lane, sequence, queued_at, virtual_time, weight, max(1, waiting or 0), place
        )
        page.items.append(((-priority, virtual_time, sequence), candidate))
    page.items.sort(key=lambda item: item[0])
    if len(bounds) >= limit:
        page.horizon = max(bounds.values())
    return page


def _choose(page: _Page, query: Peek) -> tuple[list[Candidate], bool]:
    """Walks like the in-process index. False: the page is too short to be certain."""
    found: list[Candidate] = []
    seen: set[LaneKey] = set()
    level, least = 0, 0.0
    for key, item in page.items:
        if page.horizon is not None and key > page.horizon:
            # A lane that was not read may come before this; it matters only if something could be added.
            return found, _is_full(found, seen, query, page.horizon, level, least)
        lane = item.lane
        if len(found) >= query.slots:
            if (
                lane.priority != level
                or len(seen) >= query.lanes
                or item.virtual_time > least + query.quantum_s
            ):
                return found, True
            if lane in seen:
                continue
        if not found or lane.priority != level:
            level, least = lane.priority, item.virtual_time
            seen = set()
        seen.add(lane)
        found.append(item)
    if page.horizon is None:
        return found, True
    return found, _is_full(found, seen, query, page.horizon, level, least)


def _is_full(
    found: Sequence[Candidate],
    seen: Collection[LaneKey],
    query: Peek,
    horizon: _Key,
    level: int,
    least: float,
) -> bool:
    if len(found) < query.slots:
        return False
    return -horizon[0] != level or len(seen) >= query.lanes or horizon[1] > least + query.quantum_s


async def clean_up(step: SqlStep, lanes: Sequence[int]) -> None:
    """Raises old bounds and removes empty lanes; skips lanes in use."""
    locked = [lane_id for (lane_id,) in await step.rows(_TIDY_LOCK, (list(lanes),))]
    # A new statement sees all jobs that entered these lanes before they were locked.
    step.add(_TIDY, (locked,))


async def remove_empty_lanes(step: SqlStep, limit: int) -> None:
    empty = [lane_id for (lane_id,) in await step.rows(_EMPTY_LANES, (limit,))]
    if empty:
        await clean_up(step, empty)
