"""Moves files by signed links between this machine's disk and a hub or its storage, in pieces.

A link is its own authorization, so this session has no key: the worker's key never goes where a link leads.
Large outputs go in parts, each with its own link and its own retries.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import aiohttp
from yarl import URL

from comfyfleet.model.errors import Fault, Refusal, RefusalCode
from comfyfleet.model.file import FileGrant, PartPlan
from comfyfleet.wire.files import (
    FilePart,
    parts_of,
    pieces_of,
    refusal_by_link,
    resolved,
    sha256_of,
    transfer_error,
    url_origin,
)
from comfyfleet.worker.job_files import gather_bounded

_PIECE = 1 << 20
_MAX_REFUSAL = 1 << 16
_TRIES = 5
_BASE_S = 0.25

LinkOf = Callable[[FilePart, str], Awaitable[FileGrant]]
"""Asks for a link to a part with this SHA-256."""


class FileTransfer:
    """Closing twice is harmless."""

    def __init__(self, hub: str, *, connect_s: float, quiet_s: float, trust: ssl.SSLContext | None) -> None:
        self.hub = hub
        """The base address of links without a host."""
        self._trust = trust
        # No limit for the whole: a transfer may take as long as bytes move.
        self._timeout = aiohttp.ClientTimeout(total=None, sock_read=quiet_s, sock_connect=connect_s)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, link: str, path: Path, bound: int | None) -> None:
        """Replaces the file at the path. Stops after `bound` bytes, because the file is already too long."""
        url = resolved(self.hub, link)
        try:
            async with self._opened().get(
                URL(url, encoded=True), timeout=self._timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise refusal_by_link(link, response.status, await response.content.read(_MAX_REFUSAL))
                size = 0
                with await asyncio.to_thread(path.open, "wb") as target:
                    async for piece in response.content.iter_chunked(_PIECE):
                        await asyncio.to_thread(target.write, piece)
                        size += len(piece)
                        if bound is not None and size > bound:
                            break
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Fault(f"a file did not arrive from {url_origin(url)}: {transfer_error(error)}") from error

    async def put(
        self, link: str, path: Path, headers: Mapping[str, str], part: FilePart | None = None
    ) -> None:
        """`headers` are those that the link was signed for. Without `part` it sends the whole file."""
        url = resolved(self.hub, link)
        # The link of a part signs no content type, so none may be sent.
        sent = headers if part is not None else {"content-type": "application/octet-stream", **headers}
        try:
            with await asyncio.to_thread(path.open, "rb") as content:
                async with self._opened().put(
                    URL(url, encoded=True),
                    data=content if part is None else _read(content, part),
                    headers=sent,
                    skip_auto_headers=("content-type",),
                    timeout=self._timeout,
                    allow_redirects=False,
                ) as response:
                    answer = await response.content.read(_MAX_REFUSAL)
                    if response.status >= 300:
                        raise refusal_by_link(link, response.status, answer)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Fault(f"a file could not be sent to {url_origin(url)}: {transfer_error(error)}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=True if self._trust is None else self._trust),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"accept-encoding": "identity"},
            )
        return self._session


async def _read(content: BinaryIO, part: FilePart) -> AsyncIterator[bytes]:
    pieces = pieces_of(content, part)
    while piece := await asyncio.to_thread(next, pieces, b""):
        yield piece


async def put_parts(links: FileTransfer, path: Path, size: int, plan: PartPlan, link_of: LinkOf) -> None:
    await gather_bounded([_put(links, path, part, link_of) for part in parts_of(size, plan)])


async def _put(links: FileTransfer, path: Path, part: FilePart, link_of: LinkOf) -> None:
    digest = await asyncio.to_thread(_digest, path, part)
    for tries_left in reversed(range(_TRIES)):
        try:
            # A link may expire while other parts are sent, so each try asks for a new one.
            grant = await link_of(part, digest)
            await links.put(grant.url, path, grant.headers, part)
            return
        except Fault:
            if not tries_left:
                raise
        except Refusal as refusal:
            may_pass = refusal.code in (RefusalCode.UNAUTHENTICATED, RefusalCode.UNAVAILABLE)
            if not tries_left or not may_pass:
                raise
        await asyncio.sleep(_BASE_S * (1 << (_TRIES - tries_left)) * random.random())


def _digest(path: Path, part: FilePart) -> str:
    with path.open("rb") as content:
        return sha256_of(content, part)
