"""Fetching a file of a result, from the hub that keeps it or from where it lies, piece by piece.

Our key does not travel there: the link is the proof. A file that broke off in the middle goes on where it was, as long
as each try brings more of it. How other requests travel is `link.py`'s.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin, urlsplit

import aiohttp
from yarl import URL

from comfyfleet.client.link import Link
from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.job import OutputFile
from comfyfleet.wire.files import FileView
from comfyfleet.wire.links import place, refusal_by_link, told

_PIECE = 1 << 20
_QUIET_S = 60.0
_MAX_REFUSAL = 1 << 16


async def fetch(link: Link, file: OutputFile) -> bytes:
    async with _asked(link, file, file.url, {}) as response:
        return await response.read()


async def save(link: Link, file: OutputFile, target: BinaryIO) -> int:
    """To a file that is open and empty; the number of bytes."""
    url, mark, size, is_renewed = file.url, "", 0, False
    while True:
        before = size
        # Of another version nothing may be added to what came before.
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
            # The link has expired meanwhile; whoever may have the file gets a new one.
            view = await link.ask("get_file", FileView, file_id=file.file_id)
            url, is_renewed = (None if view.link is None else view.link.url), True
        except Fault:
            if size == before:
                raise


async def save_as(link: Link, file: OutputFile, path: Path) -> int:
    """What lies at the path is replaced once all of it has come, and not before."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with await asyncio.to_thread(partial.open, "xb") as target:
            size = await save(link, file, target)
        await asyncio.to_thread(partial.replace, path)
    except OSError as error:
        raise Refusal(RefusalCode.INVALID_REQUEST, f"{path} cannot be written: {error.strerror}") from error
    finally:
        await asyncio.to_thread(partial.unlink, missing_ok=True)
    return size


@asynccontextmanager
async def _asked(
    link: Link, file: OutputFile, at: str | None, headers: dict[str, str]
) -> AsyncIterator[aiohttp.ClientResponse]:
    url = urljoin(f"{link.url}/", at or "about:nowhere")
    if urlsplit(url).scheme not in ("http", "https"):
        raise Refusal(RefusalCode.NOT_FOUND, f"nobody has said where {file.filename!r} can be fetched")
    try:
        async with link.session.get(
            # Links that a hub has signed are taken as they are.
            URL(url, encoded=file.file_id is not None),
            headers={"accept-encoding": "identity", **headers},
            # However large it is: it may take as long as it moves.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_QUIET_S, sock_read=_QUIET_S),
            allow_redirects=False,
        ) as response:
            if response.status not in (200, 206):
                raise refusal_by_link(at or "", response.status, await response.content.read(_MAX_REFUSAL))
            yield response
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise Fault(f"{file.filename!r} cannot be fetched from {place(url)}: {told(error)}") from error
