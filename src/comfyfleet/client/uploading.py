"""Bringing a file to the hub: announced with its size and SHA-256, put to its link, or in parts to theirs, confirmed.

What is repeated can do no harm: an announcement that nobody follows up is forgotten by the hub, and a file that was
received is never written over. How other requests travel is `link.py`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import mimetypes
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import aiohttp
from yarl import URL

from comfyfleet.client.link import NOT_NOW, Link, Tries
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import Grant
from comfyfleet.wire.files import FileBody, FileView, PartBody, PartGrants, PartsBody
from comfyfleet.wire.links import place, refusal_by_link, resolved, told
from comfyfleet.wire.parts import Part, parts_of, pieces_of, sha256_of

FileLike = str | Path | bytes
"""The path of a file, or what is in one."""

_QUIET_S = 120.0
_AT_A_TIME = 4
_READ_BYTES_PER_S = 10e6
"""Slower than that no hub reads its storage."""


async def upload(
    link: Link, source: FileLike, name: str | None, content_type: str | None, tenant: str | None = None
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
        raise Fault(f"the hub at {link.url} announced {name!r} without a link to put it to")
    return await _completed(link, made.id, size)


async def _completed(link: Link, file_id: str, size: int) -> FileView:
    """A storage that computes no SHA-256 is read once by the hub, which takes its time."""
    tries = Tries(link.patience_s + size / _READ_BYTES_PER_S)
    while True:
        try:
            return await link.ask("complete_file", FileView, file_id=file_id)
        except Refusal as refusal:
            if refusal.code not in NOT_NOW:
                raise
            await tries.after(refusal)


async def _put_parts(link: Link, file_id: str, source: FileLike, parts: Sequence[Part]) -> None:
    """A few at a time, each with a link of its own. The first that fails ends the others."""
    free = asyncio.Semaphore(_AT_A_TIME)

    async def one(part: Part) -> None:
        async with free:
            await _put_part(link, file_id, source, part)

    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(one(part))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _put_part(link: Link, file_id: str, source: FileLike, part: Part) -> None:
    digest = await asyncio.to_thread(_part_digest, source, part)
    tries = Tries(link.patience_s)
    while True:
        # Asked for anew each time: a link may expire while others are under way.
        body = PartsBody((PartBody(part.number, digest),))
        (grant,) = (await link.ask("part_links", PartGrants, body=body, file_id=file_id)).links
        error = await _sent(link, grant, lambda: _opened(source), part)
        if error is None:
            return
        may_pass = (*NOT_NOW, RefusalCode.UNAUTHENTICATED)
        if isinstance(error, Refusal) and error.code not in may_pass:
            raise error
        await tries.after(error)


async def _put(link: Link, grant: Grant, opened: Callable[[], BinaryIO]) -> None:
    tries = Tries(link.patience_s)
    while (error := await _sent(link, grant, opened)) is not None:
        if isinstance(error, Refusal):
            if error.code is RefusalCode.WRONG_PHASE:
                # It was received before and the answer was lost; whether it is whole is asked next.
                return
            if error.code not in NOT_NOW:
                raise error
        await tries.after(error)


async def _sent(
    link: Link, grant: Grant, opened: Callable[[], BinaryIO], part: Part | None = None
) -> Exception | None:
    """What was said against it; None: it is there."""
    url = resolved(link.url, grant.url)
    with await asyncio.to_thread(opened) as content:
        try:
            # The link is the proof: our key does not travel with it.
            async with link.session.put(
                URL(url, encoded=True),
                data=content if part is None else _read(content, part),
                headers=grant.headers
                if part
                else {"content-type": "application/octet-stream", **grant.headers},
                skip_auto_headers=("content-type",),
                timeout=aiohttp.ClientTimeout(total=None, sock_read=_QUIET_S, sock_connect=_QUIET_S),
                allow_redirects=False,
            ) as response:
                if response.status < 300:
                    return None
                return refusal_by_link(grant.url, response.status, await response.read())
        except (TimeoutError, aiohttp.ClientError, OSError) as broken:
            return Fault(f"{place(url)} did not take a file: {told(broken)}")


async def _read(content: BinaryIO, part: Part) -> AsyncIterator[bytes]:
    pieces = pieces_of(content, part)
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


def _part_digest(source: FileLike, part: Part) -> str:
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
        raise Refusal(RefusalCode.INVALID_REQUEST, f"{source} cannot be read: {error.strerror}") from error
