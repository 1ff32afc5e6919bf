"""Uploads in parts, as S3-compatible storage knows them: begun, listed, put together, given up.

Parts are put by whoever has links to them; here is what the hub does with its own credentials. What an upload is for is
`s3.py`'s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from comfyfleet.assets.storage import CHECKSUM, Storage, StorageRefused
from comfyfleet.model.errors import Fault

_PAGE = 1_000
_MAX_ANSWER = 4 << 20
_GONE = "NoSuchUpload"


class Part(NamedTuple):
    number: int
    size: int
    etag: str
    checksum: str | None


class Upload(NamedTuple):
    key: str
    upload_id: str


class Multipart:
    def __init__(self, storage: Storage) -> None:
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

    async def parts(self, key: str, upload_id: str) -> list[Part] | None:
        """In their order. None: there is no such upload (any more)."""
        found: list[Part] = []
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
                Part(
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

    async def put_together(self, key: str, upload_id: str, parts: list[Part]) -> None:
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

    async def uploads(self, prefix: str, after: Upload | None, limit: int) -> list[Upload]:
        """Those under way, in the order of their keys."""
        query = {"uploads": "", "prefix": prefix, "max-uploads": str(limit)}
        if after is not None:
            query |= {"key-marker": after.key, "upload-id-marker": after.upload_id}
        root = await self._asked("GET", "", query)
        return [Upload(_text(each, "Key"), _text(each, "UploadId")) for each in root.iterfind("{*}Upload")]

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
