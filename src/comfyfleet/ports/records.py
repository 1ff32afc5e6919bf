"""The tenant's side of a job: payload and result."""

from __future__ import annotations

from typing import Protocol

from comfyfleet.model.dispatch import (
    Phase,
)
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job


class Records(Protocol):
    """The tenant's side: jobs with payload and result. Where it shares the store's database it joins its writes."""

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
        """In the order of submission, or against it. `after` is the last job seen on the way, or an id between two."""
