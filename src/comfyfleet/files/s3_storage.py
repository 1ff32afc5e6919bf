"""A client for one bucket of S3-compatible storage: presigned URLs, objects, multipart uploads.

Connection and credential errors are `Fault`s, because no caller of the hub can correct them. Error messages
contain no signature. `s3.py` decides what the objects are for.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
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
"""The maximum of the protocol."""


class S3Credentials(msgspec.Struct, frozen=True):
    access_key: str
    secret_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        # Keep the secret out of logs.
        return f"Credentials({self.access_key[:4]}…)"


class S3Bucket(msgspec.Struct, frozen=True):
    """`endpoint` is the storage's URL without the bucket."""

    endpoint: str
    region: str
    name: str
    path_style: bool = True
    """True: the bucket is in the path; False: in the host name."""

    @property
    def host(self) -> str:
        host = urlsplit(self.endpoint).netloc
        return host if self.path_style else f"{self.name}.{host}"

    def path(self, key: str) -> str:
        """An empty key means the bucket. S3, unlike other AWS services, quotes the path only once."""
        base = urlsplit(self.endpoint).path.rstrip("/")
        return base + quote(f"/{self.name}/{key}" if self.path_style else f"/{key}", safe="/-._~")


def presigned(
    bucket: S3Bucket,
    credentials: S3Credentials,
    method: str,
    key: str,
    now: float,
    expires_s: int,
    headers: Mapping[str, str] | None = None,
    query: Mapping[str, str] | None = None,
) -> str:
    """A presigned URL (AWS Signature Version 4). The request must have exactly these `headers`."""
    assert 0 < expires_s <= MAX_EXPIRY_S
    instant = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    scope = f"{instant[:8]}/{bucket.region}/s3/aws4_request"
    signed = {name.lower(): " ".join(value.split()) for name, value in (headers or {}).items()}
    signed["host"] = bucket.host
    names = ";".join(sorted(signed))
    parameters = {
        **(query or {}),
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{credentials.access_key}/{scope}",
        "X-Amz-Date": instant,
        "X-Amz-Expires": str(expires_s),
        "X-Amz-SignedHeaders": names,
    }
    if credentials.session_token is not None:
        parameters["X-Amz-Security-Token"] = credentials.session_token
    path = bucket.path(key)
    line = "&".join(
        f"{name}={value}" for name, value in sorted(_quoted(*each) for each in parameters.items())
    )
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
"""For the hub's own requests: clocks may differ."""
_ANSWER_S = 15.0
_QUIET_S = 60.0
_PIECE = 1 << 20
_MAX_XML = 4 << 20
_MAX_ERROR = 4_096
_CONNECTIONS = 64


