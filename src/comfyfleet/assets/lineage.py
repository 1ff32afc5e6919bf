"""What came of a file: noted beside the records, by the file it was made from, so that both ways can be asked.

A note is written before the record that it is about and goes with it; one without a record is passed over.
"""

from __future__ import annotations

from comfyfleet.assets.keeping import RecordKeeper
from comfyfleet.model.file import FilePage, FileRecord

_DRAWER = "file_lineage"


class Lineage:
    def __init__(self, records: RecordKeeper) -> None:
        self._records = records

    async def note(self, record: FileRecord) -> None:
        if record.derived_from:
            cabinet = await self._records.cabinet(record.tenant)
            for origin in record.derived_from:
                await cabinet.put(_DRAWER, f"{origin}/{record.file_id}", b"", version=None)

    async def forget(self, record: FileRecord) -> None:
        if record.derived_from:
            cabinet = await self._records.cabinet(record.tenant)
            for origin in record.derived_from:
                await cabinet.remove(_DRAWER, f"{origin}/{record.file_id}")

    async def derived(self, origin: FileRecord, after: str, limit: int) -> FilePage:
        """Files that are there, the oldest first."""
        cabinet, beginning = await self._records.cabinet(origin.tenant), f"{origin.file_id}/"
        page = await cabinet.listing(_DRAWER, beginning + after, limit)
        names = [each.name.removeprefix(beginning) for each in page if each.name.startswith(beginning)]
        found = [await self._records.get(name, origin.tenant) for name in names]
        # Whoever announces a file says what it was made from: of another tenant's it is not believed.
        told = [
            each for each in found if each is not None and each.is_complete and each.tenant == origin.tenant
        ]
        return FilePage(told, names[-1] if len(names) == limit else None)
