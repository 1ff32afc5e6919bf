"""A file store in S3-compatible storage. Callers and workers transfer bytes directly, by signed links.

A link for writing binds length, type and SHA-256 and overwrites nothing; the hub checks each file before it
counts as complete. Object keys contain the lease, so attempts cannot overwrite each other. The hub decides
who gets a link.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Literal, Self, Unpack
from urllib.parse import quote, unquote

from comfyfleet.files.part_uploads import PART_BYTES, TAKEN, PartUploads
from comfyfleet.files.records import (
    PAGE,
    FileRecords,
    FileStoreOptions,
    already_received,
    check_is,
    check_is_open,
    made_at,
    too_large,
)
from comfyfleet.files.s3_storage import (
    CHECKSUM,
    MultipartUpload,
    S3Bucket,
    S3Credentials,
    S3Multipart,
    S3Storage,
    StorageRefused,
)
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileAnnouncement, FileGrant, FileRecord, PartPlan
from comfyfleet.model.ids import TenantId
from comfyfleet.ports import Clock, DocumentStore

_LOG = logging.getLogger(__name__)

_NEW_FILE = "create a new file and upload it again"
MAX_PUT_BYTES = 4 * 2**30
"""Every storage accepts this much in one request."""
LOOK_S = 8.0
"""Shorter than an agent's request timeout."""
_DIGEST_ERRORS = frozenset({"BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest"})


