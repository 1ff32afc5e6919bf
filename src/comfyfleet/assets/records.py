"""What is known of each file: a record in the cabinet, made, changed and forgotten here, wherever the bytes lie.

A file is named by its id alone, which nobody chooses and which tells when it was made. Bytes, and links to them, are
`local.py`'s and `s3.py`'s.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileRecord
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.ports import Cabinet, Clock

_LOG = logging.getLogger(__name__)

DRAWER = "files"
GRANT_S = 900.0
KEEP_S = 7 * 86400.0
"""As long as the jobs that failed: afterwards nothing refers to a file any more."""
_LONGER = 1.01
"""Swept a little after its time is over, so that none goes between being named in time and being noted as in use."""
MAX_FILE_BYTES = 4 * 2**30
"""Less than any storage takes in one request."""
PAGE = 200
_PRUNE_EVERY_S = 60.0
_TRIES = 20
_ID = re.compile(r"f_([0-9a-f]{12})[0-9a-f]{20}")


class FileRecords:
    """What `LocalAssets` and `S3Assets` have in common: half of `Assets`."""

    def __init__(self, cabinet: Cabinet, clock: Clock, max_bytes: int, grant_s: float, keep_s: float) -> None:
        self._cabinet = cabinet
        self._clock = clock
        self._max_bytes = max_bytes
        self._grant_s = grant_s
        self._keep_s = keep_s
        self._pruned_at = clock.now()
        self._pruned_to = ""
        self.in_use: Callable[[str], Awaitable[bool]] = _nowhere

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
        now = self._clock.now()
        if now - self._pruned_at >= _PRUNE_EVERY_S:
            self._pruned_at = now
            await self._tidy()
        # Ids grow with time, so that old files stand first in a list.
        file_id = f"f_{int(now * 1000):012x}{secrets.token_hex(10)}"
        record = FileRecord(
            file_id, tenant, now, name, content_type, kind, size, sha256, job_id, attempt_id, source
        )
        if not await self._cabinet.put(DRAWER, file_id, msgspec.json.encode(record), version=0):
            raise Fault("a new file's id is taken already; try again")
        return record

    async def get(self, file_id: str) -> FileRecord | None:
        document = await self._cabinet.get(DRAWER, file_id) if is_file_id(file_id) else None
        return None if document is None else msgspec.json.decode(document.body, type=FileRecord)

    def is_old(self, record: FileRecord) -> bool:
        return self._clock.now() - record.created_at >= self._keep_s

    async def _known(self, file_id: str) -> FileRecord:
        record = await self.get(file_id)
        if record is None:
            raise _gone(file_id)
        return record

    async def _change(
        self, file_id: str, check: Callable[[FileRecord], None] = lambda _: None, **fields: object
    ) -> FileRecord:
        for _ in range(_TRIES):
            document = await self._cabinet.get(DRAWER, file_id)
            if document is None:
                raise _gone(file_id)
            record = msgspec.json.decode(document.body, type=FileRecord)
            check(record)
            record = msgspec.structs.replace(record, **fields)
            if await self._cabinet.put(
                DRAWER, file_id, msgspec.json.encode(record), version=document.version
            ):
                return record
        raise Fault(f"file {file_id!r} is being changed by others all the time; try again")

    # the end of files

    async def _tidy(self) -> None:
        """Asked for once in a while."""
        await self._prune()

    async def _remove(self, record: FileRecord) -> None:
        """The bytes, if they are there."""
        raise NotImplementedError

    async def _prune(self) -> None:
        """The oldest stand first in the drawer. The bytes go before the record: what is left over is found again.

        Old files in use stay; where they fill a page, the next look goes on behind them.
        """
        page = await self._cabinet.listing(DRAWER, self._pruned_to, PAGE)
        self._pruned_to = page[-1].name if len(page) == PAGE else ""
        for document in page:
            record = msgspec.json.decode(document.body, type=FileRecord)
            if not self._is_over(record.created_at):
                self._pruned_to = ""
                break
            if await self.in_use(record.file_id):
                continue
            try:
                await self._remove(record)
            except (Fault, OSError) as error:
                # Whoever brings a new file is not to blame for an old one.
                _LOG.warning("the file %s cannot be removed: %s", record.file_id, error)
                continue
            await self._cabinet.remove(DRAWER, record.file_id)

    def _is_over(self, since: float) -> bool:
        return since <= self._clock.now() - self._keep_s * _LONGER

    # bounds

    def _bound(self, record: FileRecord) -> int:
        return self._max_bytes if record.size is None else min(record.size, self._max_bytes)

    def _too_large(self, bound: int | None = None) -> Refusal:
        most = self._max_bytes if bound is None else bound
        return Refusal(RefusalCode.TOO_LARGE, f"this file may have {most} bytes and no more", max_bytes=most)


async def _nowhere(_: str) -> bool:
    return False


def _gone(file_id: str) -> Refusal:
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
