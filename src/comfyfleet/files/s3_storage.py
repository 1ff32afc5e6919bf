"""One bucket of S3-compatible storage as the hub uses it: look, read, write, remove, list. Signed requests over HTTP.

A storage that cannot be reached, or does not take the hub's credentials, is a `Fault`: no caller of the hub can do
anything about it. What objects are for is `s3.py`'s. Neither addresses nor errors that leave here carry a signature.

Requests to S3-compatible storage, signed in their address (AWS Signature Version 4): one object, one method, for a
while.

Headers that are given become part of the signature, so whoever uses the address sends exactly those. Pure: time and
credentials are arguments. What is asked for, and what answers mean, is `s3_storage.py`'s.

Uploads in parts, as S3-compatible storage knows them: begun, listed, put together, given up.

Parts are put by whoever has links to them; here is what the hub does with its own credentials. What an upload is for is
`s3.py`'s.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import aiohttp
import msgspec
from yarl import URL

from comfyfleet.model.errors import Fault

_ALGORITHM = "AWS4-HMAC-SHA256"
MAX_EXPIRY_S = 7 * 86400
"""More than this no storage grants."""


class S3Credentials(msgspec.Struct, frozen=True):
    access_key: str
    secret_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        # Whatever prints or logs us prints no secret.
        return f"Credentials({self.access_key[:4]}…)"


class S3Bucket(msgspec.Struct, frozen=True):
    """Where objects lie: `endpoint` is the storage's address, without the bucket."""

    endpoint: str
    region: str
    name: str
    path_style: bool = True
    """The bucket stands in the path; else before the host's name."""

    @property
    def host(self) -> str:
        host = urlsplit(self.endpoint).netloc
        return host if self.path_style else f"{self.name}.{host}"

    def path(self, key: str) -> str:
        """Of an object; of the bucket itself for an empty key. Quoted once: S3 alone of all services wants that."""
        base = urlsplit(self.endpoint).path.rstrip("/")
        return base + quote(f"/{self.name}/{key}" if self.path_style else f"/{key}", safe="/-._~")


def presigned(
    bucket: S3Bucket,
    credentials: S3Credentials,
    method: str,
    key: str,
    *,
    now: float,
    expires_s: int,
    headers: Mapping[str, str] | None = None,
    query: Mapping[str, str] | None = None,
) -> str:
    """The address. `headers` must be sent with the request, exactly as they are here."""
    assert 0 < expires_s <= MAX_EXPIRY_S
    instant = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    scope = f"{instant[:8]}/{bucket.region}/s3/aws4_request"
    signed = {name.lower(): " ".join(value.split()) for name, value in (headers or {}).items()}
    signed["host"] = bucket.host
    names = ";".join(sorted(signed))
    asked = {
        **(query or {}),
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{credentials.access_key}/{scope}",
        "X-Amz-Date": instant,
        "X-Amz-Expires": str(expires_s),
        "X-Amz-SignedHeaders": names,
    }
    if credentials.session_token is not None:
        asked["X-Amz-Security-Token"] = credentials.session_token
    path = bucket.path(key)
    line = "&".join(f"{name}={value}" for name, value in sorted(_quoted(*each) for each in asked.items()))
    lines = "".join(f"{name}:{value}\n" for name, value in sorted(signed.items()))
    request = f"{method}\n{path}\n{line}\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
    text = f"{_ALGORITHM}\n{instant}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signature = hmac.new(_signing_key(credentials, scope), text.encode(), hashlib.sha256).hexdigest()
    return f"{urlsplit(bucket.endpoint).scheme}://{bucket.host}{path}?{line}&X-Amz-Signature={signature}"


def _quoted(name: str, value: str) -> tuple[str, str]:
    return quote(name, safe="-._~"), quote(value, safe="-._~")


def _signing_key(credentials: S3Credentials, scope: str) -> bytes:
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key


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


class StoredObject(msgspec.Struct, frozen=True):
    size: int
    sha256: str | None
    """As the storage computed it, where it does."""


class S3Storage:
    """Closing twice is harmless."""

    def __init__(self, bucket: S3Bucket, credentials: S3Credentials) -> None:
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

    async def head(self, key: str) -> StoredObject | None:
        try:
            async with self.asked("HEAD", key, headers={"x-amz-checksum-mode": "ENABLED"}) as response:
                return StoredObject(
                    int(response.headers["content-length"]), _digest(response.headers.get(CHECKSUM))
                )
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


_PAGE = 1_000
_MAX_ANSWER = 4 << 20
_GONE = "NoSuchUpload"


class UploadedPart(NamedTuple):
    number: int
    size: int
    etag: str
    checksum: str | None


