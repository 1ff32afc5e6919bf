"""What is known of each file: a record that is made, changed and forgotten here, wherever it and the bytes lie.

A file is named by its id alone, which nobody chooses and which tells when it was made. Whose cabinet a record lies in
is `record_store.py`'s; bytes, and links to them, are `local.py`'s and `s3.py`'s.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Unpack

from comfyfleet.files.quota import StorageQuota
from comfyfleet.files.record_store import DocumentsOf, FileRecordStore, Lineage
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileAnnouncement, FilePage, FileRecord
from comfyfleet.model.ids import TenantId
from comfyfleet.ports import Clock, DocumentStore

_LOG = logging.getLogger(__name__)

GRANT_S = 900.0
KEEP_S = 7 * 86400.0
"""As long as the jobs that failed: afterwards nothing refers to a file any more."""
_LONGER = 1.01
"""Swept a little after its time is over, so that none goes between being named in time and being noted as in use."""
MAX_FILE_BYTES = 64 * 2**30
PAGE = 200
PAGES = 20
_PRUNE_EVERY_S = 60.0
_ID = re.compile(r"f_([0-9a-f]{12})[0-9a-f]{20}")


class FileRecords:
    """What `LocalFileStore` and `S3FileStore` have in common: half of `FileStore`."""

    def __init__(
        self,
        documents: DocumentStore,
        clock: Clock,
        max_bytes: int,
        grant_s: float,
        keep_s: float,
        documents_of: DocumentsOf | None,
        tenant_bytes: int | None,
    ) -> None:
        """`tenant_bytes`: what all files of one tenant may take together. None: as much as there is."""
        self._documents = documents
        self._records = FileRecordStore(documents, documents_of)
        self._lineage = Lineage(self._records)
        self._room = StorageQuota(self._records, clock, tenant_bytes)
        self._clock = clock
        self._max_bytes = max_bytes
        self._grant_s = grant_s
        self._keep_s = keep_s
        self._pruned_at = clock.now()
        self._pruned_to = ""
        self.in_use: Callable[[str], Awaitable[bool]] = _nowhere

    async def reserve(self, tenant: TenantId, **said: Unpack[FileAnnouncement]) -> FileRecord:
        if (said.get("size") or 0) > self._max_bytes:
            raise self._too_large()
        now = self._clock.now()
        if now - self._pruned_at >= _PRUNE_EVERY_S:
            self._pruned_at = now
            await self._tidy(1)
        await self._room.take(tenant, said.get("size") or 0)
        # Ids grow with time, so that old files stand first in a list.
        file_id = f"f_{int(now * 1000):012x}{secrets.token_hex(10)}"
        record = FileRecord(file_id, tenant, now, **said)
        await self._lineage.note(record)
        await self._records.add(record)
        # The entry stands as long as the record or shorter: one that is left over would take room for ever.
        await self._room.note(record)
        return record

    async def derived(self, record: FileRecord, after: str = "", limit: int = PAGE) -> FilePage:
        return await self._lineage.derived(record, after, limit)

    async def listing(self, after: str, limit: int, tenant: TenantId | None = None) -> FilePage:
        """A tenant's, or all there are, the oldest first."""
        page = await self._records.page(after, limit, tenant)
        found = [await self._records.whole(each) for each in page if tenant in (None, each.tenant)]
        return FilePage(found, page[-1].file_id if len(page) == limit else None)

    async def get(self, file_id: str, tenant: TenantId | None = None) -> FileRecord | None:
        return await self._records.get(file_id, tenant) if is_file_id(file_id) else None

    def is_old(self, record: FileRecord) -> bool:
        return self._clock.now() - record.created_at >= self._keep_s

    async def _known(self, file_id: str) -> FileRecord:
        record = await self.get(file_id)
        if record is None:
            raise gone(file_id)
        return record

    async def _change(
        self, file_id: str, check: Callable[[FileRecord], None] = lambda _: None, **fields: object
    ) -> FileRecord:
        record = await self._records.change(file_id, check, fields=fields)
        if record is None:
            raise gone(file_id)
        return record

    async def keep_thumbnail(self, file_id: str, size: int, thumbnail: str) -> None:
        """It goes with the file it is of, and before it only if another takes its place."""
        replaced: str | None = None

        def noted(record: FileRecord) -> dict[str, object]:
            nonlocal replaced
            replaced = record.thumbnails.get(str(size))
            return {"thumbnails": {**record.thumbnails, str(size): thumbnail}}

        await self._records.change_by(file_id, noted)
        if replaced is not None and (old := await self.get(replaced)) is not None:
            await self._forget(old)

    # the end of files

    async def tidy(self) -> None:
        """Forgets those whose time is over, a good many at once. Asked for once in a while."""
        self._pruned_at = self._clock.now()
        await self._tidy(PAGES)

    async def _tidy(self, pages: int) -> None:
        await self._prune(pages)

    async def _remove(self, record: FileRecord) -> None:
        """The bytes, if they are there."""
        raise NotImplementedError

    async def _prune(self, pages: int) -> None:
        for _ in range(pages):
            await self._prune_page()
            if not self._pruned_to:
                return

    async def _prune_page(self) -> None:
        """The oldest stand first in the drawer. The bytes go before the record: what is left over is found again.

        Old files in use stay; where they fill a page, the next look goes on behind them.
        """
        page = await self._records.page(self._pruned_to, PAGE)
        self._pruned_to = page[-1].file_id if len(page) == PAGE else ""
        for record in page:
            if not self._is_over(record.created_at):
                self._pruned_to = ""
                break
            if await self.in_use(record.file_id):
                continue
            try:
                await self._forget(record)
            except (Fault, OSError) as error:
                # Whoever brings a new file is not to blame for an old one, nor one tenant for another's database.
                _LOG.warning("the file %s cannot be removed: %s", record.file_id, error)

    async def forget_tenant(self, tenant: TenantId) -> int:
        """All its files, bytes and records, whether in use or not; how many there were. May be repeated."""
        count, after = 0, ""
        while page := await self._records.page(after, PAGE, tenant):
            after = page[-1].file_id
            for record in page:
                if record.tenant == tenant:
                    await self._forget(record)
                    count += 1
        return count

    async def forget(self, record: FileRecord) -> None:
        """With its bytes and its thumbnails, now. Whether anybody needs it is the hub's to ask."""
        await self._forget(record)

    async def _forget(self, record: FileRecord) -> None:
        if record.has_tenant_database:
            record = await self._records.get(record.file_id) or record
        for each in record.thumbnails.values():
            if (thumbnail := await self._records.get(each, record.tenant)) is not None:
                await self._forget(thumbnail)
        await self._remove(record)
        await self._lineage.forget(record)
        await self._room.forget(record)
        await self._records.remove(record)

    def _is_over(self, since: float) -> bool:
        return since <= self._clock.now() - self._keep_s * _LONGER

    # bounds

    def _bound(self, record: FileRecord) -> int:
        return self._max_bytes if record.size is None else min(record.size, self._max_bytes)

    async def arriving(self, tenant: TenantId, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Of a file whose size nobody has said: as much as a file may have, and as there is room for meanwhile."""
        size = 0
        async with aclosing(self._room.arriving(tenant, pieces)) as let_in:
            async for piece in let_in:
                size += len(piece)
                if size > self._max_bytes:
                    raise self._too_large()
                yield piece

    def _too_large(self, bound: int | None = None) -> Refusal:
        most = self._max_bytes if bound is None else bound
        return Refusal(RefusalCode.TOO_LARGE, f"this file may have {most} bytes and no more", max_bytes=most)


async def _nowhere(_: str) -> bool:
    return False


def gone(file_id: str) -> Refusal:
    return Refusal(RefusalCode.NOT_FOUND, f"there is no file {file_id!r} (any more)")


def is_file_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def made_at(file_id: str) -> float | None:
    """When the file of this id was made; None: no id of ours."""
    found = _ID.fullmatch(file_id)
    return None if found is None else int(found[1], 16) / 1000


def check_is_open(record: FileRecord) -> None:
    if record.received_at is not None:
        raise Refusal(RefusalCode.WRONG_PHASE, "this file has been received already: make a new one")


def check_is(record: FileRecord, size: int, digest: str, then: str = "send it again") -> None:
    if record.size is not None and size != record.size:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"{size} bytes came, {record.size} were announced: {then}")
    if record.sha256 is not None and not hmac.compare_digest(digest, record.sha256):
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"what came has another SHA-256 than was announced: {then}"
        )


def in_one_piece() -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, "this file goes up in one piece: PUT it to its link")
