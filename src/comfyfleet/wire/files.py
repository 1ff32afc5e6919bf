"""Files as callers and workers ask for them and see them: announced, put to a link, complete, fetched by a link."""

from __future__ import annotations

import mimetypes
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from comfyfleet.model.file import FileKind, FileRecord, Grant, PartPlan
from comfyfleet.wire.bodies import Name
from comfyfleet.wire.worker import LeaseBody

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Meta(ge=0, le=2**50)]
ContentType = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+-]{1,64}/[A-Za-z0-9_.+-]{1,64}$(?!\n)")]
"""It becomes a header: ASCII alone, and no new line behind."""


FORM_FILE = "file"
"""What the file is called in a form, whose other fields are those of `FileBody` and stand before it."""


class FileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is said of a file beforehand; what is said must hold."""

    name: Name = "file"
    type: ContentType = "application/octet-stream"
    size: Size | None = None
    sha256: Sha256 | None = None
    source: Name | None = None
    tenant: Name | None = None
    """Whose it becomes, where that is not the key's tenant: for operators."""


class OutputBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    size: Size
    sha256: Sha256
    name: Name = "file"
    type: ContentType = "application/octet-stream"


class GrantsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run left, asked for by whoever holds its lease."""

    lease: LeaseBody
    files: Annotated[tuple[OutputBody, ...], Meta(min_length=1, max_length=1_000)]


class PartBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: Annotated[int, Meta(ge=1, le=10_000)]
    sha256: Sha256


class PartsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parts of a file that are about to be PUT, counted from 1."""

    parts: Annotated[tuple[PartBody, ...], Meta(min_length=1, max_length=100)]


class WorkerPartsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lease: LeaseBody
    file_id: Name
    parts: Annotated[tuple[PartBody, ...], Meta(min_length=1, max_length=100)]


class PartGrants(msgspec.Struct, frozen=True):
    links: tuple[Grant, ...]
    """One for each part, in the order they were asked for."""


class LinkQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    expires: Annotated[float, Meta(ge=0, le=1e11)]
    signature: Name


class FilesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thumbnails are listed where they are asked for: each goes with its picture."""

    kind: FileKind | None = None
    job_id: Name | None = None
    """What this job left."""
    tenant: Name | None = None
    cursor: Name | None = None
    limit: Annotated[int, Meta(ge=1, le=1_000)] = 100


class ThumbnailQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=1, le=1024)] = 256
    """The square it fits into: 64, 128, 256, 512 or 1024, or else the next larger one of these."""


class FileView(msgspec.Struct, frozen=True, omit_defaults=True):
    id: str
    name: str
    type: str
    kind: FileKind
    created_at: float
    size: int | None = None
    sha256: str | None = None
    job_id: str | None = None
    attempt_id: str | None = None
    """What it came of: `job/round/lease number/epoch`."""
    source: str | None = None
    derived_from: tuple[str, ...] = ()
    """The files it was made from: those its job brought, or what its sender said of it (`source`)."""
    is_complete: bool = False
    link: Grant | None = None
    """Where to GET it, for a short while; or to PUT it, as long as it has not been received. One that is too large to
    go up in one piece has none."""
    parts: PartPlan | None = None
    """It may go up in parts, which are asked for one by one."""


class FileDetails(FileView, frozen=True, omit_defaults=True):
    derived: tuple[str, ...] = ()
    """What was made from it, the oldest first: 100 of them. All there are: `GET /api/files/{id}/derived`."""


class FileList(msgspec.Struct, frozen=True, omit_defaults=True):
    files: tuple[FileView, ...]
    cursor: str | None = None
    """Ask again with it for what follows. A page with a cursor may be short, or empty: there is more to look at."""


class FileGrants(msgspec.Struct, frozen=True):
    files: tuple[FileView, ...]


def output_body(filename: str, size: int, sha256: str) -> OutputBody:
    """What is said of a file that a run left: its name without folders, and the type that name suggests."""
    name = filename.replace("\\", "/").rpartition("/")[2][-256:] or "file"
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return OutputBody(size, sha256, name, kind)


def view(record: FileRecord, link: Grant | None = None, parts: PartPlan | None = None) -> FileView:
    return FileView(
        record.file_id,
        record.name,
        record.content_type,
        record.kind,
        record.created_at,
        record.size,
        record.sha256,
        record.job_id,
        record.attempt_id,
        record.derived_from[0] if record.kind == "input" and record.derived_from else None,
        record.derived_from,
        record.is_complete,
        link,
        parts,
    )


def details(seen: FileView, derived: Sequence[FileRecord]) -> FileDetails:
    return FileDetails(**msgspec.structs.asdict(seen), derived=tuple(each.file_id for each in derived))
