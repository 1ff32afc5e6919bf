"""Where the record of a file is kept: in the central cabinet, or in that of a tenant whose records lie apart.

Of a file whose record lies apart the central cabinet has a *stub*: its id, tenant and attempt, so that whoever knows
the id alone finds it, and old files are found in one place. The stub is written before the record and goes after it.

What came of a file: noted beside the records, by the file it was made from, so that both ways can be asked.

A note is written before the record that it is about and goes with it; one without a record is passed over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Mapping

import msgspec

from comfyfleet.model.errors import Fault
from comfyfleet.model.file import FilePage, FileRecord
from comfyfleet.model.ids import TenantId
from comfyfleet.ports import DocumentStore

COLLECTION = "files"
_PARTS = "file_parts"
_PAGE = 500
_TRIES = 20
_records = msgspec.json.Decoder(FileRecord)

DocumentsOf = Callable[[TenantId], Awaitable[DocumentStore]]
"""The cabinet that a tenant's records lie in: the central one itself, unless they lie apart. Raises `Fault` while it
cannot be reached."""


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
        """`tenant`, where it is known: its record is found even if the central store has lost the stub, and of any
        other no database is asked."""
        found = await _get(self._central, file_id)
        if found is not None and not found.has_tenant_database:
            return found
        owner = tenant if found is None else found.tenant
        if owner is None or (tenant is not None and owner != tenant):
            return None
        documents = await self.documents(owner)
        return None if documents is self._central else await _get(documents, file_id)

    async def whole(self, record: FileRecord) -> FileRecord:
        """Of a stub, the record; the stub itself while its tenant's database is away."""
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
        """`keep`: the names of fields that stay once they have a value. None: there is no such file (any more)."""

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
        """By new values for its fields, computed from what it is. None: there is no such file (any more)."""
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
        raise Fault(f"file {file_id!r} is being changed by others all the time; try again")

    async def remove(self, record: FileRecord) -> None:
        """The record, then its stub: what is left over is found again."""
        documents = await self.documents(record.tenant)
        if documents is not self._central:
            await documents.remove(COLLECTION, record.file_id)
        await self._central.remove(COLLECTION, record.file_id)

    # the parts of an upload that is under way

    async def note_parts(self, record: FileRecord, digests: Mapping[int, str]) -> None:
        documents = await self.documents(record.tenant)
        for number, digest in digests.items():
            name = f"{record.file_id}/{number:05}"
            await documents.put(_PARTS, name, bytes.fromhex(digest), version=None)

    async def noted_parts(self, record: FileRecord) -> dict[int, bytes]:
        """The SHA-256 that was last said of each."""
        documents, beginning = await self.documents(record.tenant), f"{record.file_id}/"
        found: dict[int, bytes] = {}
        after = beginning
        while page := await documents.listing(_PARTS, after, _PAGE):
            ours = [each for each in page if each.name.startswith(beginning)]
            found |= {int(each.name.removeprefix(beginning)): each.body for each in ours}
            if len(ours) < _PAGE:
                break
            after = ours[-1].name
        return found

    async def forget_parts(self, record: FileRecord) -> None:
        documents = await self.documents(record.tenant)
        for number in await self.noted_parts(record):
            await documents.remove(_PARTS, f"{record.file_id}/{number:05}")

    async def page(self, after: str, limit: int, tenant: TenantId | None = None) -> list[FileRecord]:
        """In the order of their ids, the oldest first: all there are, by their stubs where they lie apart; or those
        that lie where this tenant's do."""
        documents = self._central if tenant is None else await self.documents(tenant)
        return [_records.decode(each.body) for each in await documents.listing(COLLECTION, after, limit)]


def _stub(record: FileRecord) -> FileRecord:
    """What it takes to find the record, and the bytes; nothing of what they are."""
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
    return Fault("a new file's id is taken already; try again")


async def _get(documents: DocumentStore, file_id: str) -> FileRecord | None:
    document = await documents.get(COLLECTION, file_id)
    return None if document is None else _records.decode(document.body)


async def _put(documents: DocumentStore, record: FileRecord, version: int) -> bool:
    return await documents.put(COLLECTION, record.file_id, msgspec.json.encode(record), version=version)


_COLLECTION = "file_lineage"


class Lineage:
    def __init__(self, records: FileRecordStore) -> None:
        self._records = records

    async def note(self, record: FileRecord) -> None:
        if record.derived_from:
            documents = await self._records.documents(record.tenant)
            for origin in record.derived_from:
                await documents.put(_COLLECTION, f"{origin}/{record.file_id}", b"", version=None)

    async def forget(self, record: FileRecord) -> None:
        if record.derived_from:
            documents = await self._records.documents(record.tenant)
            for origin in record.derived_from:
                await documents.remove(_COLLECTION, f"{origin}/{record.file_id}")

    async def derived(self, origin: FileRecord, after: str, limit: int) -> FilePage:
        """Files that are there, the oldest first."""
        documents, beginning = await self._records.documents(origin.tenant), f"{origin.file_id}/"
        page = await documents.listing(_COLLECTION, beginning + after, limit)
        names = [each.name.removeprefix(beginning) for each in page if each.name.startswith(beginning)]
        found = [await self._records.get(name, origin.tenant) for name in names]
        # Whoever announces a file says what it was made from: of another tenant's it is not believed.
        told = [
            each for each in found if each is not None and each.is_complete and each.tenant == origin.tenant
        ]
        return FilePage(told, names[-1] if len(names) == limit else None)
