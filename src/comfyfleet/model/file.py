"""A file that a caller uploaded or a run left: what is known of it. Its bytes never enter the queue store."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

import msgspec

from comfyfleet.model.ids import JobId, TenantId

FileKind = Literal["input", "output", "thumbnail"]


class FileAnnouncement(TypedDict, total=False):
    """What is said of a file when it is announced."""

    name: str
    content_type: str
    kind: FileKind
    size: int | None
    sha256: str | None
    job_id: JobId | None
    attempt_id: str | None
    derived_from: tuple[str, ...]


class FileRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    file_id: str
    tenant: TenantId
    created_at: float
    name: str = ""
    """As its sender calls it: shown, and never a path."""
    content_type: str = "application/octet-stream"
    kind: FileKind = "input"
    size: int | None = None
    """As was said beforehand; once it is there, as was counted while it was received."""
    sha256: str | None = None
    job_id: JobId | None = None
    """The job it came of."""
    attempt_id: str | None = None
    derived_from: tuple[str, ...] = ()
    """The files it was made from: those its job brought, or what its sender says."""
    received_at: float | None = None
    is_complete: bool = False
    """It is there, and is what was said."""
    thumbnails: dict[str, str] = {}
    """The files that are its thumbnails, by their sizes."""
    upload: str | None = None
    """The storage's name for an upload in parts that is under way."""
    has_tenant_database: bool = msgspec.field(default=False, name="is_apart")
    """A stub: the record lies in its tenant's own database."""


class FilePage(NamedTuple):
    files: list[FileRecord]
    after: str | None
    """The id after which to go on; a page may be short and have more behind it. None: that was all."""


class InputFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that goes into a node's input, as the holder of a lease hears of it. Without a link: it is not there."""

    node: str
    input: str
    file_id: str
    name: str = ""
    kind: Literal["image", "mask"] = "image"
    size: int | None = None
    sha256: str | None = None
    url: str | None = None


class FetchedFile(msgspec.Struct, frozen=True):
    """An input on the worker's own disk, before its run. Of such a path nobody far away tells: it is never sent."""

    filename: str
    path: Path
    node: str
    input: str
    kind: Literal["image", "mask"] = "image"


class PartPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that may go up in parts: all of the same size but the last."""

    size: int
    count: int
    is_required: bool = False
    """It is too large to go up in one piece."""

    def length(self, number: int, whole: int) -> int:
        """Of a part, counted from 1, of a file of so many bytes."""
        return self.size if number < self.count else whole - self.size * (self.count - 1)


class FileGrant(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file, one method, for a short while."""

    method: Literal["GET", "PUT"]
    url: str
    expires_at: float
    headers: dict[str, str] = {}
    """What must be sent along, exactly so: it is part of what was signed."""
