"""The memory store's job entries, and the tenant's view of them."""

from __future__ import annotations

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.fact import Fact
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.stores.inprocess.queue_state import QueueEntry


class MemoryEntry(QueueEntry, kw_only=True, eq=False, gc=False):
    job: Job
    facts: tuple[Fact, ...] = ()

    @property
    def reference(self) -> str | None:
        return self.job.reference


class MemoryRecords:
    def __init__(
        self, entries: dict[JobId, MemoryEntry], references: dict[tuple[TenantId, str], JobId]
    ) -> None:
        self._entries = entries
        self._references = references

    async def get(self, job_id: JobId) -> Job | None:
        entry = self._entries.get(job_id)
        return None if entry is None else entry.job

    async def by_reference(self, tenant: TenantId, reference: str) -> Job | None:
        job_id = self._references.get((tenant, reference))
        return None if job_id is None else self._entries[job_id].job

    async def listing(
        self,
        *,
        tenant: TenantId | None,
        phase: Phase | None,
        limit: int,
        after: JobId | None,
        newest_first: bool = False,
    ) -> list[Job]:
        """Two ids of one millisecond may be out of order, so a page continues by sequence."""
        last = None if after is None else self._entries.get(after)
        page = []
        for job_id, entry in reversed(self._entries.items()) if newest_first else self._entries.items():
            if last is not None:
                here, there = entry.dispatch.sequence, last.dispatch.sequence
                if here >= there if newest_first else here <= there:
                    continue
            elif after is not None and (job_id >= after if newest_first else job_id <= after):
                # The last job of the previous page is gone; its id still gives its time.
                continue
            if tenant not in (None, entry.job.tenant) or phase not in (None, entry.dispatch.phase):
                continue
            page.append(entry.job)
            if len(page) == limit:
                break
        return page
