"""Receives a file in one request as a multipart form (RFC 7578), part by part while it arrives.

A folder stores the file at once. An object store needs the length first: if the form does not say it, the
file is spooled to the hub's disk. After any error nothing of the file stays. Memory holds one piece and one
part's headers.
"""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import re
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from pathlib import PurePosixPath
from typing import IO, NamedTuple, Self
from urllib.parse import unquote

import msgspec

from comfyfleet.files.local import LocalFileStore
from comfyfleet.hub.files.job_files import complete_file, reserve_file
from comfyfleet.hub.http.limits import ByteBudget
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileRecord
from comfyfleet.model.ids import TenantId
from comfyfleet.ports import FileStore
from comfyfleet.wire.files import FORM_FILE, FileBody

MAX_HEADER_BYTES = 8 * 1024
MAX_PARTS = 20
_MAX_BOUNDARY = 70
_FORM_TYPE = re.compile(r"multipart/form-data\s*(;|$)", re.IGNORECASE)
_BOUNDARY = re.compile(r";\s*boundary=(?:\"([^\"]*)\"|([^\s;\"]*))", re.IGNORECASE)
_PARAMETER = re.compile(r";\s*(name|filename\*?)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s;\"]*))", re.IGNORECASE)


class FormPart(NamedTuple):
    name: str
    filename: str | None
    """None: the part is not a file."""
    content_type: str
    content: AsyncGenerator[bytes, None]
    """Read it to the end before you ask for the next part."""


def is_form(headers: Mapping[str, str]) -> bool:
    return _FORM_TYPE.match(headers.get("content-type", "").strip()) is not None


def boundary_in(headers: Mapping[str, str]) -> bytes:
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise _wrong("send a form without Content-Encoding")
    found = _BOUNDARY.search(headers.get("content-type", ""))
    boundary = "" if found is None else found[1] or found[2] or ""
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise _wrong(f"a form names a boundary of 1 to {_MAX_BOUNDARY} characters in its Content-Type")
    return boundary.encode()


class Form:
    def __init__(self, pieces: AsyncIterator[bytes], boundary: bytes) -> None:
        self._pieces = pieces
        self._delimiter = b"\r\n--" + boundary
        # So that the first boundary looks like the others.
        self._rest = bytearray(b"\r\n")

    async def parts(self) -> AsyncGenerator[FormPart, None]:
        await self._skip_preamble()
        for _ in range(MAX_PARTS):
            if not await self._has_next():
                return
            headers = await self._headers()
            content = self._content()
            yield _part(headers, content)
            # Skips what the caller did not read.
            async for _ in content:
                pass
        raise _wrong(f"a form has at most {MAX_PARTS} parts here")

    async def _skip_preamble(self) -> None:
        while (found := self._rest.find(self._delimiter)) < 0:
            if len(self._rest) > MAX_HEADER_BYTES:
                raise _wrong("the form does not begin with its boundary")
            await self._read_on()
        del self._rest[: found + len(self._delimiter)]

    async def _has_next(self) -> bool:
        while len(self._rest) < 2:
            await self._read_on()
        return not self._rest.startswith(b"--")

    async def _headers(self) -> dict[str, str]:
        while (found := self._rest.find(b"\r\n\r\n")) < 0 and len(self._rest) <= MAX_HEADER_BYTES:
            await self._read_on()
        if not 0 <= found <= MAX_HEADER_BYTES:
            raise _wrong(f"the headers of a part have at most {MAX_HEADER_BYTES} bytes")
        text = bytes(self._rest[:found]).decode("utf-8", "replace")
        del self._rest[: found + 4]
        lines = (line.partition(":") for line in text.split("\r\n") if ":" in line)
        return {name.strip().lower(): value.strip() for name, _, value in lines}

    async def _content(self) -> AsyncGenerator[bytes, None]:
        # A boundary may be split over two pieces, so this much of the end is kept.
        keep = len(self._delimiter) - 1
        while (found := self._rest.find(self._delimiter)) < 0:
            if len(self._rest) > keep:
                piece = bytes(self._rest[:-keep])
                del self._rest[:-keep]
                yield piece
            await self._read_on()
        piece = bytes(self._rest[:found])
        del self._rest[: found + len(self._delimiter)]
        if piece:
            yield piece

    async def _read_on(self) -> None:
        try:
            self._rest += await anext(self._pieces)
        except StopAsyncIteration:
            raise _wrong("the form is incomplete: send it again") from None


def _part(headers: Mapping[str, str], content: AsyncGenerator[bytes, None]) -> FormPart:
    disposition = headers.get("content-disposition", "")
    found = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(disposition)}
    if not disposition.lower().startswith("form-data") or not found.get("name"):
        raise _wrong("a part of the form has no name: Content-Disposition: form-data; name=…")
    filename = found.get("filename")
    if (coded := found.get("filename*")) is not None:
        filename = unquote(coded.rpartition("'")[2], errors="replace")
    return FormPart(found["name"], filename, headers.get("content-type", ""), content)


def _wrong(why: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, why)


