"""Multipart uploads of one file: starts the upload, signs links to its parts, and assembles them.

The digest of each part is kept with the file record, because not every storage returns it. `s3.py` checks the
assembled file.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from comfyfleet.files.record_store import FileRecordStore
from comfyfleet.files.records import check_is_open, file_not_found, in_one_piece
from comfyfleet.files.s3_storage import S3Multipart, StorageRefused, UploadedPart, part_headers
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.file import FileGrant, FileRecord, PartPlan

PART_BYTES = 64 * 2**20
MAX_PARTS = 10_000
TAKEN = "PreconditionFailed"
"""The storage's code for an object that exists already."""


class PartUploads:
    def __init__(
        self, multipart: S3Multipart, records: FileRecordStore, part_bytes: int, max_put_bytes: int
    ) -> None:
        self._multipart = multipart
        self._records = records
        self._part_bytes = part_bytes
        self._max_put_bytes = max_put_bytes

    def plan(self, record: FileRecord) -> PartPlan | None:
        if record.size is None or record.size <= self._part_bytes:
            return None
        # Larger parts for large files: a storage accepts at most `MAX_PARTS`.
        size = max(self._part_bytes, -(-record.size // MAX_PARTS))
        return PartPlan(size, -(-record.size // size), is_required=record.size > self._max_put_bytes)

    async def grants(
        self, record: FileRecord, key: str, digests: Mapping[int, str], now: float, expires_s: int
    ) -> list[FileGrant]:
        check_is_open(record)
        plan = self.plan(record)
        if plan is None or record.size is None:
            raise in_one_piece()
        if wrong := [number for number in digests if not 0 < number <= plan.count]:
            raise Refusal(
                RefusalCode.INVALID_REQUEST, f"this file has {plan.count} parts; there is no part {wrong[0]}"
            )
        upload = record.upload or await self._begin(record, key)
        await self._records.save_parts(record, digests)
        found = []
        for number, digest in digests.items():
            headers = part_headers(plan.length(number, record.size), _encoded(bytes.fromhex(digest)))
            url = self._multipart.link(key, upload, number, now, expires_s, headers)
            found.append(FileGrant("PUT", url, now + expires_s, headers))
        return found

    async def _begin(self, record: FileRecord, key: str) -> str:
        """If two callers start the upload at once, one of the two uploads is aborted."""
        upload = await self._multipart.begin(key, record.content_type, is_checked=True)
        changed = await self._records.change(
            record.file_id, check_is_open, keep={"upload"}, fields={"upload": upload}
        )
        if changed is not None and changed.upload is not None:
            if changed.upload != upload:
                await self._multipart.abort(key, upload)
            return changed.upload
        await self._multipart.abort(key, upload)
        raise file_not_found(record.file_id)

    async def complete(self, record: FileRecord, key: str) -> None:
        """Refused unless every part has been received."""
        plan = self.plan(record)
        assert plan is not None and record.upload is not None and record.size is not None
        parts = await self._multipart.parts(key, record.upload)
        if parts is None:
            # Assembled already, or aborted: the caller checks next whether the object exists.
            return
        sizes = {part.number: part.size for part in parts}
        numbers = range(1, plan.count + 1)
        received = sum(sizes.get(number) == plan.length(number, record.size) for number in numbers)
        if received < plan.count:
            raise Refusal(
                RefusalCode.WRONG_PHASE,
                f"{received} of {plan.count} parts have been received: PUT the others to their links first",
            )
        noted = await self._records.load_parts(record)
        described = [
            part._replace(checksum=part.checksum or _encoded(noted[part.number]))
            for part in parts
            if part.number in noted
        ]
        await self._assemble(key, record.upload, described)

    async def _assemble(self, key: str, upload: str, parts: list[UploadedPart]) -> None:
        try:
            await self._multipart.complete(key, upload, parts)
        except StorageRefused as refused:
            if refused.code == TAKEN:
                return
            if refused.status == 400:
                raise Refusal(
                    RefusalCode.INVALID_REQUEST,
                    f"the storage refuses the parts: they differ from what was announced ({refused.code}). "
                    "Create a new file and upload it again",
                ) from refused
            raise

    async def receive(self, record: FileRecord, key: str, pieces: AsyncIterator[bytes]) -> None:
        """Uploads the parts one after the other, for callers in the hub's process."""
        plan = self.plan(record)
        assert plan is not None and record.size is not None
        upload = await self._multipart.begin(key, record.content_type, is_checked=False)
        try:
            reader = _PieceReader(pieces)
            for number in range(1, plan.count + 1):
                length = plan.length(number, record.size)
                await self._multipart.write(key, upload, number, reader.take(length), length)
            # Read on: the pieces raise an error if there are too many.
            async for _ in reader.take(1):
                pass
            await self._multipart.complete(key, upload, await self._multipart.parts(key, upload) or [])
        except BaseException:
            await self._multipart.abort(key, upload)
            raise

    async def forget(self, record: FileRecord, key: str) -> None:
        """Aborts the upload and removes the noted parts."""
        if record.upload is not None:
            await self._multipart.abort(key, record.upload)
        if self.plan(record) is not None:
            await self._records.remove_parts(record)


class _PieceReader:
    """Reads a given number of bytes at a time from pieces of any size."""

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    async def take(self, length: int) -> AsyncGenerator[bytes, None]:
        while length:
            if not self._rest:
                try:
                    self._rest = await anext(self._pieces)
                except StopAsyncIteration:
                    return
            piece, self._rest = self._rest[:length], self._rest[length:]
            length -= len(piece)
            yield piece


def _encoded(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
