"""Files in S3-compatible storage: a record in the cabinet, the bytes in a bucket, links signed for one object each.

Bytes travel between callers, workers and the storage; the hub looks at what came before it believes it. A link to
write binds length, type and SHA-256, and writes over nothing. Whatever cannot be fenced has a key of its own: that of
its tenant, job, lease and file. Who may have a link is the hub's to decide.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Literal, Self, Unpack
from urllib.parse import quote, unquote

from comfyfleet.files.part_uploads import PART_BYTES, TAKEN, PartUploads
from comfyfleet.files.record_store import DocumentsOf
from comfyfleet.files.records import (
    GRANT_S,
    KEEP_S,
    MAX_FILE_BYTES,
    PAGE,
    FileRecords,
    check_is,
    check_is_open,
    made_at,
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

_ANEW = "make a new one, and send it there"
MAX_PUT_BYTES = 4 * 2**30
"""Less than any storage takes in one request."""
LOOK_S = 8.0
"""Less than an agent waits for an answer."""
_DIFFERS = frozenset({"BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest"})


class S3FileStore(FileRecords):
    """An async context manager: it owns its connections and the task that sweeps. A prefix belongs to one fleet."""

    def __init__(
        self,
        bucket: S3Bucket,
        credentials: S3Credentials,
        documents: DocumentStore,
        clock: Clock,
        *,
        prefix: str = "",
        max_bytes: int = MAX_FILE_BYTES,
        grant_s: float = GRANT_S,
        keep_s: float = KEEP_S,
        documents_of: DocumentsOf | None = None,
        part_bytes: int = PART_BYTES,
        max_put_bytes: int = MAX_PUT_BYTES,
        look_s: float = LOOK_S,
        tenant_bytes: int | None = None,
    ) -> None:
        super().__init__(documents, clock, max_bytes, grant_s, keep_s, documents_of, tenant_bytes)
        self._storage = S3Storage(bucket, credentials)
        self._multipart = S3Multipart(self._storage)
        self._uploads = PartUploads(self._multipart, self._records, part_bytes, max_put_bytes)
        self._look_s = look_s
        self._looks: dict[str, asyncio.Task[FileRecord]] = {}
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._sweeping: asyncio.Task[None] | None = None
        self._swept_to = ""
        self._given_up_to: MultipartUpload | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait({self._sweeping})
            self._sweeping = None
        for look in list(self._looks.values()):
            look.cancel()
            await asyncio.wait({look})
        await self._storage.close()

    async def look(self) -> None:
        """Whether the storage is there and takes our credentials. Raises `Fault`."""
        await self._storage.keys(self._prefix, "", 1)

    # records

    async def reserve(self, tenant: TenantId, **said: Unpack[FileAnnouncement]) -> FileRecord:
        if said.get("size") is None:
            raise Refusal(
                RefusalCode.INVALID_REQUEST,
                "say the size: this hub's files lie in a storage whose links are signed for an exact length",
                field="size",
            )
        return await super().reserve(tenant, **said)

    async def complete(self, file_id: str) -> FileRecord:
        """Looked at once, however often it is asked for meanwhile: of a large file that takes longer than anybody waits
        for an answer."""
        look = self._looks.get(file_id)
        if look is None:
            look = self._looks[file_id] = asyncio.create_task(
                self._look_at(file_id), name=f"look at {file_id}"
            )
            look.add_done_callback(lambda done: self._looked(file_id, done))
        await asyncio.wait({look}, timeout=self._look_s)
        if not look.done():
            raise Refusal(
                RefusalCode.UNAVAILABLE,
                f"the file {file_id!r} is being looked at where it lies, which takes a while: ask again",
                retry_after_s=1.0,
            )
        return look.result()

    def _looked(self, file_id: str, look: asyncio.Task[FileRecord]) -> None:
        del self._looks[file_id]
        if not look.cancelled():
            # Nobody may be waiting for it any more.
            look.exception()

    async def _look_at(self, file_id: str) -> FileRecord:
        """Its size, and its SHA-256 as the storage computed it; where it computes none, by reading it once."""
        record = await self._known(file_id)
        if record.is_complete:
            return record
        key = self._key(record)
        found = await self._storage.head(key)
        if found is None and record.upload is not None:
            await self._uploads.put_together(record, key)
            found = await self._storage.head(key)
        if found is None:
            raise Refusal(
                RefusalCode.WRONG_PHASE, "nothing has been received yet: PUT the file to its link first"
            )
        # What lies there stays: a link writes over nothing. Of the wrong size, it need not be read.
        check_is(record, found.size, record.sha256 or "", _ANEW)
        digest = found.sha256 or await self._digest(record)
        check_is(record, found.size, digest, _ANEW)
        now = self._clock.now()
        done = await self._change(
            file_id, size=found.size, sha256=digest, received_at=record.received_at or now, is_complete=True
        )
        # What else was sent of it in parts counts for nothing any more.
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
                    RefusalCode.INVALID_REQUEST, "this file is too large for one piece: send it in parts"
                )
            headers = _bound_headers(record)
            url = self._storage.signed("PUT", self._key(record), now, expires_s, headers)
            return FileGrant("PUT", url, now + expires_s, headers)
        # What somebody else uploaded is never shown as a page of the storage.
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
        """With the lease's number, so that of two attempts neither can write what the other's completion names."""
        tenant = quote(record.tenant, safe="").replace(".", "%2E")
        folder = record.attempt_id or ("thumbnails" if record.kind == "thumbnail" else "inputs")
        return f"{self._prefix}{tenant}/{folder}/{record.file_id}"

    # bytes

    async def receive(self, record: FileRecord, pieces: AsyncIterator[bytes]) -> FileRecord:
        """For whoever is in the hub's own process; all others have links."""
        check_is_open(record)
        counted = _Counted(pieces, self._bound(record))
        try:
            if (plan := self.parts(record)) is not None and plan.is_required:
                await self._uploads.receive(record, self._key(record), counted.pieces())
            else:
                await self._storage.write(self._key(record), counted.pieces(), _bound_headers(record))
        except StorageRefused as refused:
            if refused.code == TAKEN:
                raise Refusal(
                    RefusalCode.WRONG_PHASE, "this file has been received already: make a new one"
                ) from refused
            if refused.code in _DIFFERS and record.sha256 != counted.sha256:
                check_is(record, counted.size, counted.sha256)
            raise
        except Fault:
            # The sender's own end cut the request short: then that is what happened.
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
                raise Refusal(RefusalCode.NOT_FOUND, f"the file {record.file_id!r} is not here") from None
            raise

    # the end of files

    async def _tidy(self, pages: int) -> None:
        """Beside whoever happened to bring a file: a storage answers slowly, or not at all."""
        if self._sweeping is None or self._sweeping.done():
            self._sweeping = asyncio.create_task(self._sweep(pages), name="sweep of files")

    async def swept(self) -> None:
        """Until the sweep that is under way is over."""
        if self._sweeping is not None:
            await asyncio.wait({self._sweeping})

    async def _sweep(self, pages: int) -> None:
        try:
            await self._prune(pages)
            await self._remove_orphans()
        except Exception as error:
            # The next one finds what this one left.
            _LOG.warning("old files could not be swept: %s", error)

    async def _remove(self, record: FileRecord) -> None:
        key = self._key(record)
        await self._storage.remove(key)
        await self._uploads.forget(record, key)

    async def _remove_orphans(self) -> None:
        """Old objects, and uploads in parts, that no record tells of: a page each time. Foreign names are not touched,
        nor young ones."""
        page = await self._storage.keys(self._prefix, self._swept_to, PAGE)
        self._swept_to = page[-1] if len(page) == PAGE else ""
        for key in page:
            if await self._is_orphan(key):
                await self._storage.remove(key)
        uploads = await self._multipart.uploads(self._prefix, self._given_up_to, PAGE)
        self._given_up_to = uploads[-1] if len(uploads) == PAGE else None
        for upload in uploads:
            if await self._is_orphan(upload.key):
                await self._multipart.give_up(upload.key, upload.upload_id)

    async def _is_orphan(self, key: str) -> bool:
        file_id = key.rpartition("/")[2]
        since = made_at(file_id)
        if since is None or not self._is_over(since):
            return False
        tenant = TenantId(unquote(key.removeprefix(self._prefix).partition("/")[0]))
        try:
            return await self.get(file_id, tenant) is None
        except Fault as fault:
            # While its tenant's database is away nobody knows; it will be seen again.
            _LOG.warning("whether %s is an orphan cannot be told: %s", file_id, fault)
            return False


def _bound_headers(record: FileRecord) -> dict[str, str]:
    """What a link to write is signed for."""
    if record.size is None:
        # Announced when files still lay elsewhere.
        raise Refusal(RefusalCode.WRONG_PHASE, "this file was announced without its size: make a new one")
    headers = {
        "content-length": str(record.size),
        "content-type": record.content_type,
        "if-none-match": "*",
    }
    if record.sha256 is not None:
        headers[CHECKSUM] = base64.b64encode(bytes.fromhex(record.sha256)).decode()
    return headers


class _Counted:
    """Pieces on their way, counted. An end that comes too soon or too late is kept: the way there loses why."""

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
                    raise Refusal(
                        RefusalCode.TOO_LARGE,
                        f"this file may have {self._length} bytes and no more",
                        max_bytes=self._length,
                    )
                self._digest.update(piece)
                yield piece
            if self.size < self._length:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST,
                    f"{self.size} bytes came, {self._length} were announced: send it again",
                )
        except Exception as error:
            self.error = error
            raise