MAX_FIELD_BYTES = 1_024
MAX_SPOOLED_BYTES = 2**30
MAX_ALL_SPOOLED_BYTES = 4 * 2**30
"""For all forms that are spooled to disk."""
STEP_BYTES = 64 * 2**20
"""Reserved at a time, so that at most 64 spool files are open."""
_IN_MEMORY_BYTES = 64 * 1024
_PIECE = 1 << 20
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9_.+-]{1,64}/[A-Za-z0-9_.+-]{1,64}")
_CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


class FormUpload:
    """One form: call `head` first, then `received`."""

    def __init__(self, form: Form, assets: FileStore, disk: ByteBudget) -> None:
        """`disk`: the budget of all spooled forms."""
        self._parts = form.parts()
        self._assets = assets
        self._disk = disk
        self._file: FormPart | None = None

    async def head(self) -> FileBody:
        """The fields before the file."""
        fields: dict[str, str] = {}
        async for part in self._parts:
            if part.name == FORM_FILE:
                self._file = part
                return _body(fields, part)
            if part.filename is not None:
                raise _wrong(
                    f"the file's field is called {FORM_FILE!r}, not {part.name!r:.80}: -F {FORM_FILE}=@…"
                )
            if part.name in fields:
                raise _wrong(f"{part.name!r:.80} is in the form twice")
            fields[part.name] = await _text(part)
        raise _wrong(f"the form has no field {FORM_FILE!r} with the file in it: -F {FORM_FILE}=@…")

    async def received(self, body: FileBody, owner: TenantId) -> FileRecord:
        if isinstance(self._assets, LocalFileStore) or body.size is not None:
            return await self._take(body, owner, self._pieces())
        with UploadSpool(self._disk, owner) as spool:
            async with aclosing(self._assets.metered(owner, self._pieces())) as pieces:
                size, digest = await spool.fill(pieces)
            if body.sha256 is not None and body.sha256 != digest:
                raise _wrong("the file's SHA-256 differs from the one in the form: send it again")
            known = msgspec.structs.replace(body, size=size, sha256=digest)
            return await self._take(known, owner, spool.pieces())

    async def _take(self, body: FileBody, owner: TenantId, pieces: AsyncIterator[bytes]) -> FileRecord:
        record = await reserve_file(self._assets, owner, body)
        try:
            await self._assets.receive(record, pieces)
            return await complete_file(self._assets, record.file_id)
        except BaseException:
            await asyncio.shield(self._assets.forget(record))
            raise

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Reads to the end of the form: a form that breaks off after the file is incomplete."""
        assert self._file is not None, "head() was called"
        async with aclosing(self._parts) as parts:
            async for piece in self._file.content:
                yield piece
            async for part in parts:
                raise _wrong(f"{part.name!r:.80} comes after the file: put every field before the file")


def _body(fields: dict[str, str], part: FormPart) -> FileBody:
    given: dict[str, object] = {name: value for name, value in fields.items() if value != ""}
    given.setdefault("name", _name(part.filename or ""))
    if "type" not in given:
        guessed = mimetypes.guess_type(str(given["name"]))[0] or "application/octet-stream"
        given["type"] = part.content_type if _MEDIA_TYPE.fullmatch(part.content_type) else guessed
    try:
        return msgspec.convert(given, FileBody, strict=False)
    except msgspec.ValidationError as error:
        raise _wrong(f"the form is not valid: {error}") from error


def _name(filename: str) -> str:
    name = PurePosixPath(filename.replace("\\", "/")).name
    return _CONTROL_CHARACTERS.sub("", name)[-256:] or "file"


async def _text(part: FormPart) -> str:
    text = b""
    async for piece in part.content:
        text += piece
        if len(text) > MAX_FIELD_BYTES:
            raise _wrong(f"the field {part.name!r:.80} has more than {MAX_FIELD_BYTES} bytes")
    return text.decode("utf-8", "replace")


class UploadSpool:
    """A file on disk, or in memory while it is small. Leaving the context deletes it."""

    def __init__(self, disk: ByteBudget, owner: TenantId) -> None:
        self._disk = disk
        self._owner = owner
        self._taken = 0
        self._size = 0

    def __enter__(self) -> Self:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._disk.release(self._owner, self._taken)

    async def fill(self, pieces: AsyncIterator[bytes]) -> tuple[int, str]:
        digest = hashlib.sha256()
        async for piece in pieces:
            self._size += len(piece)
            self._check()
            digest.update(piece)
            try:
                await asyncio.to_thread(self._file.write, piece)
            except OSError as error:
                raise Fault(f"cannot write the file: {error}. Make room on the hub's disk") from error
        return self._size, digest.hexdigest()

    def _check(self) -> None:
        if self._size > MAX_SPOOLED_BYTES:
            raise Refusal(
                RefusalCode.TOO_LARGE,
                f"a form of more than {MAX_SPOOLED_BYTES} bytes needs its size before the file (-F size=…); or "
                "announce the file first",
                max_bytes=MAX_SPOOLED_BYTES,
            )
        if self._size > max(_IN_MEMORY_BYTES, self._taken):
            self._disk.take(self._owner, STEP_BYTES)
            self._taken += STEP_BYTES

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            await asyncio.to_thread(self._file.seek, 0)
            while piece := await asyncio.to_thread(self._file.read, _PIECE):
                yield piece
        except OSError as error:
            raise Fault(f"cannot read the spooled file: {error}") from error
