"""Reads whole jobs, with payload and result. The store writes them."""

from __future__ import annotations

import msgspec

from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.ports import RecordQuery
from comfyfleet.stores.postgres import codec
from comfyfleet.stores.postgres.connections import ConnectionPool, SqlStep

_GET = """
SELECT j.job_id, j.tenant, j.reference, j.record, j.payload, j.result, coalesce(d.job_phase, e.job_phase)
FROM comfyfleet.jobs j
LEFT JOIN comfyfleet.dispatches d ON d.job_id = j.job_id
LEFT JOIN comfyfleet.ended e ON e.job_id = j.job_id
"""

# Each uses an index in the order of submission, or only the open jobs.
_ALL = _GET + "WHERE true"
_OF_PHASE = """
SELECT j.job_id, j.tenant, j.reference, j.record, j.payload, j.result, s.job_phase FROM comfyfleet.{table} s
JOIN comfyfleet.jobs j ON j.job_id = s.job_id WHERE s.phase = %(phase)s
"""


class PostgresRecords:
    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    async def get(self, job_id: JobId) -> Job | None:
        return await self._one(_GET + "WHERE j.job_id = %s", (job_id,))

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        return await self._one(_GET + "WHERE j.tenant = %s AND j.reference = %s", (tenant, reference))

    async def _one(self, query: str, values: tuple[str, ...]) -> Job | None:
        found = await self._pool.fetch(query, values)
        return codec.decode_job(*found[0]) if found else None

    async def listing(self, query: RecordQuery) -> list[Job]:
        async def read(step: SqlStep) -> list[Job]:
            phase, after = query.phase, query.after
            sql, place = _ALL, "j.sequence"
            if phase is not None:
                sql = _OF_PHASE.format(table="ended" if phase.is_final else "dispatches")
                place = "s.sequence"
            beyond, order = ("<", "DESC") if query.newest_first else (">", "ASC")
            values = msgspec.structs.asdict(query)
            if query.tenant is not None:
                sql += " AND j.tenant = %(tenant)s"
            if after is not None:
                last = await step.row("SELECT sequence FROM comfyfleet.jobs WHERE job_id = %s", (after,))
                if last is None:
                    # The last job of the previous page is gone; its id still gives its time.
                    sql += f" AND j.job_id {beyond} %(after)s"
                else:
                    values["sequence"] = last[0]
                    sql += f" AND {place} {beyond} %(sequence)s"
            rows = await step.rows(f"{sql} ORDER BY {place} {order} LIMIT %(limit)s", values)
            return [codec.decode_job(*row) for row in rows]

        return await self._pool.read(read)