class S3FileStore(FileRecords):
    """An async context manager. A prefix belongs to one fleet."""

    def __init__(
        self,
        bucket: S3Bucket,
        credentials: S3Credentials,
        documents: DocumentStore,
        clock: Clock,
        *,
        prefix: str = "",
        part_bytes: int = PART_BYTES,
        max_put_bytes: int = MAX_PUT_BYTES,
        look_s: float = LOOK_S,
        **options: Unpack[FileStoreOptions],
    ) -> None:
        super().__init__(documents, clock, **options)
        self._storage = S3Storage(bucket, credentials)
        self._multipart = S3Multipart(self._storage)
        self._uploads = PartUploads(self._multipart, self._records, part_bytes, max_put_bytes)
        self._check_s = look_s
        self._checks: dict[str, asyncio.Task[FileRecord]] = {}
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._sweeping: asyncio.Task[None] | None = None
        self._next_key = ""
        self._next_upload: MultipartUpload | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait({self._sweeping})
            self._sweeping = None
        for check in list(self._checks.values()):
            check.cancel()
            await asyncio.wait({check})
        await self._storage.close()

    async def look(self) -> None:
        """Raises `Fault` if the storage is unreachable or refuses our credentials."""
        await self._storage.keys(self._prefix, "", 1)

    # records

    async def reserve(self, tenant: TenantId, **announced: Unpack[FileAnnouncement]) -> FileRecord:
        if announced.get("size") is None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                "give the size: this hub's storage signs links for an exact length",
                field="size",
            )
        return await super().reserve(tenant, **announced)

    async def complete(self, file_id: str) -> FileRecord:
        """Simultaneous calls share one check, which may take longer than a request."""
        check = self._checks.get(file_id)
        if check is None:
            check = self._checks[file_id] = asyncio.create_task(self._check(file_id), name=f"check {file_id}")
            check.add_done_callback(lambda _: self._checks.pop(file_id))
            # Retrieve the exception, or asyncio logs it.
            check.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait({check}, timeout=self._check_s)
        if not check.done():
            raise Refusal(
                RefusalCode.UNAVAILABLE,
                f"the hub is still checking the file {file_id!r} in the storage: ask again",
                retry_after_s=1.0,
            )
        return check.result()

    async def _check(self, file_id: str) -> FileRecord:
        """Compares size and SHA-256. Reads the whole file if the storage computes no SHA-256."""
        record = await self._known(file_id)
        if record.is_complete:
            return record
        key = self._key(record)
        found = await self._storage.head(key)
        if found is None and record.upload is not None:
            await self._uploads.complete(record, key)
            found = await self._storage.head(key)
        if found is None:
            raise Refusal(RefusalCode.WRONG_PHASE, "the file has not been received: PUT it to its link first")
        # Check the size first: then a file of the wrong size is not read.
        check_is(record, found.size, record.sha256 or "", _NEW_FILE)
        digest = found.sha256 or await self._digest(record)
        check_is(record, found.size, digest, _NEW_FILE)
        now = self._clock.now()
        done = await self._change(
            file_id, size=found.size, sha256=digest, received_at=record.received_at or now, is_complete=True
        )
        # Abort other uploads of its parts.
        await self._uploads.forget(done, key)
        return done

    async def _digest(self, record: FileRecord) -> str:
        digest = hashlib.sha256()
        async with contextlib.aclosing(self.read(record)) as pieces:
            async for piece in pieces:
                await asyncio.to_thread(digest.update, piece)
        return digest.hexdigest()

    # links

    async def grant(self, record: FileRecord, method: Literal["GET", "PUT"]) -> FileGrant:
        now = float(int(self._clock.now()))
        expires_s = int(self._grant_s)
        if method == "PUT":
            if (plan := self.parts(record)) is not None and plan.is_required:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST, "this file is too large for one piece: upload it in parts"
                )
            headers = _bound_headers(record)
            url = self._storage.signed("PUT", self._key(record), now, expires_s, headers)
            return FileGrant("PUT", url, now + expires_s, headers)
        # As an attachment: a browser must not show an upload as a page of the storage.
        query = {
            "response-content-disposition": f"attachment; filename*=UTF-8''{quote(record.name, safe='')}",
            "response-content-type": record.content_type,
        }
        url = self._storage.signed("GET", self._key(record), now, expires_s, query=query)
        return FileGrant("GET", url, now + expires_s)

    def parts(self, record: FileRecord) -> PartPlan | None:
        return self._uploads.plan(record)

    async def part_grants(self, record: FileRecord, digests: Mapping[int, str]) -> list[FileGrant]:
        now = float(int(self._clock.now()))
        return await self._uploads.grants(record, self._key(record), digests, now, int(self._grant_s))

    def _key(self, record: FileRecord) -> str:
        """Contains the attempt, so two attempts cannot overwrite each other's outputs."""
        tenant = quote(record.tenant, safe="").replace(".", "%2E")
        folder = record.attempt_id or ("thumbnails" if record.kind == "thumbnail" else "inputs")
        return f"{self._prefix}{tenant}/{folder}/{record.file_id}"

    # bytes

    async def receive(self, record: FileRecord, pieces: AsyncIterator[bytes]) -> FileRecord:
        """For callers in the hub's process; all others use links."""
        check_is_open(record)
        counted = _Counted(pieces, self._bound(record))
        try:
            if (plan := self.parts(record)) is not None and plan.is_required:
                await self._uploads.receive(record, self._key(record), counted.pieces())
            else:
                await self._storage.write(self._key(record), counted.pieces(), _bound_headers(record))
        except StorageRefused as refused:
            if refused.code == TAKEN:
                raise already_received() from refused
            if refused.code in _DIGEST_ERRORS and record.sha256 != counted.sha256:
                check_is(record, counted.size, counted.sha256)
            raise
        except Fault:
            # An error of the sender ended the request: raise that one.
            if counted.error is not None:
                raise counted.error from None
            raise
        return await self._change(
            record.file_id,
            check_is_open,
            size=counted.size,
            sha256=counted.sha256,
            received_at=self._clock.now(),
        )

    async def read(self, record: FileRecord) -> AsyncGenerator[bytes, None]:
        try:
            async with contextlib.aclosing(self._storage.read(self._key(record))) as pieces:
                async for piece in pieces:
                    yield piece
        except StorageRefused as refused:
            if refused.status == 404:
                raise Refusal(
                    RefusalCode.NOT_FOUND, f"the file {record.file_id!r} is not in the storage"
                ) from None
            raise

    # deletion

    async def _tidy(self, pages: int) -> None:
        """Runs in the background, because the storage may be slow."""
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep(pages), name="sweep of files")

    async def swept(self) -> None:
        """Waits for the running cleanup."""
        if self._sweeping is not None:
            await asyncio.wait({self._sweeping})

    async def _sweep(self, pages: int) -> None:
        try:
            await self._prune(pages)
            await self._remove_orphans()
        except Exception as error:
            _LOG.warning("cannot delete old files, will retry: %s", error)

    async def _remove(self, record: FileRecord) -> None:
        key = self._key(record)
        await self._storage.remove(key)
        await self._uploads.forget(record, key)

    async def _remove_orphans(self) -> None:
        """Deletes a page of old objects and uploads without a record. Keeps objects with other names."""
        page = await self._storage.keys(self._prefix, self._next_key, PAGE)
        self._next_key = page[-1] if len(page) == PAGE else ""
        for key in page:
            if await self._is_orphan(key):
                await self._storage.remove(key)
        uploads = await self._multipart.uploads(self._prefix, self._next_upload, PAGE)
        self._next_upload = uploads[-1] if len(uploads) == PAGE else None
        for upload in uploads:
            if await self._is_orphan(upload.key):
                await self._multipart.abort(upload.key, upload.upload_id)

    async def _is_orphan(self, key: str) -> bool:
        file_id = key.rpartition("/")[2]
        since = made_at(file_id)
        if since is None or not self._is_expired(since):
            return False
        tenant = TenantId(unquote(key.removeprefix(self._prefix).partition("/")[0]))
        try:
            return await self.get(file_id, tenant) is None
        except Fault as fault:
            # The tenant database is unreachable: a later cleanup finds the file again.
            _LOG.warning("cannot tell whether %s is an orphan, will retry: %s", file_id, fault)
            return False


def _bound_headers(record: FileRecord) -> dict[str, str]:
    """The headers that a link for writing is signed for."""
    if record.size is None:
        # Announced before the hub used this storage.
        raise Refusal(RefusalCode.WRONG_PHASE, "this file was announced without its size: create a new one")
    headers = {
        "content-length": str(record.size),
        "content-type": record.content_type,
        "if-none-match": "*",
    }
    if record.sha256 is not None:
        headers[CHECKSUM] = base64.b64encode(bytes.fromhex(record.sha256)).decode()
    return headers


class _Counted:
    """Counts pieces, and keeps the error of a wrong length: the HTTP client would lose it."""

    def __init__(self, pieces: AsyncIterator[bytes], length: int) -> None:
        self._pieces = pieces
        self._length = length
        self._digest = hashlib.sha256()
        self.size = 0
        self.error: BaseException | None = None

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            async for piece in self._pieces:
                self.size += len(piece)
                if self.size > self._length:
                    raise too_large(self._length)
                self._digest.update(piece)
                yield piece
            if self.size < self._length:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST,
                    f"{self.size} bytes were received, but {self._length} were announced: send it again",
                )
        except Exception as error:
            self.error = error
            raise
