"""Metadata of files that callers upload or runs produce. The queue store never holds their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

import msgspec

from comfyfleet.model.ids import JobId, TenantId

FileKind = Literal["input", "output", "thumbnail"]


class FileAnnouncement(TypedDict, total=False):
    """What a sender declares before it uploads a file."""

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
    """The sender's name for the file. It is shown, and never used as a path."""
    content_type: str = "application/octet-stream"
    kind: FileKind = "input"
    size: int | None = None
    """The declared size; after the upload, the received size."""
    sha256: str | None = None
    job_id: JobId | None = None
    """The job that produced the file."""
    attempt_id: str | None = None
    derived_from: tuple[str, ...] = ()
    """The files from which it was made: the inputs of its job, or what the sender declares."""
    received_at: float | None = None
    is_complete: bool = False
    """The upload is complete and matches the declaration."""
    thumbnails: dict[str, str] = {}
    """File ids of its thumbnails, by size."""
    upload: str | None = None
    """The storage's id of a multipart upload in progress."""
    has_tenant_database: bool = msgspec.field(default=False, name="is_apart")
    """A stub: the record is in the tenant's database."""


class FilePage(NamedTuple):
    files: list[FileRecord]
    after: str | None
    """The cursor of the next page; a short page can have a next one. None: this is the last page."""


class InputFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file for a node's input, as a lease carries it. Without `url` the file is missing."""

    node: str
    input: str
    file_id: str
    name: str = ""
    kind: Literal["image", "mask"] = "image"
    size: int | None = None
    sha256: str | None = None
    url: str | None = None


class FetchedFile(msgspec.Struct, frozen=True):
    """An input file on the worker's disk. It is never sent, because nobody else may name such a path."""

    filename: str
    path: Path
    node: str
    input: str
    kind: Literal["image", "mask"] = "image"


class PartPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of a multipart upload. All have the same size except the last."""

    size: int
    count: int
    is_required: bool = False
    """The file is too large for a single upload."""

    def length(self, number: int, whole: int) -> int:
        """The size of part `number` (from 1) of a file of `whole` bytes."""
        return self.size if number < self.count else whole - self.size * (self.count - 1)


class FileGrant(msgspec.Struct, frozen=True, omit_defaults=True):
    """Short-lived access to one file with one method."""

    method: Literal["GET", "PUT"]
    url: str
    expires_at: float
    headers: dict[str, str] = {}
    """The client must send these headers unchanged: the signature covers them."""