class MultipartUpload(NamedTuple):
    key: str
    upload_id: str


class S3Multipart:
    def __init__(self, storage: S3Storage) -> None:
        self._storage = storage

    async def begin(self, key: str, content_type: str, *, is_checked: bool) -> str:
        """`is_checked`: a SHA-256 is said of every part."""
        headers = {"content-type": content_type}
        if is_checked:
            headers["x-amz-checksum-algorithm"] = "SHA256"
        root = await self._asked("POST", key, {"uploads": ""}, headers)
        return _text(root, "UploadId")

    def link(
        self, key: str, upload_id: str, number: int, now: float, expires_s: int, headers: Mapping[str, str]
    ) -> str:
        return self._storage.signed("PUT", key, now, expires_s, headers, _place(upload_id, number))

    async def write(
        self, key: str, upload_id: str, number: int, content: AsyncIterator[bytes], size: int
    ) -> None:
        headers = {"content-length": str(size)}
        query = _place(upload_id, number)
        async with self._storage.asked(
            "PUT", key, headers=headers, query=query, content=content, is_long=True
        ):
            pass

    async def parts(self, key: str, upload_id: str) -> list[UploadedPart] | None:
        """In their order. None: there is no such upload (any more)."""
        found: list[UploadedPart] = []
        after = 0
        while True:
            query = {
                "uploadId": upload_id,
                "max-parts": str(_PAGE),
                "part-number-marker": str(after),
            }
            try:
                root = await self._asked("GET", key, query)
            except StorageRefused as refused:
                if refused.code == _GONE or refused.status == 404:
                    return None
                raise
            page = [
                UploadedPart(
                    int(_text(each, "PartNumber")),
                    int(_text(each, "Size")),
                    _text(each, "ETag"),
                    each.findtext("{*}ChecksumSHA256"),
                )
                for each in root.iterfind("{*}Part")
            ]
            found += page
            if not page or root.findtext("{*}IsTruncated") != "true":
                return found
            after = page[-1].number

    async def put_together(self, key: str, upload_id: str, parts: list[UploadedPart]) -> None:
        """Where an object lies already it stays, and the storage refuses."""
        content = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.etag)}</ETag>"
            + (f"<ChecksumSHA256>{escape(part.checksum)}</ChecksumSHA256>" if part.checksum else "")
            + "</Part>"
            for part in parts
        )
        body = (
            '<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"{content}</CompleteMultipartUpload>"
        ).encode()
        headers = {"content-type": "application/xml", "if-none-match": "*"}
        await self._asked("POST", key, {"uploadId": upload_id}, headers, body)

    async def give_up(self, key: str, upload_id: str) -> None:
        """One that is not there is given up already."""
        try:
            async with self._storage.asked("DELETE", key, query={"uploadId": upload_id}):
                pass
        except StorageRefused as refused:
            if refused.status != 404:
                raise

    async def uploads(self, prefix: str, after: MultipartUpload | None, limit: int) -> list[MultipartUpload]:
        """Those under way, in the order of their keys."""
        query = {"uploads": "", "prefix": prefix, "max-uploads": str(limit)}
        if after is not None:
            query |= {"key-marker": after.key, "upload-id-marker": after.upload_id}
        root = await self._asked("GET", "", query)
        return [
            MultipartUpload(_text(each, "Key"), _text(each, "UploadId"))
            for each in root.iterfind("{*}Upload")
        ]

    async def _asked(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> ElementTree.Element:
        async with self._storage.asked(
            method, key, headers=headers, query=query, content=content, is_long=True
        ) as response:
            answer = await response.content.read(_MAX_ANSWER)
            while piece := await response.content.read(_MAX_ANSWER):
                answer += piece
                if len(answer) > _MAX_ANSWER:
                    raise Fault("the storage sent an answer that is too long")
        try:
            root = ElementTree.fromstring(answer)
        except ElementTree.ParseError as error:
            raise Fault(f"the storage sent an answer that cannot be read: {error}") from error
        if root.tag.rpartition("}")[2] == "Error":
            # Putting together may take long: the answer begins with yes before it is known.
            raise self._storage.refused(500, answer)
        return root


def part_headers(size: int, checksum: str) -> dict[str, str]:
    return {"content-length": str(size), CHECKSUM: checksum}


def _place(upload_id: str, number: int) -> dict[str, str]:
    return {"partNumber": str(number), "uploadId": upload_id}


def _text(element: ElementTree.Element, name: str) -> str:
    found = element.findtext(f"{{*}}{name}")
    if not found:
        raise Fault(f"the storage sent an answer without {name}")
    return found
