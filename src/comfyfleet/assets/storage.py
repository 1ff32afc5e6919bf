"""One bucket of S3-compatible storage as the hub uses it: look, read, write, remove, list. Signed requests over HTTP.

A storage that cannot be reached, or does not take the hub's credentials, is a `Fault`: no caller of the hub can do
anything about it. What objects are for is `s3.py`'s. Neither addresses nor errors that leave here carry a signature.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from xml.etree import ElementTree

import aiohttp
import msgspec
from yarl import URL

from comfyfleet.assets.presigning import Bucket, Credentials, presigned
from comfyfleet.model.errors import Fault

CHECKSUM = "x-amz-checksum-sha256"
_EXPIRES_S = 300
"""Of a request that is sent at once; clocks may differ."""
_ANSWER_S = 15.0
_QUIET_S = 60.0
_PIECE = 1 << 20
_MAX_LISTING = 4 << 20
_MAX_ERROR = 4_096
_CONNECTIONS = 64


class StorageRefused(Fault):
    """It answered, and the answer is no."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Found(msgspec.Struct, frozen=True):
    size: int
    sha256: str | None
    """As the storage computed it, where it does."""


class Storage:
    """Closing twice is harmless."""

    def __init__(self, bucket: Bucket, credentials: Credentials) -> None:
        self.bucket = bucket
        self._credentials = credentials
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def signed(
        self,
        method: str,
        key: str,
        now: float,
        expires_s: int,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> str:
        """An address for somebody else."""
        return presigned(
            self.bucket,
            self._credentials,
            method,
            key,
            now=now,
            expires_s=expires_s,
            headers=headers,
            query=query,
        )

    async def head(self, key: str) -> Found | None:
        try:
            async with self.asked("HEAD", key, headers={"x-amz-checksum-mode": "ENABLED"}) as response:
                return Found(int(response.headers["content-length"]), _digest(response.headers.get(CHECKSUM)))
        except StorageRefused as refused:
            if refused.status == 404:
                return None
            raise

    async def read(self, key: str) -> AsyncGenerator[bytes, None]:
        async with self.asked("GET", key, is_long=True) as response:
            async for piece in response.content.iter_chunked(_PIECE):
                yield piece

    async def write(self, key: str, content: AsyncIterator[bytes], headers: Mapping[str, str]) -> None:
        """`headers` with the length; the storage refuses whatever does not fit them."""
        async with self.asked("PUT", key, headers=headers, content=content, is_long=True):
            pass

    async def remove(self, key: str) -> None:
        """One that is not there is removed already."""
        try:
            async with self.asked("DELETE", key):
                pass
        except StorageRefused as refused:
            if refused.status != 404:
                raise

    async def keys(self, prefix: str, after: str, limit: int) -> list[str]:
        """In their order; those behind `after`."""
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(limit)}
        if after:
            query["start-after"] = after
        async with self.asked("GET", "", query=query) as response:
            content = await response.content.read(_MAX_LISTING)
            while piece := await response.content.read(_MAX_LISTING):
                content += piece
                if len(content) > _MAX_LISTING:
                    raise Fault(f"{self._place} sent a list that is too long")
        try:
            root = ElementTree.fromstring(content)
        except ElementTree.ParseError as error:
            raise Fault(f"{self._place} sent a list that cannot be read: {error}") from error
        return [each.text for each in root.iterfind("{*}Contents/{*}Key") if each.text]

    @property
    def _place(self) -> str:
        return f"the storage at {self.bucket.endpoint}"

    @asynccontextmanager
    async def asked(
        self,
        method: str,
        key: str,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        content: AsyncIterator[bytes] | bytes | None = None,
        is_long: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Signed by the hub's own credentials and sent at once."""
        # By this machine's clock, never a store's: the storage compares it with its own.
        url = self.signed(method, key, time.time(), _EXPIRES_S, headers, query)
        try:
            async with self._opened().request(
                method,
                URL(url, encoded=True),
                data=content,
                headers=headers,
                timeout=aiohttp.ClientTimeout(
                    total=None if is_long else _ANSWER_S, sock_read=_QUIET_S, sock_connect=_ANSWER_S
                ),
                allow_redirects=False,
            ) as response:
                if response.status >= 300:
                    raise self.refused(response.status, await response.content.read(_MAX_ERROR))
                yield response
        except aiohttp.ClientConnectorError as error:
            raise Fault(f"{self._place} cannot be reached: {error.os_error}") from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Fault(f"{self._place} did not answer: {type(error).__name__}") from error

    def refused(self, status: int, body: bytes) -> StorageRefused:
        code = _code(body)
        what = f"{self._place} answered {status} {code}".rstrip()
        if code == "NoSuchBucket":
            what += f": make the bucket {self.bucket.name!r}"
        elif status in (301, 307, 400, 401, 403):
            what += f": look at address, region ({self.bucket.region}) and credentials, and what they may do there"
        return StorageRefused(status, code, what)

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_CONNECTIONS),
                headers={"accept-encoding": "identity"},
                skip_auto_headers=("content-type",),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _digest(checksum: str | None) -> str | None:
    """Of the whole object; that of one sent in parts is a checksum of checksums and says nothing here."""
    try:
        digest = base64.b64decode(checksum or "", validate=True)
    except (binascii.Error, ValueError):
        return None
    return digest.hex() if len(digest) == 32 else None


def _code(body: bytes) -> str:
    try:
        found = ElementTree.fromstring(body).findtext("{*}Code") or ""
    except ElementTree.ParseError:
        return ""
    return found if found.isalnum() and len(found) <= 64 else ""
