"""Reads the named texts that PNG, WebP, JPEG, FLAC, MP4 and WebM files carry as metadata.

It reads only lengths and texts, never pixels, so a file of any size needs little memory. One text has at most
`MAX_TEXT_BYTES`, decompressed too; all texts together at most twice that. A file has at most `_MAX_PARTS` parts.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import BinaryIO

MAX_TEXT_BYTES = 16 * 1024 * 1024
_TRUNCATED = "it is truncated: copy or download it again"
_MAX_PARTS = 100_000
_MAX_TEXTS = 200
_MAX_NAME = 200
"""PNG allows 79. Texts with longer names are skipped."""
_MAX_DEPTH = 8


class BadFile(Exception):
    """The file cannot be read. The message gives the reason."""


class FileKind(Enum):
    PNG = "PNG"
    WEBP = "WebP"
    JPEG = "JPEG"
    FLAC = "FLAC"
    MP4 = "MP4"
    WEBM = "WebM"


def kind_of(head: bytes) -> FileKind | None:
    """The kind by the first bytes. None: not a kind that carries texts."""
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return FileKind.PNG
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return FileKind.WEBP
    if head.startswith(b"\xff\xd8\xff"):
        return FileKind.JPEG
    if head.startswith(b"fLaC"):
        return FileKind.FLAC
    if head[4:8] == b"ftyp":
        return FileKind.MP4
    if head.startswith(b"\x1aE\xdf\xa3"):
        return FileKind.WEBM
    return None


def texts_in(file: BinaryIO, kind: FileKind) -> dict[str, str]:
    """The first text of each name, in lower case. Raises `BadFile`."""
    found: dict[str, str] = {}
    size = 0
    try:
        for number, (name, text) in enumerate(_READERS[kind](_File(file))):
            if len(name) <= _MAX_NAME:
                found.setdefault(name.lower(), text.strip("\0"))
            # Count what was read, before any limit shortens it.
            size += len(name) + len(text)
            if number >= _MAX_TEXTS or size > 2 * MAX_TEXT_BYTES:
                raise BadFile(
                    f"it has more than {_MAX_TEXTS} texts, or more than {2 * MAX_TEXT_BYTES} bytes of text"
                )
    except (struct.error, IndexError, zlib.error) as error:
        raise BadFile("it is damaged or truncated") from error
    return found


class _File:
    """A file with a limit on the number of parts that are read."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.read, self.tell = file.seek, file.read, file.tell
        self._parts = 0

    def step(self) -> bool:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise BadFile(f"it has more than {_MAX_PARTS} parts")
        return True


def _read(file: _File, size: int) -> bytes:
    if size > MAX_TEXT_BYTES:
        raise BadFile(f"a part of its metadata claims {size} bytes, more than {MAX_TEXT_BYTES}")
    content = file.read(size)
    if len(content) < size:
        raise BadFile(_TRUNCATED)
    return content


def _unpacked(content: bytes) -> bytes:
    """Decompress up to the limit: a few kilobytes may expand to gigabytes."""
    unpacker = zlib.decompressobj()
    text = unpacker.decompress(content, MAX_TEXT_BYTES)
    if unpacker.unconsumed_tail:
        raise BadFile(f"a compressed text has more than {MAX_TEXT_BYTES} bytes")
    return text


# --- pictures ------------------------------------------------------------------------------------------------------


def _png(file: _File) -> Iterator[tuple[str, str]]:
    file.seek(8)
    has_texts = False
    while file.step():
        header = file.read(8)
        if len(header) < 8:
            # The texts come before the pixels, so a picture without its end may still have them.
            if not has_texts:
                raise BadFile(_TRUNCATED)
            return
        size, kind = struct.unpack(">I4s", header)
        if kind == b"IEND":
            return
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            has_texts = True
            yield _png_text(kind, _read(file, size))
            file.seek(4, 1)
        elif kind == b"eXIf":
            yield from _exif(_read(file, size))
            file.seek(4, 1)
        else:
            file.seek(size + 4, 1)


def _png_text(kind: bytes, content: bytes) -> tuple[str, str]:
    name, _, rest = content.partition(b"\0")
    if kind == b"tEXt":
        return name.decode("latin-1"), _text(rest)
    if kind == b"zTXt":
        return name.decode("latin-1"), _text(_unpacked(rest[1:]))
    is_packed, rest = rest[0] == 1, rest[2:]
    _, _, rest = rest.partition(b"\0")
    _, _, rest = rest.partition(b"\0")
    return name.decode("latin-1"), _text(_unpacked(rest) if is_packed else rest)


