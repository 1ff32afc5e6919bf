"""Files on the hub's own disk: a record in the cabinet, the bytes in a folder, and signed links that soon expire.

A file is named by its id alone; what its sender calls it is shown and never becomes part of a path. Size and SHA-256
are computed while it is received, piece by piece. Who may have a link is the hub's to decide.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Literal

from comfyfleet import private_files
from comfyfleet.files.record_store import DocumentsOf
from comfyfleet.files.records import (
    GRANT_S,
    KEEP_S,
    MAX_FILE_BYTES,
    FileRecords,
    check_is,
    check_is_open,
    gone,
    in_one_piece,
    is_file_id,
    made_at,
)
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileGrant, FileRecord
from comfyfleet.ports import Clock, DocumentStore

_LOG = logging.getLogger(__name__)

_SECRETS = "secrets"
_SECRET = "file_links"
_PIECE = 1 << 20
_FOLDERS_AT_A_TIME = 16
"""Of 256, looked through for orphans whenever old files are."""


class LocalFileStore(FileRecords):
    def __init__(
        self,
        folder: Path,
        documents: DocumentStore,
        clock: Clock,
        *,
        max_bytes: int = MAX_FILE_BYTES,
        grant_s: float = GRANT_S,
        keep_s: float = KEEP_S,
        documents_of: DocumentsOf | None = None,
        tenant_bytes: int | None = None,
    ) -> None:
        super().__init__(documents, clock, max_bytes, grant_s, keep_s, documents_of, tenant_bytes)
        self._folder = folder
        self._key: bytes | None = None
        self._swept_to = 0

    async def complete(self, file_id: str) -> FileRecord:
        """It has been received and is what was said of it. Asked again, the same answer."""
        record = await self._known(file_id)
        if record.received_at is None:
            raise Refusal(
                RefusalCode.WRONG_PHASE, "nothing has been received yet: PUT the file to its link first"
            )
        if not self.path(record).is_file():
            raise elsewhere(record)
        return await self._change(file_id, is_complete=True)

    # the end of files

    async def _remove(self, record: FileRecord) -> None:
        await asyncio.to_thread(self.path(record).unlink, missing_ok=True)

    async def forget(self, record: FileRecord) -> None:
        await super().forget(record)
        # Whoever sends it just now may have put it into place behind us, while there still was a record.
        await self._leave_nothing(record)

    async def _leave_nothing(self, record: FileRecord) -> None:
        await self._remove(record)
        await self._room.forget(record)

    async def _tidy(self, pages: int) -> None:
        await self._prune(pages)
        for _ in range(_FOLDERS_AT_A_TIME):
            await self._remove_orphans(self._folder / f"{self._swept_to:02x}")
            self._swept_to = (self._swept_to + 1) % 256

    async def _remove_orphans(self, folder: Path) -> None:
        """Old files that no record tells of, and what was left of those that were cut off. Foreign names stay."""
        for name in await asyncio.to_thread(_names_in, folder):
            file_id = name.partition(".")[0]
            since = made_at(file_id)
            if since is None or not self._is_over(since):
                continue
            try:
                is_whole = name == file_id
                if is_whole and (await self.in_use(file_id) or await self.get(file_id) is not None):
                    continue
                await asyncio.to_thread((folder / name).unlink, missing_ok=True)
            except (Fault, OSError) as error:
                _LOG.warning("the old file %s stays for now: %s", name, error)

    # links

    async def grant(self, record: FileRecord, method: Literal["GET", "PUT"]) -> FileGrant:
        expires_at = float(int(self._clock.now() + self._grant_s))
        signature = await self._signature(method, record.file_id, expires_at)
        url = f"/api/files/{record.file_id}/content?expires={expires_at:.0f}&signature={signature}"
        return FileGrant(method, url, expires_at)

    def parts(self, record: FileRecord) -> None:
        """Of any size, it is received in one piece."""

    async def part_grants(self, record: FileRecord, digests: Mapping[int, str]) -> list[FileGrant]:  # noqa: ARG002
        raise in_one_piece()

    async def check(
        self, method: Literal["GET", "PUT"], file_id: str, expires: float, signature: str
    ) -> FileRecord:
        """The file that this link is good for, now."""
        good = await self._signature(method, file_id, expires)
        if not hmac.compare_digest(good.encode(), signature.encode()) or self._clock.now() >= expires:
            raise Refusal(RefusalCode.UNAUTHENTICATED, "the link is not good (any more): ask for a new one")
        return await self._known(file_id)

    async def _signature(self, method: str, file_id: str, expires: float) -> str:
        key = self._key or await self._secret()
        return hmac.new(key, f"{method}\n{file_id}\n{expires:.0f}".encode(), hashlib.sha256).hexdigest()

    async def _secret(self) -> bytes:
        """One for all hubs on the store: a link of one is good at every other."""
        await self._documents.put(_SECRETS, _SECRET, secrets.token_bytes(32), version=0)
        document = await self._documents.get(_SECRETS, _SECRET)
        assert document is not None, "it was there or has just been written"
        self._key = document.body
        return self._key

    # bytes

    def path(self, record: FileRecord) -> Path:
        assert is_file_id(record.file_id), "records are made here, with such ids alone"
        return self._folder / record.file_id[-2:] / record.file_id

    async def receive(self, record: FileRecord, pieces: AsyncIterator[bytes]) -> FileRecord:
        """Written piece by piece, and seen as a whole or not at all. A file is never written over.

        Sent again, the same bytes get the same answer, and are put into place where a hub died before it did so."""
        target = self.path(record)
        partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
        try:
            if record.size is None:
                async with aclosing(self.arriving(record.tenant, pieces)) as let_in:
                    size, digest = await self._write(partial, let_in, self._max_bytes)
            else:
                size, digest = await self._write(partial, pieces, self._bound(record))
            received = await self._entered(record, size, digest)
            if (received.size, received.sha256) != (size, digest):
                check_is_open(received)
            if not await asyncio.to_thread(target.is_file):
                await asyncio.to_thread(os.replace, partial, target)
            await self._room.note(received)
            if await self.get(record.file_id, record.tenant) is None:
                # Deleted meanwhile: whoever did so found nothing of this yet.
                await self._leave_nothing(received)
                raise gone(record.file_id)
        except OSError as error:
            raise Fault(f"the file could not be written: {error}. Make room on the hub's disk") from error
        finally:
            await asyncio.to_thread(partial.unlink, missing_ok=True)
        return received

    async def _entered(self, record: FileRecord, size: int, digest: str) -> FileRecord:
        """Of two who send it at once the record lets one through, and tells the other what it holds."""
        if record.received_at is not None:
            return record
        check_is(record, size, digest)
        if record.size is None:
            await self._room.take(record.tenant, size)
        try:
            return await self._change(
                record.file_id, check_is_open, size=size, sha256=digest, received_at=self._clock.now()
            )
        except Refusal as refusal:
            if refusal.code is not RefusalCode.WRONG_PHASE:
                raise
            return await self._known(record.file_id)

    async def read(self, record: FileRecord) -> AsyncGenerator[bytes, None]:
        try:
            file = await asyncio.to_thread(self.path(record).open, "rb")
            try:
                while piece := await asyncio.to_thread(file.read, _PIECE):
                    yield piece
            finally:
                file.close()
        except FileNotFoundError:
            raise elsewhere(record) from None
        except OSError as error:
            raise Fault(f"the file {record.file_id!r} cannot be read: {error}") from error

    async def _write(self, path: Path, pieces: AsyncIterator[bytes], bound: int) -> tuple[int, str]:
        await asyncio.to_thread(private_files.make_folder, self._folder)
        await asyncio.to_thread(private_files.make_folder, path.parent)
        size, digest = 0, hashlib.sha256()
        # Opened for each piece: of senders who take their time there may be more than files that can be open.
        await asyncio.to_thread(lambda: private_files.create(path).close())
        async for piece in pieces:
            size += len(piece)
            if size > bound:
                raise self._too_large(bound)
            digest.update(piece)
            await asyncio.to_thread(_append, path, piece)
        await asyncio.to_thread(_settle, path)
        return size, digest.hexdigest()


def elsewhere(record: FileRecord) -> Refusal:
    """It was received, for all hubs of the store know so, but not into this folder."""
    return Refusal(
        RefusalCode.NOT_FOUND,
        f"the file {record.file_id!r} is not in this hub's folder: it was received by another hub that keeps its files "
        "in a folder of its own, or somebody removed it. Give all hubs on one store one folder in common, or "
        "storage (the setting 'assets')",
    )


def _append(path: Path, piece: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(piece)


def _settle(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _names_in(folder: Path) -> list[str]:
    try:
        return [each.name for each in folder.iterdir()]
    except FileNotFoundError:
        return []
