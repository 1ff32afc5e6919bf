"""A file store in a folder of the hub, with signed links that expire.

Paths contain only the file id, never the sender's file name. The hub decides who gets a link.
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
from typing import Literal, Unpack

from comfyfleet import private_files
from comfyfleet.files.records import (
    FileRecords,
    FileStoreOptions,
    check_is,
    check_is_open,
    file_not_found,
    in_one_piece,
    is_file_id,
    made_at,
    too_large,
)
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileGrant, FileRecord
from comfyfleet.ports import Clock, DocumentStore

_LOG = logging.getLogger(__name__)

_SECRETS = "secrets"
_SECRET = "file_links"
_PIECE = 1 << 20
_FOLDERS_AT_A_TIME = 16
"""Of 256 folders, how many each cleanup searches for orphans."""


class LocalFileStore(FileRecords):
    def __init__(
        self, folder: Path, documents: DocumentStore, clock: Clock, **options: Unpack[FileStoreOptions]
    ) -> None:
        super().__init__(documents, clock, **options)
        self._folder = folder
        self._key: bytes | None = None
        self._next_folder = 0

    async def complete(self, file_id: str) -> FileRecord:
        record = await self._known(file_id)
        if record.received_at is None:
            raise Refusal(RefusalCode.WRONG_PHASE, "the file has not been received: PUT it to its link first")
        if not self.path(record).is_file():
            raise not_in_folder(record)
        return await self._change(file_id, is_complete=True)

    # deletion

    async def _remove(self, record: FileRecord) -> None:
        await asyncio.to_thread(self.path(record).unlink, missing_ok=True)

    async def forget(self, record: FileRecord) -> None:
        await super().forget(record)
        # An upload that is in progress may have written the file again.
        await self._erase(record)

    async def _erase(self, record: FileRecord) -> None:
        await self._remove(record)
        await self._quota.forget(record)

    async def _tidy(self, pages: int) -> None:
        await self._prune(pages)
        for _ in range(_FOLDERS_AT_A_TIME):
            await self._remove_orphans(self._folder / f"{self._next_folder:02x}")
            self._next_folder = (self._next_folder + 1) % 256

    async def _remove_orphans(self, folder: Path) -> None:
        """Deletes old files without a record, and unfinished ones. Keeps files with other names."""
        for name in await asyncio.to_thread(_names_in, folder):
            file_id = name.partition(".")[0]
            since = made_at(file_id)
            if since is None or not self._is_expired(since):
                continue
            try:
                is_whole = name == file_id
                if is_whole and (await self.in_use(file_id) or await self.get(file_id) is not None):
                    continue
                await asyncio.to_thread((folder / name).unlink, missing_ok=True)
            except (Fault, OSError) as error:
                _LOG.warning("cannot delete the old file %s, will retry: %s", name, error)

    # links

    async def grant(self, record: FileRecord, method: Literal["GET", "PUT"]) -> FileGrant:
        expires_at = float(int(self._clock.now() + self._grant_s))
        signature = await self._signature(method, record.file_id, expires_at)
        url = f"/api/files/{record.file_id}/content?expires={expires_at:.0f}&signature={signature}"
        return FileGrant(method, url, expires_at)

    def parts(self, record: FileRecord) -> None:
        """Always None: files of any size go up in one piece."""

    async def part_grants(self, record: FileRecord, digests: Mapping[int, str]) -> list[FileGrant]:  # noqa: ARG002
        raise in_one_piece()

    async def check(
        self, method: Literal["GET", "PUT"], file_id: str, expires: float, signature: str
    ) -> FileRecord:
        """The file of a valid link."""
        expected = await self._signature(method, file_id, expires)
        if not hmac.compare_digest(expected.encode(), signature.encode()) or self._clock.now() >= expires:
            raise Refusal(
                RefusalCode.UNAUTHENTICATED, "the link is not valid or has expired: ask for a new one"
            )
        return await self._known(file_id)

    async def _signature(self, method: str, file_id: str, expires: float) -> str:
        key = self._key or await self._secret()
        return hmac.new(key, f"{method}\n{file_id}\n{expires:.0f}".encode(), hashlib.sha256).hexdigest()

    async def _secret(self) -> bytes:
        """Shared by all hubs, so each accepts the links of the others."""
        await self._documents.put(_SECRETS, _SECRET, secrets.token_bytes(32), version=0)
        document = await self._documents.get(_SECRETS, _SECRET)
        assert document is not None, "it exists or was just written"
        self._key = document.body
        return self._key

    # bytes

    def path(self, record: FileRecord) -> Path:
        assert is_file_id(record.file_id), "all records have such ids"
        return self._folder / record.file_id[-2:] / record.file_id

    async def receive(self, record: FileRecord, pieces: AsyncIterator[bytes]) -> FileRecord:
        """Writes to a partial file and renames it at the end; never overwrites a file.

        Sending the same bytes again gives the same answer, also after a hub died before the rename."""
        target = self.path(record)
        partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
        try:
            if record.size is None:
                async with aclosing(self.metered(record.tenant, pieces)) as accepted:
                    size, digest = await self._write(partial, accepted, self._max_bytes)
            else:
                size, digest = await self._write(partial, pieces, self._bound(record))
            received = await self._mark_received(record, size, digest)
            if (received.size, received.sha256) != (size, digest):
                check_is_open(received)
            if not await asyncio.to_thread(target.is_file):
                await asyncio.to_thread(os.replace, partial, target)
            await self._quota.note(received)
            if await self.get(record.file_id, record.tenant) is None:
                # Deleted meanwhile, before there was a file to delete.
                await self._erase(received)
                raise file_not_found(record.file_id)
        except OSError as error:
            raise Fault(f"cannot write the file: {error}. Make room on the hub's disk") from error
        finally:
            await asyncio.to_thread(partial.unlink, missing_ok=True)
        return received

    async def _mark_received(self, record: FileRecord, size: int, digest: str) -> FileRecord:
        """If two callers send the file at once, the second gets the record of the first."""
        if record.received_at is not None:
            return record
        check_is(record, size, digest)
        if record.size is None:
            await self._quota.take(record.tenant, size)
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
            raise not_in_folder(record) from None
        except OSError as error:
            raise Fault(f"cannot read the file {record.file_id!r}: {error}") from error

    async def _write(self, path: Path, pieces: AsyncIterator[bytes], bound: int) -> tuple[int, str]:
        await asyncio.to_thread(private_files.make_folder, self._folder)
        await asyncio.to_thread(private_files.make_folder, path.parent)
        size, digest = 0, hashlib.sha256()
        # Opened for each piece: there may be more slow uploads than file handles.
        await asyncio.to_thread(lambda: private_files.create(path).close())
        async for piece in pieces:
            size += len(piece)
            if size > bound:
                raise too_large(bound)
            digest.update(piece)
            await asyncio.to_thread(_append, path, piece)
        await asyncio.to_thread(_sync, path)
        return size, digest.hexdigest()


def not_in_folder(record: FileRecord) -> Refusal:
    return Refusal(
        RefusalCode.NOT_FOUND,
        f"the file {record.file_id!r} is not in this hub's folder: another hub received it into another folder, or "
        "somebody removed it. Give all hubs of a store one shared folder or storage (the setting 'assets')",
    )


def _append(path: Path, piece: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(piece)


def _sync(path: Path) -> None:
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def _names_in(folder: Path) -> list[str]:
    try:
        return [each.name for each in folder.iterdir()]
    except FileNotFoundError:
        return []
