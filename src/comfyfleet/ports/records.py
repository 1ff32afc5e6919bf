"""The job records: payload and result."""

from __future__ import annotations

from typing import Protocol

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job


class Records(Protocol):
    """Reads job records. If they share the store's database, the store's writes include them."""

    async def get(self, job_id: JobId) -> Job | None: ...
    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None: ...
    async def listing(
        self,
        *,
        tenant: TenantId | None,
        phase: Phase | None,
        limit: int,
        after: JobId | None,
        newest_first: bool = False,
    ) -> list[Job]:
        """Ordered by submission. `after` is the last job of the previous page, or any id between two jobs."""
