"""Files as callers and workers ask for them and see them: announced, put to a link, complete, fetched by a link.

How a large file is cut into parts: the same at hub, worker and caller.

What is answered to whoever moves a file by a link: by a hub, whose links have no host, or by S3-compatible storage.

Links are secrets for as long as they are good: what is told of one is where it leads, without its signature.
"""

from __future__ import annotations

import hashlib
import mimetypes
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, BinaryIO, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileGrant, FileKind, FileRecord, PartPlan
from comfyfleet.wire.bodies import Name
from comfyfleet.wire.problems import refusal_in
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
    links: tuple[FileGrant, ...]
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
    link: FileGrant | None = None
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


def view(record: FileRecord, link: FileGrant | None = None, parts: PartPlan | None = None) -> FileView:
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


_PIECE = 1 << 20


class FilePart(NamedTuple):
    number: int
    start: int
    length: int


def parts_of(size: int, plan: PartPlan) -> list[FilePart]:
    """Of a file of so many bytes, counted from 1."""
    return [
        FilePart(number, plan.size * (number - 1), plan.length(number, size))
        for number in range(1, plan.count + 1)
    ]


def sha256_of(content: BinaryIO, part: FilePart) -> str:
    digest = hashlib.sha256()
    for piece in pieces_of(content, part):
        digest.update(piece)
    return digest.hexdigest()


def pieces_of(content: BinaryIO, part: FilePart) -> Iterator[bytes]:
    """None larger than a mebibyte."""
    content.seek(part.start)
    left = part.length
    while left and (piece := content.read(min(_PIECE, left))):
        left -= len(piece)
        yield piece


_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_LATER = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "IncompleteBody"})
"""Codes of a storage that say "not now", whatever their status."""


def resolved(hub: str, link: str) -> str:
    """Where a link leads, for whoever has it of this hub."""
    return link if is_elsewhere(link) else hub + link


def is_elsewhere(link: str) -> bool:
    return link.startswith(("http://", "https://"))


def place(url: str) -> str:
    """Where it leads, fit to be told."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def told(error: Exception) -> str:
    """What a way broke by, without the address that some errors repeat."""
    cause = getattr(error, "os_error", error)
    if isinstance(cause, TimeoutError):
        return "it took too long"
    return str(cause) if isinstance(cause, OSError) and cause.errno is not None else type(cause).__name__


def refusal_by_link(link: str, status: int, body: bytes) -> Refusal | Fault:
    return storage_refusal(status, body) if is_elsewhere(link) else refusal_in(status, body)


def storage_refusal(status: int, body: bytes) -> Refusal | Fault:
    found = _CODE.search(body[:4_096])
    code = found[1].decode() if found else ""
    told = f"{status} {code}".rstrip()
    if code in _LATER:
        return Fault(f"the storage asks for another try ({told})")
    match status:
        case 401 | 403:
            return Refusal(
                RefusalCode.UNAUTHENTICATED,
                f"the storage does not take the link (any more), or not for this ({told}): ask for a new one",
            )
        case 404:
            return Refusal(RefusalCode.NOT_FOUND, f"the storage has no such file ({told})")
        case 412:
            return Refusal(RefusalCode.WRONG_PHASE, "this file has been received already: make a new one")
        case 413:
            return Refusal(RefusalCode.TOO_LARGE, f"the storage takes no file of this size ({told})")
        case 400 | 411:
            return Refusal(
                RefusalCode.INVALID_REQUEST, f"the storage found another file than was announced ({told})"
            )
        case _:
            return Fault(f"the storage answered {told}")
