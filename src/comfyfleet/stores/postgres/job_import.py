"""Imports and discards jobs for a move between stores. One call is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from comfyfleet.model.calls import JobSnapshot
from comfyfleet.model.dispatch import Dispatch
from comfyfleet.model.ids import JobId
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.stores.postgres import codec, rows
from comfyfleet.stores.postgres.connections import ConnectionPool, SqlStep

_KNOWN = """
SELECT envelope FROM (
    SELECT 1 AS place, job_id FROM comfyfleet.jobs WHERE job_id = %(job_id)s
    UNION ALL SELECT 2, job_id FROM comfyfleet.jobs WHERE tenant = %(tenant)s AND reference = %(reference)s
) AS known JOIN (
    SELECT job_id, envelope FROM comfyfleet.dispatches UNION ALL SELECT job_id, envelope FROM comfyfleet.ended
) AS kept USING (job_id) ORDER BY place LIMIT 1
"""


class PostgresJobTransfer:
    def __init__(
        self, pool: ConnectionPool, now: Callable[[], float | None], notify: Callable[[], None]
    ) -> None:
        self._pool = pool
        self._now = now
        """None: the server's time."""
        self._notify = notify

    async def import_jobs(self, jobs: Sequence[JobSnapshot]) -> list[Dispatch] | None:
        async def import_jobs(step: SqlStep) -> list[Dispatch] | None:
            classes = [key for each in jobs for key in rows.classes_of(each.dispatch)]
            if classes and not await rows.has_classes(step, classes):
                return None
            now = (await step.rows(*rows.moment(self._now())))[0][0]
            return [await _import_jobs(step, each, now) for each in jobs]

        imported = await self._pool.transact(import_jobs)
        if imported:
            self._notify()
        return imported

    async def discard(self, jobs: Sequence[Dispatch]) -> list[bool]:
        async def discard(step: SqlStep) -> list[bool]:
            answers: dict[JobId, bool] = {}
            # In the order in which all transactions lock several jobs.
            for each in sorted(jobs, key=lambda job: job.job_id):
                answers[each.job_id] = await rows.discard(step, each.job_id, each.revision)
            return [answers[each.job_id] for each in jobs]

        return await self._pool.transact(discard)

    async def workflow_stats(self) -> list[WorkflowStats]:
        found = await self._pool.fetch("SELECT body FROM comfyfleet.lessons ORDER BY number")
        return [codec.decode_workflow_stats(row[0]) for row in found]


async def _import_jobs(step: SqlStep, snapshot: JobSnapshot, now: float) -> Dispatch:
    assert snapshot.dispatch.lease is None, "a leased job does not move"
    job = snapshot.job

    names = {"job_id": job.job_id, "tenant": job.tenant, "reference": job.reference}
    while True:
        sequence = await rows.insert_record(step, job)
        if sequence is not None:
            return await rows.import_jobs(step, snapshot, sequence, now)
        row = await step.row(_KNOWN, names)
        if row is not None:
            return codec.decode_dispatch(row[0])
        # The conflicting job has been purged since.
