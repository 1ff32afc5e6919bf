"""Uploads files to a hub and downloads files of results, in pieces.

A link is its own authorization, so the client's key is not sent with it. A download that breaks off continues
as long as each try brings more. Uploads can be repeated: a hub drops announced files that never arrive and
never overwrites a received one. `connection.py` sends all other requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import mimetypes
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin, urlsplit

import aiohttp
from yarl import URL

from comfyfleet.client.connection import NOT_NOW, HubConnection, RetryState
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileGrant
from comfyfleet.model.job import OutputFile
from comfyfleet.wire.files import (
    FileBody,
    FilePart,
    FileView,
    PartBody,
    PartGrants,
    PartsBody,
    parts_of,
    pieces_of,
    refusal_by_link,
    resolved,
    sha256_of,
    transfer_error,
    url_origin,
)

FileLike = str | Path | bytes
"""The path of a file, or its content."""

_PIECE = 1 << 20
_DOWNLOAD_IDLE_S = 60.0
_UPLOAD_IDLE_S = 120.0
_MAX_REFUSAL = 1 << 16
_BATCH_SIZE = 4
_READ_BYTES_PER_S = 10e6
"""Every hub reads its storage at least this fast."""


async def fetch(link: HubConnection, file: OutputFile) -> bytes:
    async with _asked(link, file, file.url, {}) as response:
        return await response.read()


async def save(link: HubConnection, file: OutputFile, target: BinaryIO) -> int:
    """Writes into an open, empty file and returns the number of bytes."""
    url, mark, size, is_renewed = file.url, "", 0, False
    while True:
        before = size
        # Bytes of another version must not follow those that came before.
        headers = {"range": f"bytes={size}-", "if-range": mark} if size and mark else {}
        try:
            async with _asked(link, file, url, headers) as response:
                if response.status != 206 and size:
                    before = size = target.seek(0)
                    target.truncate()
                mark = response.headers.get("etag", "")
                async for piece in response.content.iter_chunked(_PIECE):
                    await asyncio.to_thread(target.write, piece)
                    size += len(piece)
            return size
        except Refusal as refusal:
            if refusal.code is not RefusalCode.UNAUTHENTICATED or file.file_id is None or is_renewed:
                raise
            # The link has expired; the hub gives a new one to callers who may read the file.
            view = await link.ask("get_file", FileView, file_id=file.file_id)
            url, is_renewed = (None if view.link is None else view.link.url), True
        except Fault:
            if size == before:
                raise


async def save_as(link: HubConnection, file: OutputFile, path: Path) -> int:
    """Replaces a file at the path only when all bytes have arrived."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with await asyncio.to_thread(partial.open, "xb") as target:
            size = await save(link, file, target)
        await asyncio.to_thread(partial.replace, path)
    except OSError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"cannot write {path}: {error.strerror}") from error
    finally:
        await asyncio.to_thread(partial.unlink, missing_ok=True)
    return size


@asynccontextmanager
async def _asked(
    link: HubConnection, file: OutputFile, at: str | None, headers: dict[str, str]
) -> AsyncIterator[aiohttp.ClientResponse]:
    url = urljoin(f"{link.url}/", at or "about:nowhere")
    if urlsplit(url).scheme not in ("http", "https"):
        raise Refusal(RefusalCode.NOT_FOUND, f"there is no address for {file.filename!r}")
    try:
        async with link.session.get(
            # Signed links are used exactly as they are.
            URL(url, encoded=file.file_id is not None),
            headers={"accept-encoding": "identity", **headers},
            # No limit for the whole: a large file may take as long as bytes arrive.
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_DOWNLOAD_IDLE_S, sock_read=_DOWNLOAD_IDLE_S
            ),
            allow_redirects=False,
        ) as response:
            if response.status not in (200, 206):
                raise refusal_by_link(at or "", response.status, await response.content.read(_MAX_REFUSAL))
            yield response
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise Fault(
            f"cannot fetch {file.filename!r} from {url_origin(url)}: {transfer_error(error)}"
        ) from error


