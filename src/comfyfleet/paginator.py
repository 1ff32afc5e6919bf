"""Walks through long lists page by page, so that no call to a store is large."""

from __future__ import annotations

from collections.abc import AsyncIterator

from comfyfleet.model.dispatch import Phase
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job
from comfyfleet.ports import Document, DocumentStore, RecordQuery, Records

_SIZE = 100


async def documents_in(
    documents: DocumentStore, collection: str, beginning: str = "", size: int = _SIZE
) -> AsyncIterator[Document]:
    """All documents of the collection whose name starts with `beginning`, by name."""
    after = beginning
    while page := await documents.listing(collection, after, size):
        for document in page:
            if not document.name.startswith(beginning):
                return
            yield document
        if len(page) < size:
            return
        after = page[-1].name


async def record_pages(
    records: Records, tenant: TenantId | None, phase: Phase, size: int
) -> AsyncIterator[list[Job]]:
    """Pages of jobs by submission. The caller may end or delete the jobs of a page."""
    after: JobId | None = None
    while page := await records.listing(RecordQuery(tenant=tenant, phase=phase, limit=size, after=after)):
        yield page
        if len(page) < size:
            return
        after = page[-1].job_id
