"""File records in the central document store or in the tenant's database, and the lineage of files.

For a record in a tenant database, the central store has a *stub* with id, tenant and attempt. It is written
before the record and removed after it, so a file can be found by its id alone. A lost stub is written again
as soon as somebody who knows the tenant asks for the file or lists it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping

import msgspec

from comfyfleet.model.errors import Fault
from comfyfleet.model.file import FilePage, FileRecord
from comfyfleet.model.ids import TenantId
from comfyfleet.paginator import documents_in
from comfyfleet.ports import DocumentStore

COLLECTION = "files"
_PARTS = "file_parts"
_LINEAGE = "file_lineage"
_PAGE = 500
_TRIES = 20
_records = msgspec.json.Decoder(FileRecord)

DocumentsOf = Callable[[TenantId], Awaitable[DocumentStore]]
"""The document store of a tenant: the central one, or its own. Raises `Fault` while it is unreachable."""


class FileRecordStore:
    def __init__(self, central: DocumentStore, documents_of: DocumentsOf | None = None) -> None:
        self._central = central
        self._documents_of = documents_of

    async def documents(self, tenant: TenantId) -> DocumentStore:
        return self._central if self._documents_of is None else await self._documents_of(tenant)

    async def add(self, record: FileRecord) -> None:
        documents = await self.documents(record.tenant)
        if documents is not self._central and not await _put(self._central, _stub(record), 0):
            raise _taken()
        if not await _put(documents, record, 0):
            raise _taken()

    async def get(self, file_id: str, tenant: TenantId | None = None) -> FileRecord | None:
        """With `tenant`, finds a record whose stub is lost, writes the stub again, and reads no other
        tenant's database."""
        found = await _get(self._central, file_id)
        if found is not None and not found.has_tenant_database:
            return found
        owner = tenant if found is None else found.tenant
        if owner is None or (tenant is not None and owner != tenant):
            return None
        documents = await self.documents(owner)
        record = None if documents is self._central else await _get(documents, file_id)
        if found is None and record is not None:
            await _put(self._central, _stub(record), 0)
        return record

    async def restore_stubs(self, page: list[FileRecord], tenant: TenantId) -> None:
        """Writes the lost stubs of a page from the tenant's database: links find a file by its stub."""
        if await self.documents(tenant) is not self._central:
            for record in page:
                if await self._central.get(COLLECTION, record.file_id) is None:
                    await _put(self._central, _stub(record), 0)

    async def resolve_stub(self, record: FileRecord) -> FileRecord:
        """The record of a stub, or the stub while the tenant database is unreachable."""
        try:
            return await self.get(record.file_id) or record if record.has_tenant_database else record
        except Fault:
            return record

    async def change(
        self,
        file_id: str,
        check: Callable[[FileRecord], None],
        *,
        keep: Container[str] = (),
        fields: Mapping[str, object],
    ) -> FileRecord | None:
        """`keep`: fields that do not change once they have a value. None: there is no such file."""

        def changed(record: FileRecord) -> dict[str, object]:
            check(record)
            return {
                name: value
                for name, value in fields.items()
                if name not in keep or getattr(record, name) is None
            }

        return await self.change_by(file_id, changed)

    async def change_by(
        self, file_id: str, changed: Callable[[FileRecord], dict[str, object]]
    ) -> FileRecord | None:
        """`changed` computes new field values from the record. None: there is no such file."""
        for _ in range(_TRIES):
            documents, document = self._central, await self._central.get(COLLECTION, file_id)
            if document is not None and (record := _records.decode(document.body)).has_tenant_database:
                documents = await self.documents(record.tenant)
                document = None if documents is self._central else await documents.get(COLLECTION, file_id)
            if document is None:
                return None
            record = _records.decode(document.body)
            record = msgspec.structs.replace(record, **changed(record))
            if await _put(documents, record, document.version):
                return record
        raise Fault(f"file {file_id!r} keeps changing at the same time; try again")

    async def remove(self, record: FileRecord) -> None:
        # The stub goes last: a leftover stub is found again.
        documents = await self.documents(record.tenant)
        if documents is not self._central:
            await documents.remove(COLLECTION, record.file_id)
        await self._central.remove(COLLECTION, record.file_id)

    # parts of unfinished uploads

    async def save_parts(self, record: FileRecord, digests: Mapping[int, str]) -> None:
        documents = await self.documents(record.tenant)
        for number, digest in digests.items():
            name = f"{record.file_id}/{number:05}"
            await documents.put(_PARTS, name, bytes.fromhex(digest), version=None)

    async def load_parts(self, record: FileRecord) -> dict[int, bytes]:
        """The last announced SHA-256 of each part."""
        documents, beginning = await self.documents(record.tenant), f"{record.file_id}/"
        parts = documents_in(documents, _PARTS, beginning, _PAGE)
        return {int(each.name.removeprefix(beginning)): each.body async for each in parts}

    async def remove_parts(self, record: FileRecord) -> None:
        documents = await self.documents(record.tenant)
        for number in await self.load_parts(record):
            await documents.remove(_PARTS, f"{record.file_id}/{number:05}")

    async def page(self, after: str, limit: int, tenant: TenantId | None = None) -> list[FileRecord]:
        """The oldest first: all files (some as stubs), or those in the document store of this tenant."""
        documents = self._central if tenant is None else await self.documents(tenant)
        return [_records.decode(each.body) for each in await documents.listing(COLLECTION, after, limit)]


def _stub(record: FileRecord) -> FileRecord:
    """Only what is needed to find the record and the bytes."""
    return FileRecord(
        record.file_id,
        record.tenant,
        record.created_at,
        kind=record.kind,
        job_id=record.job_id,
        attempt_id=record.attempt_id,
        has_tenant_database=True,
    )


def _taken() -> Fault:
    return Fault("the id of the new file is taken; try again")


async def _get(documents: DocumentStore, file_id: str) -> FileRecord | None:
    document = await documents.get(COLLECTION, file_id)
    return None if document is None else _records.decode(document.body)


async def _put(documents: DocumentStore, record: FileRecord, version: int) -> bool:
    return await documents.put(COLLECTION, record.file_id, msgspec.json.encode(record), version=version)


class Lineage:
    """Which files were made from a file. Entries are written before their record."""

    def __init__(self, records: FileRecordStore) -> None:
        self._records = records

    async def note(self, record: FileRecord) -> None:
        if record.derived_from:
            documents = await self._records.documents(record.tenant)
            for origin in record.derived_from:
                await documents.put(_LINEAGE, f"{origin}/{record.file_id}", b"", version=None)

    async def forget(self, record: FileRecord) -> None:
        if record.derived_from:
            documents = await self._records.documents(record.tenant)
            for origin in record.derived_from:
                await documents.remove(_LINEAGE, f"{origin}/{record.file_id}")

    async def derived(self, origin: FileRecord, after: str, limit: int) -> FilePage:
        """Complete files, the oldest first."""
        documents, beginning = await self._records.documents(origin.tenant), f"{origin.file_id}/"
        page = await documents.listing(_LINEAGE, beginning + after, limit)
        names = [each.name.removeprefix(beginning) for each in page if each.name.startswith(beginning)]
        found = [await self._records.get(name, origin.tenant) for name in names]
        # Callers may announce any origin, also a file of another tenant.
        visible = [
            each for each in found if each is not None and each.is_complete and each.tenant == origin.tenant
        ]
        return FilePage(visible, names[-1] if len(names) == limit else None)
