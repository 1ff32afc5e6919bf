"""Files in the API: announcements, records, signed links and parts, and errors that a link's storage answers.

A link of a hub has no host; other links lead to S3-compatible storage. Links are secrets: messages show them without
their signature.
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

from comfyfleet.model.bounds import Name, PageSize
from comfyfleet.model.dispatch import LeaseRef
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileGrant, FileKind, FileRecord, PartPlan
from comfyfleet.wire.problems import refusal_in
from comfyfleet.wire.views import view_of

Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Size = Annotated[int, Meta(ge=0, le=2**50)]
ContentType = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.+-]{1,64}/[A-Za-z0-9_.+-]{1,64}$(?!\n)")]
"""It becomes a header, so it must be ASCII without a line break."""


FORM_FILE = "file"
"""The form field of the file. The fields of `FileBody` come before it."""


class FileBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The announcement of a file. The content must match it."""

    name: Name = "file"
    type: ContentType = "application/octet-stream"
    size: Size | None = None
    sha256: Sha256 | None = None
    source: Name | None = None
    tenant: Name | None = None
    """The tenant, if it is not the key's tenant. Only for operators."""


class OutputBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    size: Size
    sha256: Sha256
    name: Name = "file"
    type: ContentType = "application/octet-stream"


class GrantsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outputs of a run, announced by the holder of its lease."""

    lease: LeaseRef
    files: Annotated[tuple[OutputBody, ...], Meta(min_length=1, max_length=1_000)]


class PartBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: Annotated[int, Meta(ge=1, le=10_000)]
    sha256: Sha256


class PartsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts that the caller is about to upload."""

    parts: Annotated[tuple[PartBody, ...], Meta(min_length=1, max_length=100)]


class WorkerPartsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lease: LeaseRef
    file_id: Name
    parts: Annotated[tuple[PartBody, ...], Meta(min_length=1, max_length=100)]


class PartGrants(msgspec.Struct, frozen=True):
    links: tuple[FileGrant, ...]
    """A link for each part, in the order of the request."""


class LinkQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    expires: Annotated[float, Meta(ge=0, le=1e11)]
    signature: Name


class FilesQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: FileKind | None = None
    """Only files of this kind. Thumbnails are listed only if they are asked for."""
    job_id: Name | None = None
    """Only outputs of this job."""
    tenant: Name | None = None
    cursor: Name | None = None
    limit: PageSize = 100


class ThumbnailQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=1, le=1024)] = 256
    """The longer side in pixels: 64, 128, 256, 512 or 1024; other values are rounded up to one of these."""


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
    """The attempt that made the file: `job/round/lease number/epoch`."""
    source: str | None = None
    derived_from: tuple[str, ...] = ()
    """Ids of the files from which it was made: inputs of its job, or `source` of its announcement."""
    is_complete: bool = False
    link: FileGrant | None = None
    """A link that expires soon: for GET, or for PUT until the file is received. Absent for a file that must be uploaded
    in parts."""
    parts: PartPlan | None = None
    """How to upload the file in parts."""


class FileDetails(FileView, frozen=True, omit_defaults=True):
    derived: tuple[str, ...] = ()
    """Ids of the 100 oldest files made from this one. `GET /api/files/{id}/derived` lists all."""


class FileList(msgspec.Struct, frozen=True, omit_defaults=True):
    files: tuple[FileView, ...]
    cursor: str | None = None
    """Send it to get the next page. A page with a cursor can be short or empty; null on the last page."""


class FileGrants(msgspec.Struct, frozen=True):
    files: tuple[FileView, ...]


def output_body(filename: str, size: int, sha256: str) -> OutputBody:
    """The announcement of an output: its name without folders, and the type that the name suggests."""
    name = filename.replace("\\", "/").rpartition("/")[2][-256:] or "file"
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return OutputBody(size, sha256, name, kind)


def view(record: FileRecord, link: FileGrant | None = None, parts: PartPlan | None = None) -> FileView:
    source = record.derived_from[0] if record.kind == "input" and record.derived_from else None
    return view_of(
        FileView,
        record,
        id=record.file_id,
        type=record.content_type,
        source=source,
        link=link,
        parts=parts,
    )


def details(seen: FileView, derived: Sequence[FileRecord]) -> FileDetails:
    return view_of(FileDetails, seen, derived=tuple(each.file_id for each in derived))


_PIECE = 1 << 20


class FilePart(NamedTuple):
    number: int
    start: int
    length: int


def parts_of(size: int, plan: PartPlan) -> list[FilePart]:
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
    """Pieces of at most 1 MiB."""
    content.seek(part.start)
    left = part.length
    while left and (piece := content.read(min(_PIECE, left))):
        left -= len(piece)
        yield piece


_CODE = re.compile(rb"<Code>([A-Za-z0-9.]{1,64})</Code>")
_LATER = frozenset({"RequestTimeout", "SlowDown", "InternalError", "ServiceUnavailable", "IncompleteBody"})
"""Codes of S3 after which a retry can succeed, with any status."""


def resolved(hub: str, link: str) -> str:
    """The full URL of a link that this hub returned."""
    return link if is_absolute_url(link) else hub + link


def is_absolute_url(link: str) -> bool:
    return link.startswith(("http://", "https://"))


def url_origin(url: str) -> str:
    """The URL without path and signature, for messages."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def transfer_error(error: Exception) -> str:
    """The cause of a failed transfer, without the URL that some errors repeat."""
    cause = getattr(error, "os_error", error)
    if isinstance(cause, TimeoutError):
        return "timed out"
    return str(cause) if isinstance(cause, OSError) and cause.errno is not None else type(cause).__name__


def refusal_by_link(link: str, status: int, body: bytes) -> Refusal | Fault:
    return storage_refusal(status, body) if is_absolute_url(link) else refusal_in(status, body)


def storage_refusal(status: int, body: bytes) -> Refusal | Fault:
    found = _CODE.search(body[:4_096])
    code = found[1].decode() if found else ""
    answer = f"{status} {code}".rstrip()
    if code in _LATER:
        return Fault(f"the file storage asks for a retry ({answer})")
    match status:
        case 401 | 403:
            return Refusal(
                RefusalCode.UNAUTHENTICATED,
                f"the file storage refused the link, which may have expired ({answer}): ask the hub for a new link",
            )
        case 404:
            return Refusal(RefusalCode.NOT_FOUND, f"the file storage does not have the file ({answer})")
        case 412:
            return Refusal(RefusalCode.WRONG_PHASE, "this file was already received: announce a new one")
        case 413:
            return Refusal(RefusalCode.TOO_LARGE, f"the file is too large for the file storage ({answer})")
        case 400 | 411:
            return Refusal(
                RefusalCode.INVALID_REQUEST, f"the content differs from the announced file ({answer})"
            )
        case _:
            return Fault(f"the file storage answered {answer}")
