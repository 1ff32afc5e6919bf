"""The job records: payload and result."""

from __future__ import annotations

from typing import Protocol

import msgspec

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job


class RecordQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A page of records. `after` is the last job of the previous page, or any id between two jobs."""

    tenant: TenantId | None = None
    phase: Phase | None = None
    limit: int
    after: JobId | None = None
    newest_first: bool = False


class Records(Protocol):
    """Reads job records. If they share the store's database, the store's writes include them."""

    async def get(self, job_id: JobId) -> Job | None: ...
    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None: ...
    async def listing(self, query: RecordQuery) -> list[Job]:
        """Ordered by submission."""
