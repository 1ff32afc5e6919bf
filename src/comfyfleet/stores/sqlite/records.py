"""The tenant's side of the file: jobs with payload and result, read when asked for; in memory are the last to come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.stores.sqlite.reading import Disk


class SqliteRecords:
    def __init__(
        self,
        disk: Disk,
        find: Callable[[TenantId, str], JobId | None],
        wait: Callable[[JobId | None], Awaitable[None]],
        at_hand: Callable[[JobId], Job | None],
    ) -> None:
        self._disk = disk
        self._find = find
        self._wait = wait
        """Until what is being written of a job (None: of any) is on the disk."""
        self._at_hand = at_hand
        """A job that need not be read from the file."""

    async def get(self, job_id: JobId) -> Job | None:
        await self._wait(job_id)
        return self._at_hand(job_id) or self._disk.job(job_id)

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        job_id = self._find(tenant, reference)
        return None if job_id is None else await self.get(job_id)

    async def listing(
        self,
        *,
        tenant: TenantId | None,
        phase: Phase | None,
        limit: int,
        after: JobId | None,
        newest_first: bool = False,
    ) -> list[Job]:
        await self._wait(None)
        return self._disk.listing(tenant, phase, limit, after, newest_first=newest_first)
