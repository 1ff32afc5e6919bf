"""How many jobs wait in each lane and at each priority: sums of sharded rows, which a move changes in its transaction.

A count that is read in one statement with the jobs is exact. A place in line is read before its job is inserted, so
jobs that enter or leave lanes at the same time may be missing from it or be too many; it never drifts.
"""

from __future__ import annotations

from collections import Counter

from comfyfleet.stores.postgres.connections import Connection, SqlStep

# More rows than this are added up into one for each priority.
MAX_ROWS = 256

# The statement that is last in a transaction, so that rows are locked briefly. In order, so that two do not deadlock.
_MOVE = """
WITH lane AS (
    INSERT INTO comfyfleet.lane_tallies AS t (lane_id, shard, waiting)
    SELECT lane_id, pg_backend_pid() %% 32, moved
    FROM unnest(%(lanes)s::bigint[], %(by_lane)s::bigint[]) AS moves (lane_id, moved) ORDER BY lane_id
    ON CONFLICT (lane_id, shard) DO UPDATE SET waiting = t.waiting + excluded.waiting
)
INSERT INTO comfyfleet.priority_tallies AS t (priority, shard, waiting)
SELECT priority, pg_backend_pid() %% 32, moved
FROM unnest(%(priorities)s::integer[], %(by_priority)s::bigint[]) AS moves (priority, moved) ORDER BY priority
ON CONFLICT (priority, shard) DO UPDATE SET waiting = t.waiting + excluded.waiting
"""

AHEAD = """
SELECT coalesce(sum(waiting), 0)::bigint FROM comfyfleet.priority_tallies WHERE priority >= %s
"""

_ADD_UP = """
WITH gone AS (
    DELETE FROM comfyfleet.priority_tallies t USING (
        SELECT priority, shard FROM comfyfleet.priority_tallies
        WHERE shard >= 0 AND (SELECT count(*) FROM comfyfleet.priority_tallies WHERE shard >= 0) > %s
        FOR UPDATE SKIP LOCKED
    ) AS old WHERE t.priority = old.priority AND t.shard = old.shard RETURNING t.priority, t.waiting
)
INSERT INTO comfyfleet.priority_tallies AS t (priority, shard, waiting)
SELECT priority, -1, sum(waiting) FROM gone GROUP BY priority HAVING sum(waiting) <> 0 ORDER BY priority
ON CONFLICT (priority, shard) DO UPDATE SET waiting = t.waiting + excluded.waiting
"""

_DROP_EMPTY = "DELETE FROM comfyfleet.priority_tallies WHERE shard = -1 AND waiting = 0"


# Each query returns the lanes or priorities whose sum differs from the jobs that wait there.
MISCOUNTED = {
    "lane": """
SELECT lane_id FROM (
    SELECT lane_id, waiting FROM comfyfleet.lane_tallies
    UNION ALL SELECT lane_id, -1 FROM comfyfleet.dispatches WHERE lane_id IS NOT NULL
) AS a GROUP BY lane_id HAVING sum(waiting) <> 0""",
    "priority": """
SELECT priority FROM (
    SELECT priority, waiting FROM comfyfleet.priority_tallies
    UNION ALL SELECT l.priority, -1 FROM comfyfleet.dispatches d JOIN comfyfleet.lanes l ON l.lane_id = d.lane_id
) AS a GROUP BY priority HAVING sum(waiting) <> 0""",
}

# The lock waits for moves in flight and keeps others out.
_RECOUNT = (
    "LOCK TABLE comfyfleet.dispatches IN EXCLUSIVE MODE",
    "DELETE FROM comfyfleet.lane_tallies",
    "DELETE FROM comfyfleet.priority_tallies",
    """
    INSERT INTO comfyfleet.lane_tallies (lane_id, shard, waiting)
    SELECT lane_id, -1, count(*) FROM comfyfleet.dispatches WHERE lane_id IS NOT NULL GROUP BY lane_id
    """,
    """
    INSERT INTO comfyfleet.priority_tallies (priority, shard, waiting)
    SELECT l.priority, -1, count(*) FROM comfyfleet.dispatches d JOIN comfyfleet.lanes l ON l.lane_id = d.lane_id
    GROUP BY l.priority
    """,
)


async def recount_if_wrong(connection: Connection) -> None:
    """When a process opens the store: one of an older version that still ran after the migration counted nothing."""
    for query in MISCOUNTED.values():
        cursor = await connection.execute(f"{query} LIMIT 1".encode())
        if await cursor.fetchone() is not None:
            async with connection.transaction():
                for statement in _RECOUNT:
                    await connection.execute(statement.encode())
            return


def move(step: SqlStep, *moves: tuple[int | None, int, int]) -> None:
    """For each lane its number (None: no lane), its priority, and how many jobs more wait in it."""
    lanes, priorities = Counter[int](), Counter[int]()
    for lane_id, priority, count in moves:
        if lane_id is not None:
            lanes[lane_id] += count
            priorities[priority] += count
    by_lane = {lane_id: count for lane_id, count in lanes.items() if count}
    by_priority = {priority: count for priority, count in priorities.items() if count}
    if by_lane:
        step.add_last(
            _MOVE,
            {
                "lanes": list(by_lane),
                "by_lane": list(by_lane.values()),
                "priorities": list(by_priority),
                "by_priority": list(by_priority.values()),
            },
        )


def add_up(step: SqlStep) -> None:
    """Adds up the rows of each priority if there are many. Skips rows in use."""
    step.add_last(_ADD_UP, (MAX_ROWS,))
    step.add_last(_DROP_EMPTY, ())
