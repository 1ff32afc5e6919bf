"""The file store: files of tenants and short-lived grants to them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Literal, Protocol, Unpack

from comfyfleet.model.file import FileAnnouncement, FileGrant, FilePage, FileRecord, PartPlan
from comfyfleet.model.ids import TenantId


class FileStore(Protocol):
    """Stores files and grants access to them. The hub decides who may have a file."""

    in_use: Callable[[str], Awaitable[bool]]
    """The hub sets it. A file in use is kept, however old it is."""

    async def reserve(self, tenant: TenantId, **announced: Unpack[FileAnnouncement]) -> FileRecord: ...
    async def get(self, file_id: str, tenant: TenantId | None = None) -> FileRecord | None:
        """`tenant` is the expected owner, if known. The hub checks the real owner."""

    async def forget_tenant(self, tenant: TenantId) -> int:
        """Delete all files of the tenant, in use or not, and return their number. Idempotent."""

    async def keep_thumbnail(self, file_id: str, size: int, thumbnail: str) -> None: ...
    async def derived(self, record: FileRecord, after: str = "", limit: int = 100) -> FilePage: ...
    async def listing(self, after: str, limit: int, tenant: TenantId | None = None) -> FilePage: ...
    async def forget(self, record: FileRecord) -> None: ...
    async def clean_up(self) -> None: ...
    def is_expired(self, record: FileRecord) -> bool:
        """Whether its retention is over: no new job may use it, and it stays for jobs that already do."""

    async def complete(self, file_id: str) -> FileRecord:
        """Check that the upload is complete and matches its announcement. Idempotent."""

    async def grant(self, record: FileRecord, method: Literal["GET", "PUT"]) -> FileGrant: ...
    def parts(self, record: FileRecord) -> PartPlan | None:
        """The plan of a multipart upload. None: upload it in one piece."""

    async def part_grants(self, record: FileRecord, digests: Mapping[int, str]) -> list[FileGrant]:
        """A grant for each part number, bound to the SHA-256 of the part."""

    async def receive(self, record: FileRecord, pieces: AsyncIterator[bytes]) -> FileRecord: ...
    def metered(self, tenant: TenantId, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]: ...
    def read(self, record: FileRecord) -> AsyncGenerator[bytes, None]:
        """Yield pieces of at most about a mebibyte. Raises `not_found` if the file is not here."""
