"""How many bytes the files of a tenant take, and whether there is room for more.

Beside the records of a tenant's files stands an entry for each with its size, so that they are summed up without
anybody else's. A sum is remembered for a while and kept up with what happens here; what other hubs take in meanwhile is
seen with the next one.
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
from comfyfleet.ports import Clock

COLLECTION = "files_of"
_REMEMBER_S = 60.0
_MAX_REMEMBERED = 10_000
_PAGE = 1_000


class _Sum(msgspec.Struct):
    size: int
    at: float


class StorageQuota:
    def __init__(self, records: FileRecordStore, clock: Clock, most: int | None) -> None:
        """`most`: of one tenant. None: there is no bound, and nothing is noted."""
        self._records = records
        self._clock = clock
        self._most = most
        self._sums: dict[TenantId, _Sum] = {}
        self._arriving: Counter[TenantId] = Counter()
        """Bytes of files whose size nobody knows yet."""
        self._counting = asyncio.Lock()

    async def take(self, tenant: TenantId, size: int) -> None:
        """For a file that wants to come in; 0, where nobody knows its size yet. Raises `too_large`."""
        if self._most is not None:
            known = await self._sum(tenant)
            self._check(tenant, known, size, self._most)
            # At once, so that of many who come together none is let in on the room of another.
            known.size += size

    async def arriving(self, tenant: TenantId, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Of a file whose size nobody knows yet: each takes room until all have come, and then the file does."""
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
                f"the files of this tenant take {taken} bytes of {most}, too many for {size or 'any'} more: "
                "files go when their time is over; the hub's operator sets the bound (limits.max_tenant_file_bytes)",
                taken=taken,
                max_bytes=most,
            )

    async def note(self, record: FileRecord) -> None:
        """For those who count later."""
        if self._most is not None:
            documents = await self._records.documents(record.tenant)
            await documents.put(COLLECTION, _name(record), b"%d" % (record.size or 0), version=None)

    async def forget(self, record: FileRecord) -> None:
        """Also where there is no bound any more."""
        documents = await self._records.documents(record.tenant)
        is_noted = await documents.remove(COLLECTION, _name(record))
        if is_noted and (known := self._sums.get(record.tenant)) is not None:
            known.size = max(0, known.size - (record.size or 0))

    async def _sum(self, tenant: TenantId) -> _Sum:
        if (known := self._fresh(tenant)) is not None:
            return known
        # One counts for all who come meanwhile: a second count would not know what they have taken.
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
        documents, beginning = await self._records.documents(tenant), _beginning(tenant)
        size, after = 0, beginning
        while page := await documents.listing(COLLECTION, after, _PAGE):
            ours = [each for each in page if each.name.startswith(beginning)]
            size += sum(int(each.body) for each in ours)
            if len(ours) < _PAGE:
                break
            after = ours[-1].name
        return size


def _beginning(tenant: TenantId) -> str:
    """Of the same length for every tenant, whatever it is called."""
    return sha256(tenant.encode()).hexdigest()[:32] + "/"


def _name(record: FileRecord) -> str:
    return _beginning(record.tenant) + record.file_id
