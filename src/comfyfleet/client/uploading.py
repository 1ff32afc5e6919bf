"""Bringing a file to the hub: announced with its size and SHA-256, put to its link, confirmed.

What is repeated can do no harm: an announcement that nobody follows up is forgotten by the hub, and a file that was
received is never written over. How other requests travel is `link.py`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import mimetypes
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import aiohttp
from yarl import URL

from comfyfleet.client.link import NOT_NOW, Link, Tries
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import Grant
from comfyfleet.wire.files import FileBody, FileView
from comfyfleet.wire.links import place, refusal_by_link, resolved, told

FileLike = str | Path | bytes
"""The path of a file, or what is in one."""

_QUIET_S = 120.0


async def upload(link: Link, source: FileLike, name: str | None, content_type: str | None) -> FileView:
    name = name or ("file" if isinstance(source, bytes) else Path(source).name)[-256:]
    size, digest = await asyncio.to_thread(_measure, source)
    kind = content_type or mimetypes.guess_type(name)[0] or "application/octet-stream"
    made = await link.ask("create_file", FileView, body=FileBody(name, kind, size, digest))
    if made.link is None:
        raise Fault(f"the hub at {link.url} announced {name!r} without a link to put it to")
    await _put(link, made.link, lambda: _opened(source))
    return await link.ask("complete_file", FileView, file_id=made.id)


async def _put(link: Link, grant: Grant, opened: Callable[[], BinaryIO]) -> None:
    url = resolved(link.url, grant.url)
    tries = Tries(link.patience_s)
    while True:
        with await asyncio.to_thread(opened) as content:
            try:
                # The link is the proof: our key does not travel with it.
                async with link.session.put(
                    URL(url, encoded=True),
                    data=content,
                    headers={"content-type": "application/octet-stream", **grant.headers},
                    timeout=aiohttp.ClientTimeout(total=None, sock_read=_QUIET_S, sock_connect=_QUIET_S),
                    allow_redirects=False,
                ) as response:
                    if response.status < 300:
                        return
                    error: Exception = refusal_by_link(grant.url, response.status, await response.read())
            except (TimeoutError, aiohttp.ClientError, OSError) as broken:
                error = Fault(f"{place(url)} did not take a file: {told(broken)}")
        if isinstance(error, Refusal):
            if error.code is RefusalCode.WRONG_PHASE:
                # It was received before and the answer was lost; whether it is whole is asked next.
                return
            if error.code not in NOT_NOW:
                raise error
        await tries.after(error)


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