def _webp(file: _File) -> Iterator[tuple[str, str]]:
    file.seek(12)
    while file.step():
        header = file.read(8)
        if len(header) < 8:
            return
        kind, size = struct.unpack("<4sI", header)
        if kind == b"EXIF":
            yield from _exif(_read(file, size))
            file.seek(size % 2, 1)
        else:
            file.seek(size + size % 2, 1)


def _jpeg(file: _File) -> Iterator[tuple[str, str]]:
    file.seek(2)
    while file.step():
        header = file.read(4)
        if len(header) < 4:
            return
        mark, kind, size = struct.unpack(">BBH", header)
        if mark != 0xFF or kind == 0xDA or size < 2:
            # Pixels start here, and no texts follow.
            return
        content = file.read(size - 2)
        if kind == 0xE1 and content.startswith(b"Exif\0\0"):
            yield from _exif(content)
        elif kind == 0xFE:
            yield _labelled(_text(content))


def _exif(content: bytes) -> Iterator[tuple[str, str]]:
    """ComfyUI writes `prompt:{…}` and `workflow:{…}` as the values of two tags."""
    content = content.removeprefix(b"Exif\0\0")
    order = {b"II": "<", b"MM": ">"}.get(content[:2])
    if order is None:
        return
    (first,) = struct.unpack_from(f"{order}I", content, 4)
    directories, seen = [first], set[int]()
    while directories and len(seen) < 8:
        at = directories.pop()
        if at in seen:
            continue
        seen.add(at)
        (count,) = struct.unpack_from(f"{order}H", content, at)
        for number in range(count):
            tag, kind, length = struct.unpack_from(f"{order}HHI", content, at + 2 + 12 * number)
            place = at + 2 + 12 * number + 8
            if tag == 0x8769:
                directories.append(struct.unpack_from(f"{order}I", content, place)[0])
            elif kind in (2, 7):
                if length > 4:
                    (place,) = struct.unpack_from(f"{order}I", content, place)
                value = content[place : place + length]
                # A user comment starts with the name of its character set.
                yield _labelled(_text(value[8:] if tag == 0x9286 and len(value) > 8 else value))


def _labelled(text: str) -> tuple[str, str]:
    """Split `prompt:{…}` into label and text. A text without a label is a comment."""
    label, colon, rest = text.partition(":")
    label = label.strip("\0 \n")
    if colon and label.lower() in ("prompt", "workflow"):
        return label, rest
    return "comment", text


# --- sounds and videos ---------------------------------------------------------------------------------------------


def _flac(file: _File) -> Iterator[tuple[str, str]]:
    file.seek(4)
    while file.step():
        header = file.read(4)
        if len(header) < 4:
            return
        size = int.from_bytes(header[1:], "big")
        if header[0] & 0x7F == 4:
            yield from _comments(_read(file, size))
        else:
            file.seek(size, 1)
        if header[0] & 0x80:
            return


def _comments(content: bytes) -> Iterator[tuple[str, str]]:
    (at,) = struct.unpack_from("<I", content)
    (count,) = struct.unpack_from("<I", content, 4 + at)
    at += 8
    for _ in range(min(count, _MAX_TEXTS)):
        (size,) = struct.unpack_from("<I", content, at)
        name, _, text = content[at + 4 : at + 4 + size].partition(b"=")
        yield name.decode("latin-1"), _text(text)
        at += 4 + size


def _mp4(file: _File) -> Iterator[tuple[str, str]]:
    for _, kind, size in _boxes(file, file.seek(0), file.seek(0, 2)):
        if kind == b"moov":
            yield from _mp4_texts(file, file.tell(), file.tell() + size)