async def upload(
    link: HubConnection,
    source: FileLike,
    name: str | None,
    content_type: str | None,
    tenant: str | None = None,
) -> FileView:
    name = name or ("file" if isinstance(source, bytes) else Path(source).name)[-256:]
    size, digest = await asyncio.to_thread(_measure, source)
    kind = content_type or mimetypes.guess_type(name)[0] or "application/octet-stream"
    body = FileBody(name, kind, size, digest, tenant=tenant)
    made = await link.ask("create_file", FileView, body=body)
    if made.parts is not None:
        await _put_parts(link, made.id, source, parts_of(size, made.parts))
    elif made.link is not None:
        await _put(link, made.link, lambda: _opened(source))
    else:
        raise Fault(f"the hub at {link.url} gave no link to upload {name!r} to")
    return await _completed(link, made.id, size)


async def _completed(link: HubConnection, file_id: str, size: int) -> FileView:
    """The hub reads a file once if its storage computes no SHA-256, which takes time."""
    tries = RetryState(link.patience_s + size / _READ_BYTES_PER_S)
    while True:
        try:
            return await link.ask("complete_file", FileView, file_id=file_id)
        except Refusal as refusal:
            if refusal.code not in NOT_NOW:
                raise
            await tries.after(refusal)


async def _put_parts(link: HubConnection, file_id: str, source: FileLike, parts: Sequence[FilePart]) -> None:
    """Sends a few parts at a time. The first failure ends the others."""
    free = asyncio.Semaphore(_BATCH_SIZE)

    async def one(part: FilePart) -> None:
        async with free:
            await _put_part(link, file_id, source, part)

    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(one(part))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _put_part(link: HubConnection, file_id: str, source: FileLike, part: FilePart) -> None:
    digest = await asyncio.to_thread(_part_digest, source, part)
    tries = RetryState(link.patience_s)
    while True:
        # A link may expire while other parts are sent, so each try asks for a new one.
        body = PartsBody((PartBody(part.number, digest),))
        (grant,) = (await link.ask("part_links", PartGrants, body=body, file_id=file_id)).links
        error = await _sent(link, grant, lambda: _opened(source), part)
        if error is None:
            return
        may_pass = (*NOT_NOW, RefusalCode.UNAUTHENTICATED)
        if isinstance(error, Refusal) and error.code not in may_pass:
            raise error
        await tries.after(error)


async def _put(link: HubConnection, grant: FileGrant, opened: Callable[[], BinaryIO]) -> None:
    tries = RetryState(link.patience_s)
    while (error := await _sent(link, grant, opened)) is not None:
        if isinstance(error, Refusal):
            if error.code is RefusalCode.WRONG_PHASE:
                # The hub has received it, and its answer was lost. The next call checks the content.
                return
            if error.code not in NOT_NOW:
                raise error
        await tries.after(error)


async def _sent(
    link: HubConnection, grant: FileGrant, opened: Callable[[], BinaryIO], part: FilePart | None = None
) -> Exception | None:
    """Returns the error, or None on success."""
    url = resolved(link.url, grant.url)
    with await asyncio.to_thread(opened) as content:
        try:
            # The link authorizes the request, so the key is not sent.
            async with link.session.put(
                URL(url, encoded=True),
                data=content if part is None else _read(content, part),
                headers=grant.headers
                if part
                else {"content-type": "application/octet-stream", **grant.headers},
                skip_auto_headers=("content-type",),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_read=_UPLOAD_IDLE_S, sock_connect=_UPLOAD_IDLE_S
                ),
                allow_redirects=False,
            ) as response:
                if response.status < 300:
                    return None
                return refusal_by_link(grant.url, response.status, await response.read())
        except (TimeoutError, aiohttp.ClientError, OSError) as broken:
            return Fault(f"{url_origin(url)} did not accept a file: {transfer_error(broken)}")


async def _read(content: BinaryIO, part: FilePart) -> AsyncIterator[bytes]:
    pieces = pieces_of(content, part)
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


def _part_digest(source: FileLike, part: FilePart) -> str:
    with _opened(source) as content:
        return sha256_of(content, part)


def _opened(source: FileLike) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else Path(source).open("rb")


def _measure(source: FileLike) -> tuple[int, str]:
    if isinstance(source, bytes):
        return len(source), hashlib.sha256(source).hexdigest()
    try:
        with Path(source).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
            return content.tell(), digest
    except OSError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"cannot read {source}: {error.strerror}") from error
