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
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Literal

import msgspec

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileRecord, Grant
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.ports import Cabinet, Clock

_LOG = logging.getLogger(__name__)

DRAWER = "files"
_SECRETS = "secrets"
_SECRET = "file_links"
_ID = re.compile(r"f_[0-9a-f]{32}")
_TRIES = 20

GRANT_S = 900.0
KEEP_S = 7 * 86400.0
"""As long as the jobs that failed: afterwards nothing refers to a file any more."""
_LONGER = 1.01
"""Swept a little after its time is over, so that none goes between being named in time and being noted as in use."""
_PRUNE_EVERY_S = 60.0
_PRUNE = 200
MAX_FILE_BYTES = 4 * 2**30


class LocalAssets:
    def __init__(
        self,
        folder: Path,
        cabinet: Cabinet,
        clock: Clock,
        *,
        max_bytes: int = MAX_FILE_BYTES,
        grant_s: float = GRANT_S,
        keep_s: float = KEEP_S,
    ) -> None:
        self._folder = folder
        self._cabinet = cabinet
        self._clock = clock
        self._max_bytes = max_bytes
        self._grant_s = grant_s
        self._keep_s = keep_s
        self._pruned_at = clock.now()
        self._pruned_to = ""
        self.in_use: Callable[[str], Awaitable[bool]] = _nowhere
        self._key: bytes | None = None

    # records

    async def reserve(
        self,
        tenant: TenantId,
        *,
        name: str = "",
        content_type: str = "application/octet-stream",
        kind: Literal["input", "output"] = "input",
        size: int | None = None,
        sha256: str | None = None,
        job_id: JobId | None = None,
        attempt_id: str | None = None,
        source: str | None = None,
    ) -> FileRecord:
        if size is not None and size > self._max_bytes:
            raise self._too_large()
        await self._prune()
        now = self._clock.now()
        # Ids grow with time, so that old files stand first in a list.
        file_id = f"f_{int(now * 1000):012x}{secrets.token_hex(10)}"
        record = FileRecord(
            file_id, tenant, now, name, content_type, kind, size, sha256, job_id, attempt_id, source
        )
        if not await self._cabinet.put(DRAWER, file_id, msgspec.json.encode(record), version=0):
            raise Fault("a new file's id is taken already; try again")
        return record

    async def get(self, file_id: str) -> FileRecord | None:
        document = await self._cabinet.get(DRAWER, file_id) if _ID.fullmatch(file_id) else None
        return None if document is None else msgspec.json.decode(document.body, type=FileRecord)

    def is_old(self, record: FileRecord) -> bool:
        return self._clock.now() - record.created_at >= self._keep_s

    async def complete(self, file_id: str) -> FileRecord:
        """It has been received and is what was said of it. Asked again, the same answer."""
        record = await self._known(file_id)
        if record.received_at is None or not self.path(record).is_file():
            raise Refusal(
                RefusalCode.WRONG_PHASE, "nothing has been received yet: PUT the file to its link first"
            )
        return await self._change(file_id, is_complete=True)

    async def _known(self, file_id: str) -> FileRecord:
        record = await self.get(file_id)
        if record is None:
            raise Refusal(RefusalCode.NOT_FOUND, f"there is no file {file_id!r} (any more)")
        return record

    async def _change(
        self, file_id: str, check: Callable[[FileRecord], None] = lambda _: None, **fields: object
    ) -> FileRecord:
        for _ in range(_TRIES):
            document = await self._cabinet.get(DRAWER, file_id)
            if document is None:
                raise Refusal(RefusalCode.NOT_FOUND, f"there is no file {file_id!r} (any more)")
            record = msgspec.json.decode(document.body, type=FileRecord)
            check(record)
            record = msgspec.structs.replace(record, **fields)
            if await self._cabinet.put(
                DRAWER, file_id, msgspec.json.encode(record), version=document.version
            ):
                return record
        raise Fault(f"file {file_id!r} is being changed by others all the time; try again")

    async def _prune(self) -> None:
        """The oldest stand first in the drawer. The bytes go before the record: what is left over is found again.

        Old files in use stay; where they fill a page, the next look goes on behind them.
        """
        now = self._clock.now()
        if now - self._pruned_at < _PRUNE_EVERY_S:
            return
        self._pruned_at = now
        page = await self._cabinet.listing(DRAWER, self._pruned_to, _PRUNE)
        self._pruned_to = page[-1].name if len(page) == _PRUNE else ""
        for document in page:
            record = msgspec.json.decode(document.body, type=FileRecord)
            if record.created_at > now - self._keep_s * _LONGER:
                self._pruned_to = ""
                break
            if await self.in_use(record.file_id):
                continue
            try:
                await asyncio.to_thread(self.path(record).unlink, missing_ok=True)
            except OSError as error:
                # Whoever brings a new file is not to blame for an old one.
                _LOG.warning("the file %s cannot be removed: %s", record.file_id, error)
                continue
            await self._cabinet.remove(DRAWER, record.file_id)

    # links

    async def grant(self, record: FileRecord, method: Literal["GET", "PUT"]) -> Grant:
        expires_at = float(int(self._clock.now() + self._grant_s))
        signature = await self._signature(method, record.file_id, expires_at)
        url = f"/api/files/{record.file_id}/content?expires={expires_at:.0f}&signature={signature}"
        return Grant(method, url, expires_at)

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
        await self._cabinet.put(_SECRETS, _SECRET, secrets.token_bytes(32), version=0)
        document = await self._cabinet.get(_SECRETS, _SECRET)
        assert document is not None, "it was there or has just been written"
        self._key = document.body
        return self._key

    # bytes

    def path(self, record: FileRecord) -> Path:
        assert _ID.fullmatch(record.file_id), "records are made here, with such ids alone"
        return self._folder / record.file_id[-2:] / record.file_id

    async def receive(self, record: FileRecord, pieces: AsyncIterator[bytes]) -> FileRecord:
        """Written piece by piece, and seen as a whole or not at all. A file is never written over."""
        _check_is_open(record)
        target = self.path(record)
        partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
        try:
            size, digest = await self._write(partial, pieces, self._bound(record))
            _check_is(record, size, digest)
            # Of two who send it at once the record lets one through: the bytes are always those it tells of.
            received = await self._change(
                record.file_id, _check_is_open, size=size, sha256=digest, received_at=self._clock.now()
            )
            await asyncio.to_thread(os.replace, partial, target)
        except OSError as error:
            raise Fault(f"the file could not be written: {error}. Make room on the hub's disk") from error
        finally:
            await asyncio.to_thread(partial.unlink, missing_ok=True)
        return received

    async def read(self, record: FileRecord) -> bytes:
        try:
            return await asyncio.to_thread(self.path(record).read_bytes)
        except FileNotFoundError:
            raise Refusal(RefusalCode.NOT_FOUND, f"the file {record.file_id!r} is not here") from None
        except OSError as error:
            raise Fault(f"the file {record.file_id!r} cannot be read: {error}") from error

    def _bound(self, record: FileRecord) -> int:
        return self._max_bytes if record.size is None else min(record.size, self._max_bytes)

    async def _write(self, path: Path, pieces: AsyncIterator[bytes], bound: int) -> tuple[int, str]:
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        size, digest = 0, hashlib.sha256()
        file = await asyncio.to_thread(path.open, "xb")
        try:
            async for piece in pieces:
                size += len(piece)
                if size > bound:
                    raise self._too_large(bound)
                digest.update(piece)
                await asyncio.to_thread(file.write, piece)
            await asyncio.to_thread(_settle, file.fileno(), file.flush)
        finally:
            file.close()
        return size, digest.hexdigest()

    def _too_large(self, bound: int | None = None) -> Refusal:
        most = self._max_bytes if bound is None else bound
        return Refusal(RefusalCode.TOO_LARGE, f"this file may have {most} bytes and no more", max_bytes=most)


async def _nowhere(_: str) -> bool:
    return False


def _settle(descriptor: int, flush: object) -> None:
    assert callable(flush)
    flush()
    os.fsync(descriptor)


def _check_is_open(record: FileRecord) -> None:
    if record.received_at is not None:
        raise Refusal(RefusalCode.WRONG_PHASE, "this file has been received already: make a new one")


def _check_is(record: FileRecord, size: int, digest: str) -> None:
    if record.size is not None and size != record.size:
        raise Refusal(
            RefusalCode.INVALID_REQUEST, f"{size} bytes came, {record.size} were announced: send it again"
        )
    if record.sha256 is not None and not hmac.compare_digest(digest, record.sha256):
        raise Refusal(
            RefusalCode.INVALID_REQUEST, "what came has another SHA-256 than was announced: send it again"
        )
