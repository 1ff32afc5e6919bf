"""Where files lie, and short-lived grants to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Literal, Protocol, Unpack

from comfyfleet.model.file import FileAnnouncement, FileGrant, FilePage, FileRecord, PartPlan
from comfyfleet.model.ids import TenantId


class FileStore(Protocol):
    """Where files lie, and short-lived grants to them. What a file is for, and who may have it, is the hub's."""

    in_use: Callable[[str], Awaitable[bool]]
    """Set by the hub: a file in use is kept, however old."""

    async def reserve(self, tenant: TenantId, **said: Unpack[FileAnnouncement]) -> FileRecord: ...
    async def get(self, file_id: str, tenant: TenantId | None = None) -> FileRecord | None:
        """`tenant`: whose it should be, where that is known. Whether it is, is the hub's to ask."""

    async def forget_tenant(self, tenant: TenantId) -> int:
        """All files of the tenant, in use or not; how many there were. May be repeated."""

    async def keep_thumbnail(self, file_id: str, size: int, thumbnail: str) -> None: ...
    async def derived(self, record: FileRecord, after: str = "", limit: int = 100) -> FilePage: ...
    async def listing(self, after: str, limit: int, tenant: TenantId | None = None) -> FilePage: ...
    async def forget(self, record: FileRecord) -> None: ...
    async def tidy(self) -> None: ...
    def is_old(self, record: FileRecord) -> bool:
        """Its time is over: no other job may bring it, and it stays for those that do."""

    async def complete(self, file_id: str) -> FileRecord:
        """It is there and is what was said of it, which is looked at here. Asked again, the same answer."""

    async def grant(self, record: FileRecord, method: Literal["GET", "PUT"]) -> FileGrant: ...
    def parts(self, record: FileRecord) -> PartPlan | None:
        """How it may go up in parts. None: it goes up in one piece."""

    async def part_grants(self, record: FileRecord, digests: Mapping[int, str]) -> list[FileGrant]:
        """A link for each of these parts, by its number, bound to the SHA-256 of the part."""

    async def receive(self, record: FileRecord, pieces: AsyncIterator[bytes]) -> FileRecord: ...
    def arriving(self, tenant: TenantId, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]: ...
    def read(self, record: FileRecord) -> AsyncGenerator[bytes, None]:
        """Piece by piece, none larger than a mebibyte or so. `not_found`: it is not here."""
