"""A form as browsers and curl send it (multipart/form-data, RFC 7578), read part by part while it arrives.

Nothing is kept but what has not been asked for yet: at most a piece as it came, and the headers of one part, which are
bounded. What the parts mean is `uploading.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import NamedTuple
from urllib.parse import unquote

from comfyfleet.model.errors import Refusal, RefusalCode

MAX_HEADER_BYTES = 8 * 1024
MAX_PARTS = 20
_MAX_BOUNDARY = 70
_TYPE = re.compile(r"multipart/form-data\s*(;|$)", re.IGNORECASE)
_BOUNDARY = re.compile(r";\s*boundary=(?:\"([^\"]*)\"|([^\s;\"]*))", re.IGNORECASE)
_PARAMETER = re.compile(r";\s*(name|filename\*?)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s;\"]*))", re.IGNORECASE)


class Part(NamedTuple):
    name: str
    filename: str | None
    """None: it is no file."""
    content_type: str
    content: AsyncGenerator[bytes, None]
    """Read to its end before the next part is asked for."""


def is_form(headers: Mapping[str, str]) -> bool:
    return _TYPE.match(headers.get("content-type", "").strip()) is not None


def boundary_in(headers: Mapping[str, str]) -> bytes:
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise _wrong("a form is sent as it is, without Content-Encoding")
    found = _BOUNDARY.search(headers.get("content-type", ""))
    boundary = "" if found is None else found[1] or found[2] or ""
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise _wrong(f"a form names a boundary of 1 to {_MAX_BOUNDARY} characters in its Content-Type")
    return boundary.encode()


class Form:
    def __init__(self, pieces: AsyncIterator[bytes], boundary: bytes) -> None:
        self._pieces = pieces
        self._delimiter = b"\r\n--" + boundary
        # So that the first boundary is found like the others.
        self._rest = bytearray(b"\r\n")

    async def parts(self) -> AsyncGenerator[Part, None]:
        await self._skip_preamble()
        for _ in range(MAX_PARTS):
            if not await self._has_next():
                return
            headers = await self._headers()
            content = self._content()
            yield _part(headers, content)
            # What was not wanted is passed over.
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
        # The boundary may come in two pieces: so much of the end is kept back.
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
            raise _wrong("the form ends in the middle: send it again") from None


def _part(headers: Mapping[str, str], content: AsyncGenerator[bytes, None]) -> Part:
    disposition = headers.get("content-disposition", "")
    found = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(disposition)}
    if not disposition.lower().startswith("form-data") or not found.get("name"):
        raise _wrong("a part of the form has no name: Content-Disposition: form-data; name=…")
    filename = found.get("filename")
    if (coded := found.get("filename*")) is not None:
        filename = unquote(coded.rpartition("'")[2], errors="replace")
    return Part(found["name"], filename, headers.get("content-type", ""), content)


def _wrong(why: str) -> Refusal:
    return Refusal(RefusalCode.INVALID_REQUEST, why)
