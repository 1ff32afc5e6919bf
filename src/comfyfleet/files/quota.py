"""The storage quota of each tenant.

Each file has an entry with its size, so the quota sums only the tenant's own files. The sum is cached for a
minute and updated by this hub's changes; changes of other hubs count after that.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from hashlib import sha256

import msgspec

from comfyfleet.files.record_store import FileRecordStore
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.file import FileRecord
from comfyfleet.model.ids import TenantId
from comfyfleet.paginator import documents_in
from comfyfleet.ports import Clock

COLLECTION = "files_of"
_PAGE = 500
_REMEMBER_S = 60.0
_MAX_REMEMBERED = 10_000


class _Sum(msgspec.Struct):
    size: int
    at: float


class StorageQuota:
    def __init__(self, records: FileRecordStore, clock: Clock, most: int | None) -> None:
        """`most`: bytes of one tenant. None: no quota, and no entries."""
        self._records = records
        self._clock = clock
        self._most = most
        self._sums: dict[TenantId, _Sum] = {}
        self._arriving: Counter[TenantId] = Counter()
        """Bytes of unfinished uploads whose size is unknown."""
        self._counting = asyncio.Lock()

    async def take(self, tenant: TenantId, size: int) -> None:
        """Reserves bytes for a new file (0: size unknown). Raises the refusal `too_large`."""
        if self._most is not None:
            known = await self._sum(tenant)
            self._check(tenant, known, size, self._most)
            # At once, so simultaneous uploads cannot use the same bytes.
            known.size += size

    async def metered(self, tenant: TenantId, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Passes on pieces of a file of unknown size and counts them until the upload ends."""
        size = 0
        try:
            async for piece in pieces:
                if self._most is not None:
                    self._check(tenant, await self._sum(tenant), len(piece), self._most)
                    self._arriving[tenant] += len(piece)
                    size += len(piece)
                yield piece
        finally:
            if size:
                self._arriving[tenant] -= size
                if not self._arriving[tenant]:
                    del self._arriving[tenant]

    def _check(self, tenant: TenantId, known: _Sum, size: int, most: int) -> None:
        taken = known.size + self._arriving.get(tenant, 0)
        if taken + max(size, 1) > most:
            raise Refusal(
                RefusalCode.TOO_LARGE,
                f"the files of this tenant use {taken} of {most} bytes, so there is no space for {size or 'any'} more: "
                "wait until old files expire, or ask the hub's operator to raise limits.max_tenant_file_bytes",
                taken=taken,
                max_bytes=most,
            )

    async def note(self, record: FileRecord) -> None:
        """Writes the entry of a file."""
        if self._most is not None:
            documents = await self._records.documents(record.tenant)
            await documents.put(COLLECTION, _name(record), b"%d" % (record.size or 0), version=None)

    async def forget(self, record: FileRecord) -> None:
        """Removes the entry, even if there is no quota any more."""
        documents = await self._records.documents(record.tenant)
        is_noted = await documents.remove(COLLECTION, _name(record))
        if is_noted and (known := self._sums.get(record.tenant)) is not None:
            known.size = max(0, known.size - (record.size or 0))

    async def _sum(self, tenant: TenantId) -> _Sum:
        if (known := self._fresh(tenant)) is not None:
            return known
        # Count once: a second count would overwrite what other uploads reserve meanwhile.
        async with self._counting:
            if (known := self._fresh(tenant)) is None:
                known = self._sums[tenant] = _Sum(await self._counted(tenant), self._clock.now())
                if len(self._sums) > _MAX_REMEMBERED:
                    del self._sums[next(iter(self._sums))]
        return known

    def _fresh(self, tenant: TenantId) -> _Sum | None:
        known = self._sums.get(tenant)
        is_fresh = known is not None and 0 <= self._clock.now() - known.at < _REMEMBER_S
        return known if is_fresh else None

    async def _counted(self, tenant: TenantId) -> int:
        documents = await self._records.documents(tenant)
        entries = documents_in(documents, COLLECTION, _beginning(tenant), _PAGE)
        return sum([int(each.body) async for each in entries])


def _beginning(tenant: TenantId) -> str:
    """The name prefix of a tenant's entries: the same length for every tenant."""
    return sha256(tenant.encode()).hexdigest()[:32] + "/"


def _name(record: FileRecord) -> str:
    return _beginning(record.tenant) + record.file_id