class StorageRefused(Fault):
    """The storage answered with an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class StoredObject(msgspec.Struct, frozen=True):
    size: int
    sha256: str | None
    """None: the storage does not compute it."""


class S3Storage:
    def __init__(self, bucket: S3Bucket, credentials: S3Credentials) -> None:
        self.bucket = bucket
        self.signed = partial(presigned, bucket, credentials)
        """Makes presigned URLs for callers and workers."""
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def head(self, key: str) -> StoredObject | None:
        try:
            async with self.request("HEAD", key, headers={"x-amz-checksum-mode": "ENABLED"}) as response:
                return StoredObject(
                    int(response.headers["content-length"]), _digest(response.headers.get(CHECKSUM))
                )
        except StorageRefused as refused:
            if refused.status == 404:
                return None
            raise

    async def read(self, key: str) -> AsyncGenerator[bytes, None]:
        async with self.request("GET", key, is_long=True) as response:
            async for piece in response.content.iter_chunked(_PIECE):
                yield piece

    async def write(
        self,
        key: str,
        content: AsyncIterator[bytes],
        headers: Mapping[str, str],
        query: Mapping[str, str] | None = None,
    ) -> None:
        """`headers` include the length; the storage refuses content that does not match them."""
        async with self.request("PUT", key, headers=headers, query=query, content=content, is_long=True):
            pass

    async def remove(self, key: str, query: Mapping[str, str] | None = None) -> None:
        """Also succeeds if the object or upload does not exist."""
        try:
            async with self.request("DELETE", key, query=query):
                pass
        except StorageRefused as refused:
            if refused.status != 404:
                raise

    async def keys(self, prefix: str, after: str, limit: int) -> list[str]:
        query = {"list-type": "2", "prefix": prefix, "max-keys": str(limit)}
        if after:
            query["start-after"] = after
        async with self.request("GET", "", query=query) as response:
            root = await self.read_xml(response)
        return [each.text for each in root.iterfind("{*}Contents/{*}Key") if each.text]

    async def read_xml(self, response: aiohttp.ClientResponse) -> ElementTree.Element:
        content = b""
        while piece := await response.content.read(_MAX_XML):
            content += piece
            if len(content) > _MAX_XML:
                raise Fault(f"{self._place} sent too long an answer")
        try:
            return ElementTree.fromstring(content)
        except ElementTree.ParseError as error:
            raise Fault(f"{self._place} sent an unreadable answer: {error}") from error

    @property
    def _place(self) -> str:
        return f"the storage at {self.bucket.endpoint}"

    @asynccontextmanager
    async def request(
        self,
        method: str,
        key: str,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        content: AsyncIterator[bytes] | bytes | None = None,
        is_long: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request with the hub's credentials."""
        # This machine's clock, not the store's: the storage compares it with its own.
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
            raise Fault(f"cannot reach {self._place}: {error.os_error}") from error
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Fault(f"{self._place} did not answer: {type(error).__name__}") from error

    def refused(self, status: int, body: bytes) -> StorageRefused:
        code = _code(body)
        what = f"{self._place} answered {status} {code}".rstrip()
        if code == "NoSuchBucket":
            what += f": create the bucket {self.bucket.name!r}"
        elif status in (301, 307, 400, 401, 403):
            what += (
                f": check the URL, the region ({self.bucket.region}), the credentials and their permissions"
            )
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
    """None for the checksum of checksums that an object uploaded in parts has."""
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
        """`is_checked`: every part is sent with a SHA-256."""
        headers = {"content-type": content_type}
        if is_checked:
            headers["x-amz-checksum-algorithm"] = "SHA256"
        root = await self._request("POST", key, {"uploads": ""}, headers)
        return _text(root, "UploadId")

    def link(
        self, key: str, upload_id: str, number: int, now: float, expires_s: int, headers: Mapping[str, str]
    ) -> str:
        return self._storage.signed("PUT", key, now, expires_s, headers, _part_query(upload_id, number))

    async def write(
        self, key: str, upload_id: str, number: int, content: AsyncIterator[bytes], size: int
    ) -> None:
        headers = {"content-length": str(size)}
        await self._storage.write(key, content, headers, _part_query(upload_id, number))

    async def parts(self, key: str, upload_id: str) -> list[UploadedPart] | None:
        """In order. None: there is no such upload."""
        found: list[UploadedPart] = []
        after = 0
        while True:
            query = {
                "uploadId": upload_id,
                "max-parts": str(_PAGE),
                "part-number-marker": str(after),
            }
            try:
                root = await self._request("GET", key, query)
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

    async def complete(self, key: str, upload_id: str, parts: list[UploadedPart]) -> None:
        """Refused if the object exists already."""
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
        await self._request("POST", key, {"uploadId": upload_id}, headers, body)

    async def abort(self, key: str, upload_id: str) -> None:
        await self._storage.remove(key, {"uploadId": upload_id})

    async def uploads(self, prefix: str, after: MultipartUpload | None, limit: int) -> list[MultipartUpload]:
        """Unfinished uploads, ordered by key."""
        query = {"uploads": "", "prefix": prefix, "max-uploads": str(limit)}
        if after is not None:
            query |= {"key-marker": after.key, "upload-id-marker": after.upload_id}
        root = await self._request("GET", "", query)
        return [
            MultipartUpload(_text(each, "Key"), _text(each, "UploadId"))
            for each in root.iterfind("{*}Upload")
        ]

    async def _request(
        self,
        method: str,
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> ElementTree.Element:
        async with self._storage.request(
            method, key, headers=headers, query=query, content=content, is_long=True
        ) as response:
            root = await self._storage.read_xml(response)
        if root.tag.rpartition("}")[2] == "Error":
            # Assembling takes long, so the storage sends its status before it knows the result.
            raise self._storage.refused(500, ElementTree.tostring(root))
        return root


def part_headers(size: int, checksum: str) -> dict[str, str]:
    return {"content-length": str(size), CHECKSUM: checksum}


def _part_query(upload_id: str, number: int) -> dict[str, str]:
    return {"partNumber": str(number), "uploadId": upload_id}


def _text(element: ElementTree.Element, name: str) -> str:
    found = element.findtext(f"{{*}}{name}")
    if not found:
        raise Fault(f"the storage sent an answer without {name}")
    return found
