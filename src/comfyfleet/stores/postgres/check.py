"""Checks the tables in a PostgreSQL database from outside: server, schema, counts, and related rows."""

from __future__ import annotations

from typing import Any

import psycopg

from comfyfleet.model.errors import Fault
from comfyfleet.stores.postgres.connections import Connection, ConnectionPool
from comfyfleet.stores.postgres.lane_counts import MISCOUNTED
from comfyfleet.stores.postgres.schema import check_server, known_migrations, missing_migrations

_SETTINGS = ("server_version", "synchronous_commit", "fsync", "full_page_writes", "autovacuum")

# These guard against a crash of the machine.
_MUST_BE_ON = ("fsync", "full_page_writes", "autovacuum")

_PHASES = ("queued", "leased", "completed", "failed", "cancelled")

_COUNT = """
SELECT phase, count(*) FROM (SELECT phase FROM comfyfleet.dispatches UNION ALL SELECT phase FROM comfyfleet.ended) AS a
GROUP BY phase
"""

_TALLIES = "SELECT " + ", ".join(f"sum({phase})::bigint" for phase in _PHASES) + " FROM comfyfleet.tallies"

_PAYLOADS = """
SELECT (SELECT sum(payload_bytes)::bigint FROM comfyfleet.tallies),
    (SELECT coalesce(sum((envelope ->> 'payload_bytes')::bigint), 0)::bigint FROM comfyfleet.dispatches)
"""

# Each query returns the ids of faulty jobs.
_WRONG = {
    "has a record but no dispatch": """
SELECT job_id FROM comfyfleet.jobs j WHERE NOT EXISTS (SELECT FROM comfyfleet.dispatches d WHERE d.job_id = j.job_id)
    AND NOT EXISTS (SELECT FROM comfyfleet.ended e WHERE e.job_id = j.job_id)""",
    "has a dispatch but no record": """
SELECT job_id FROM (SELECT job_id FROM comfyfleet.dispatches UNION ALL SELECT job_id FROM comfyfleet.ended) AS a
WHERE NOT EXISTS (SELECT FROM comfyfleet.jobs j WHERE j.job_id = a.job_id)""",
    "is both open and ended": """
SELECT job_id FROM comfyfleet.dispatches d WHERE EXISTS (SELECT FROM comfyfleet.ended e WHERE e.job_id = d.job_id)""",
    "has another number of facts than counted": """
SELECT job_id FROM (
    SELECT job_id, fact_count FROM comfyfleet.dispatches UNION ALL SELECT job_id, fact_count FROM comfyfleet.ended
) AS a WHERE fact_count <> (SELECT count(*) FROM comfyfleet.facts f WHERE f.job_id = a.job_id)""",
    "has a class that is not in the table": """
SELECT job_id FROM comfyfleet.dispatches d
WHERE NOT EXISTS (SELECT FROM comfyfleet.classes c WHERE c.class_key = d.class_key)""",
    "has ended, and its row differs on whether that is settled": """
SELECT job_id FROM comfyfleet.ended e WHERE is_apart <> coalesce((envelope ->> 'is_apart')::boolean, false)
    OR is_unsettled <> (is_apart AND envelope ->> 'settled_at' IS NULL)""",
    "waits in a missing lane, or before its bound": """
SELECT d.job_id FROM comfyfleet.dispatches d LEFT JOIN comfyfleet.lanes l ON l.lane_id = d.lane_id
WHERE d.lane_id IS NOT NULL AND (l.lane_id IS NULL OR l.head > d.sequence)""",
}
_SHOWN = 5


async def examine_postgres(url: str) -> dict[str, Any]:
    pool = ConnectionPool(url)
    connection = await pool.connect()
    problems: list[str] = []
    settings: dict[str, Any] = {}
    holds: dict[str, int] = {}
    async with connection:
        try:
            for name in _SETTINGS:
                settings[name] = (await _rows(connection, "SELECT current_setting(%s)", (name,)))[0][0]
            problems += [
                f"{name} is off: turn it on, or a power cut may lose acknowledged jobs"
                for name in _MUST_BE_ON[:2]
                if settings[name] == "off"
            ]
            if settings["autovacuum"] == "off":
                problems.append("autovacuum is off: the tables grow without end; turn it on")
            try:
                await check_server(connection, pool.address)
                missing = await missing_migrations(connection, known_migrations())
            except Fault as fault:
                problems.append(str(fault))
            else:
                newest = known_migrations()[-1].number
                settings["schema"] = newest - len(missing)
                if missing:
                    problems.append(
                        f"the schema lacks the migrations {[each.number for each in missing]}: "
                        "an engine that opens it applies them"
                    )
                else:
                    async with connection.transaction():
                        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                        holds = await _check_tables(connection, problems, settings)
        except psycopg.Error as error:
            problems.append(f"PostgreSQL refused a query: {' '.join(str(error).split())}")
    return {"store": pool.address, "problems": problems, "holds": holds, "settings": settings}


async def has_tables(url: str) -> bool:
    async with await ConnectionPool(url).connect() as connection:
        known = known_migrations()
        return known[0] not in await missing_migrations(connection, known)


async def _check_tables(
    connection: Connection, problems: list[str], settings: dict[str, Any]
) -> dict[str, int]:
    found = dict(await _rows(connection, _COUNT))
    holds = {phase: int(found.get(phase, 0)) for phase in _PHASES}
    (tallies,) = await _rows(connection, _TALLIES)
    for phase, counted in zip(_PHASES, tallies, strict=True):
        if counted != holds[phase]:
            problems.append(f"{phase}: the tallies count {counted}, the tables hold {holds[phase]}")
    ((counted, held),) = await _rows(connection, _PAYLOADS)
    if counted != held:
        problems.append(f"payloads: the tallies count {counted} bytes, those of open jobs have {held}")
    for what, query in MISCOUNTED.items():
        for (which,) in await _rows(connection, f"{query} LIMIT {_SHOWN}"):
            problems.append(f"{what} {which}: the tallies count other jobs than those that wait there")
    for what, query in _WRONG.items():
        wrong = [job_id for (job_id,) in await _rows(connection, f"{query} LIMIT {_SHOWN + 1}")]
        for job_id in wrong[:_SHOWN]:
            problems.append(f"job {job_id} {what}")
        if len(wrong) > _SHOWN:
            problems.append(f"and more: each {what}")
    for table in ("workers", "blocks", "lessons", "classes", "documents"):
        ((holds[table],),) = await _rows(connection, f"SELECT count(*) FROM comfyfleet.{table}")
    state = await _rows(connection, "SELECT epoch, is_paused FROM comfyfleet.state")
    settings["epoch"], settings["is_paused"] = state[0]
    ((settings["bytes"],),) = await _rows(
        connection,
        "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c "
        "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'comfyfleet' AND c.relkind = 'r'",
    )
    return holds


async def _rows(connection: Connection, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
    return await (await connection.execute(query.encode(), values or None)).fetchall()
