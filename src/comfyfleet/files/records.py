"""The life of a file record: reserved, received, completed, deleted after its retention.

`record_store.py` knows where records are; `local.py` and `s3.py` have the bytes and the links.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypedDict, Unpack

from comfyfleet.files.quota import StorageQuota
from comfyfleet.files.record_store import DocumentsOf, FileRecordStore, Lineage
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileAnnouncement, FilePage, FileRecord
from comfyfleet.model.ids import TenantId
from comfyfleet.ports import Clock, DocumentStore

_LOG = logging.getLogger(__name__)

GRANT_S = 900.0
KEEP_S = 7 * 86400.0
"""As long as failed jobs: after that no job refers to a file."""
_GRACE = 1.01
"""Files go a little after their time: a job may name one just before and mark it as in use just after."""
MAX_FILE_BYTES = 64 * 2**30
PAGE = 200
PAGES = 20
_PRUNE_EVERY_S = 60.0
_ID = re.compile(r"f_([0-9a-f]{12})[0-9a-f]{20}")


class FileStoreOptions(TypedDict, total=False):
    max_bytes: int
    grant_s: float
    keep_s: float
    documents_of: DocumentsOf | None
    tenant_bytes: int | None
    """The quota of one tenant. None: no quota."""


class FileRecords:
    """The part of `FileStore` that `LocalFileStore` and `S3FileStore` share."""

    def __init__(
        self,
        documents: DocumentStore,
        clock: Clock,
        *,
        max_bytes: int = MAX_FILE_BYTES,
        grant_s: float = GRANT_S,
        keep_s: float = KEEP_S,
        documents_of: DocumentsOf | None = None,
        tenant_bytes: int | None = None,
    ) -> None:
        self._documents = documents
        self._records = FileRecordStore(documents, documents_of)
        self._lineage = Lineage(self._records)
        self._quota = StorageQuota(self._records, clock, tenant_bytes)
        self._clock = clock
        self._max_bytes = max_bytes
        self._grant_s = grant_s
        self._keep_s = keep_s
        self._pruned_at = clock.now()
        self._pruned_to = ""
        self.in_use: Callable[[str], Awaitable[bool]] = _never_in_use

    async def reserve(self, tenant: TenantId, **announced: Unpack[FileAnnouncement]) -> FileRecord:
        if (announced.get("size") or 0) > self._max_bytes:
            raise too_large(self._max_bytes)
        now = self._clock.now()
        if now - self._pruned_at >= _PRUNE_EVERY_S:
            self._pruned_at = now
            await self._tidy(1)
        await self._quota.take(tenant, announced.get("size") or 0)
        # Ids start with the time, so lists have old files first.
        file_id = f"f_{int(now * 1000):012x}{secrets.token_hex(10)}"
        record = FileRecord(file_id, tenant, now, **announced)
        await self._lineage.note(record)
        await self._records.add(record)
        # After the record: an entry without a record would use up the quota for ever.
        await self._quota.note(record)
        return record

    async def derived(self, record: FileRecord, after: str = "", limit: int = PAGE) -> FilePage:
        return await self._lineage.derived(record, after, limit)

    async def listing(self, after: str, limit: int, tenant: TenantId | None = None) -> FilePage:
        """The oldest first; `tenant` None: of all tenants."""
        page = await self._records.page(after, limit, tenant)
        if tenant is not None:
            await self._records.restore_stubs(page, tenant)
        found = [await self._records.resolve_stub(each) for each in page if tenant in (None, each.tenant)]
        return FilePage(found, page[-1].file_id if len(page) == limit else None)

    async def get(self, file_id: str, tenant: TenantId | None = None) -> FileRecord | None:
        return await self._records.get(file_id, tenant) if is_file_id(file_id) else None

    def is_expired(self, record: FileRecord) -> bool:
        return self._clock.now() - record.created_at >= self._keep_s

    async def _known(self, file_id: str) -> FileRecord:
        record = await self.get(file_id)
        if record is None:
            raise file_not_found(file_id)
        return record

    async def _change(
        self, file_id: str, check: Callable[[FileRecord], None] = lambda _: None, **fields: object
    ) -> FileRecord:
        record = await self._records.change(file_id, check, fields=fields)
        if record is None:
            raise file_not_found(file_id)
        return record

    async def keep_thumbnail(self, file_id: str, size: int, thumbnail: str) -> None:
        """A thumbnail is deleted with its file, or when a new one replaces it."""
        replaced: str | None = None

        def noted(record: FileRecord) -> dict[str, object]:
            nonlocal replaced
            replaced = record.thumbnails.get(str(size))
            return {"thumbnails": {**record.thumbnails, str(size): thumbnail}}

        await self._records.change_by(file_id, noted)
        if replaced is not None and (old := await self.get(replaced)) is not None:
            await self._forget(old)

    # deletion

    async def clean_up(self) -> None:
        """Deletes expired files. The hub calls this from time to time."""
        self._pruned_at = self._clock.now()
        await self._tidy(PAGES)

    async def _tidy(self, pages: int) -> None:
        await self._prune(pages)

    async def _remove(self, record: FileRecord) -> None:
        """Deletes the bytes, if there are any."""
        raise NotImplementedError

    async def _prune(self, pages: int) -> None:
        for _ in range(pages):
            await self._prune_page()
            if not self._pruned_to:
                return

    async def _prune_page(self) -> None:
        """Deletes the expired files of one page, except those in use. The next call continues after it."""
        page = await self._records.page(self._pruned_to, PAGE)
        self._pruned_to = page[-1].file_id if len(page) == PAGE else ""
        for record in page:
            if not self._is_expired(record.created_at):
                self._pruned_to = ""
                break
            if await self.in_use(record.file_id):
                continue
            try:
                await self._forget(record)
            except (Fault, OSError) as error:
                # The caller uploads another file, perhaps for another tenant.
                _LOG.warning("cannot delete the file %s, will retry: %s", record.file_id, error)

    async def forget_tenant(self, tenant: TenantId) -> int:
        """Deletes all files of a tenant, even those in use, and answers how many. May be repeated."""
        count, after = 0, ""
        while page := await self._records.page(after, PAGE, tenant):
            after = page[-1].file_id
            for record in page:
                if record.tenant == tenant:
                    await self._forget(record)
                    count += 1
        return count

    async def forget(self, record: FileRecord) -> None:
        """Deletes a file with its bytes and thumbnails. The caller checks that no job needs it."""
        await self._forget(record)

    async def _forget(self, record: FileRecord) -> None:
        if record.has_tenant_database:
            record = await self._records.get(record.file_id) or record
        for each in record.thumbnails.values():
            if (thumbnail := await self._records.get(each, record.tenant)) is not None:
                await self._forget(thumbnail)
        # The record goes last: a leftover record is found again.
        await self._remove(record)
        await self._lineage.forget(record)
        await self._quota.forget(record)
        await self._records.remove(record)

    def _is_expired(self, since: float) -> bool:
        return since <= self._clock.now() - self._keep_s * _GRACE

    # bounds

    def _bound(self, record: FileRecord) -> int:
        return self._max_bytes if record.size is None else min(record.size, self._max_bytes)

    async def metered(self, tenant: TenantId, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Passes on the pieces of a file of unknown size, within the size limit and the quota."""
        size = 0
        async with aclosing(self._quota.metered(tenant, pieces)) as accepted:
            async for piece in accepted:
                size += len(piece)
                if size > self._max_bytes:
                    raise too_large(self._max_bytes)
                yield piece


def too_large(most: int) -> Refusal:
    return Refusal(RefusalCode.TOO_LARGE, f"this file may have at most {most} bytes", max_bytes=most)


async def _never_in_use(_: str) -> bool:
    return False


def file_not_found(file_id: str) -> Refusal:
    return Refusal(RefusalCode.NOT_FOUND, f"there is no file {file_id!r} (any more)")


def is_file_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def made_at(file_id: str) -> float | None:
    """The time in a file id; None: it is not a file id."""
    found = _ID.fullmatch(file_id)
    return None if found is None else int(found[1], 16) / 1000


def check_is_open(record: FileRecord) -> None:
    if record.received_at is not None:
        raise already_received()


def already_received() -> Refusal:
    return Refusal(RefusalCode.WRONG_PHASE, "this file has been received already: create a new one")


def check_is(record: FileRecord, size: int, digest: str, then: str = "send it again") -> None:
    if record.size is not None and size != record.size:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"{size} bytes were received, but {record.size} were announced: {then}",
        )
    if record.sha256 is not None and not hmac.compare_digest(digest, record.sha256):
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"the SHA-256 of the received file differs from the announced one: {then}",
        )


def in_one_piece() -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, "this file is uploaded in one piece: PUT it to its link")