def _mp4_texts(file: _File, start: int, end: int, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Read `moov/udta/meta` or `moov/meta`: names in `keys` and values in `ilst`, or `ilst` with four-letter names."""
    names: list[str] = []
    for at, kind, size in _boxes(file, start, end):
        if depth > _MAX_DEPTH:
            return
        if kind == b"udta":
            yield from _mp4_texts(file, at, at + size, depth + 1)
        elif kind == b"meta":
            # With or without the four bytes of version and flags.
            file.seek(at + 4)
            skip = 0 if file.read(4) in (b"hdlr", b"keys", b"ilst") else 4
            yield from _mp4_texts(file, at + skip, at + size, depth + 1)
        elif kind == b"keys":
            names = _mp4_names(_read_at(file, at, size))
        elif kind == b"ilst":
            for inner, label, length in _boxes(file, at, at + size):
                number = int.from_bytes(label, "big")
                name = names[number - 1] if 0 < number <= len(names) else _FOUR_LETTERS.get(label, "")
                for place, data, much in _boxes(file, inner, inner + length):
                    if data == b"data" and name and much >= 8:
                        yield name, _text(_read_at(file, place + 8, much - 8))


_FOUR_LETTERS = {b"\xa9cmt": "comment", b"\xa9des": "comment", b"desc": "comment"}


def _mp4_names(content: bytes) -> list[str]:
    names: list[str] = []
    at = 8
    while at + 8 <= len(content) and len(names) < _MAX_TEXTS:
        (size,) = struct.unpack_from(">I", content, at)
        if size < 8:
            break
        names.append(content[at + 8 : at + size].decode("latin-1"))
        at += size
    return names


def _boxes(file: _File, start: int, end: int) -> Iterator[tuple[int, bytes, int]]:
    """The start, kind and size of the content of each box. The file is positioned at the start."""
    while file.step():
        if start + 8 > end:
            return
        file.seek(start)
        size, kind = struct.unpack(">I4s", file.read(8))
        head = 8
        if size == 1:
            (size,), head = struct.unpack(">Q", file.read(8)), 16
        elif size == 0:
            size = end - start
        if size < head or start + size > end:
            return
        yield start + head, kind, size - head
        start += size


def _read_at(file: _File, at: int, size: int) -> bytes:
    file.seek(at)
    return _read(file, size)


_SEGMENT, _TAGS, _TAG, _SIMPLE_TAG = 0x18538067, 0x1254C367, 0x7373, 0x67C8
_TAG_NAME, _TAG_TEXT = 0x45A3, 0x4487


def _webm(file: _File) -> Iterator[tuple[str, str]]:
    end = file.seek(0, 2)
    for at, kind, size in _elements(file, 0, end):
        if kind == _SEGMENT:
            for inner, name, length in _elements(file, at, at + size):
                if name == _TAGS:
                    yield from _webm_tags(file, inner, inner + length)


def _webm_tags(file: _File, start: int, end: int, depth: int = 0) -> Iterator[tuple[str, str]]:
    name = ""
    for at, kind, size in _elements(file, start, end):
        if kind in (_TAG, _SIMPLE_TAG) and depth < _MAX_DEPTH:
            yield from _webm_tags(file, at, at + size, depth + 1)
        elif kind == _TAG_NAME:
            name = _text(_read_at(file, at, size))
        elif kind == _TAG_TEXT and name:
            yield name, _text(_read_at(file, at, size))


def _elements(file: _File, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The start, id and size of the content of each element."""
    while file.step():
        if start >= end:
            return
        file.seek(start)
        kind, size = _number(file, keeps_mark=True), _number(file)
        at = file.tell()
        # A stream has no known size and extends to the end.
        size = end - at if size is None else size
        if kind is None or at + size > end:
            return
        yield at, kind, size
        start = at + size


def _number(file: _File, *, keeps_mark: bool = False) -> int | None:
    """A variable-length integer: its first set bit gives the number of bytes. None: unknown size."""
    first = file.read(1)[0]
    length = 9 - first.bit_length()
    if length > 8:
        return None
    rest = file.read(length - 1)
    if len(rest) < length - 1:
        raise BadFile("it is truncated")
    mark = 1 << (7 * length)
    value = int.from_bytes(bytes([first]) + rest, "big")
    if keeps_mark:
        return value
    value -= mark
    return None if value == mark - 1 else value


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content.decode("latin-1")


_READERS: dict[FileKind, Callable[[_File], Iterator[tuple[str, str]]]] = {
    FileKind.PNG: _png,
    FileKind.WEBP: _webp,
    FileKind.JPEG: _jpeg,
    FileKind.FLAC: _flac,
    FileKind.MP4: _mp4,
    FileKind.WEBM: _webm,
}
