"""Reads an MP4 file with H.264 frames of I_PCM macroblocks: boxes, tables, parameter sets, and the pixels."""

from __future__ import annotations

import struct
from typing import NamedTuple

_CONTAINERS = {b"moov", b"trak", b"mdia", b"minf", b"dinf", b"stbl"}


class Video(NamedTuple):
    width: int
    height: int
    seconds: float
    frames: list[Frame]


class Frame(NamedTuple):
    is_key: bool
    idr_id: int
    bright: list[bytes]
    """Rows, cropped."""
    blue: int
    red: int
    """Of the first pixel."""


def read(content: bytes) -> Video:
    boxes = _boxes(content, 0, len(content))
    assert list(boxes)[:1] == [b"ftyp"] and boxes[b"ftyp"][:4] == b"isom"
    scale, duration = struct.unpack(">II", boxes[b"mdhd"][12:20])
    movie_scale, movie_duration = struct.unpack(">II", boxes[b"mvhd"][12:20])
    assert abs(duration / scale - movie_duration / movie_scale) < 0.001
    assert boxes[b"hdlr"][8:12] == b"vide"
    entry = boxes[b"stsd"][8:]
    assert entry[4:8] == b"avc1"
    width, height = struct.unpack(">HH", entry[32:36])
    assert struct.unpack(">II", boxes[b"tkhd"][-8:]) == (width << 16, height << 16)
    assert entry[90:94] == b"avcC"
    sets = entry[94:]
    assert sets[0] == 1 and sets[4] & 3 == 3, "lengths of four bytes"
    assert sets[5] & 31 == 1
    (length,) = struct.unpack(">H", sets[6:8])
    sequence, rest = sets[8 : 8 + length], sets[8 + length :]
    assert sets[1:4] == sequence[1:4] and sequence[0] & 31 == 7
    (length,) = struct.unpack(">H", rest[1:3])
    picture = rest[3 : 3 + length]
    assert rest[0] == 1 and picture[0] & 31 == 8 and len(rest) == 3 + length
    columns, rows, crop = _sequence(sequence)
    assert (columns * 16 - 2 * crop[0], rows * 16 - 2 * crop[1]) == (width, height)
    _picture(picture)
    count, delta = struct.unpack(">II", boxes[b"stts"][8:16])
    assert count * delta == duration
    size, total = struct.unpack(">II", boxes[b"stsz"][4:12])
    assert (size, total) == (0, count)
    sizes = struct.unpack(f">{count}I", boxes[b"stsz"][12:])
    assert struct.unpack(">I3I", boxes[b"stsc"][4:]) == (1, 1, 1, 1)
    assert struct.unpack(">I", boxes[b"stco"][4:8]) == (count,)
    offsets = struct.unpack(f">{count}I", boxes[b"stco"][8:])
    data_at = content.index(b"mdat") + 4
    assert all(data_at <= at and at + size <= len(content) for at, size in zip(offsets, sizes, strict=True))
    frames = [
        _frame(content[at : at + size], columns, rows, width, height)
        for at, size in zip(offsets, sizes, strict=True)
    ]
    return Video(width, height, duration / scale, frames)


def _boxes(content: bytes, start: int, end: int) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    while start < end:
        size, kind = struct.unpack(">I4s", content[start : start + 8])
        assert size >= 8 and start + size <= end, f"the box {kind!r} does not fit"
        found[kind] = content[start + 8 : start + size]
        if kind in _CONTAINERS:
            found |= _boxes(content, start + 8, start + size)
        start += size
    return found


class _Reader:
    def __init__(self, content: bytes) -> None:
        self.content = content
        self.at = 0

    def bits(self, count: int) -> int:
        value = 0
        for _ in range(count):
            value = value << 1 | self.content[self.at >> 3] >> (7 - (self.at & 7)) & 1
            self.at += 1
        return value

    def code(self) -> int:
        zeros = 0
        while not self.bits(1):
            zeros += 1
        return (1 << zeros) - 1 + self.bits(zeros)

    def take(self, count: int) -> bytes:
        while self.at & 7:
            assert self.bits(1) == 0
        self.at += 8 * count
        return self.content[self.at // 8 - count : self.at // 8]

    def ends(self) -> None:
        """A one, zeros to the end of the byte, and nothing more."""
        assert self.bits(1) == 1
        while self.at & 7:
            assert self.bits(1) == 0
        assert self.at == 8 * len(self.content)


def _plain(unit: bytes) -> bytes:
    for forbidden in (b"\0\0\0", b"\0\0\1", b"\0\0\2"):
        assert forbidden not in unit, "it looks like the start of another unit"
    return unit[1:].replace(b"\0\0\3", b"\0\0")


def _sequence(unit: bytes) -> tuple[int, int, tuple[int, int]]:
    read = _Reader(_plain(unit))
    assert read.bits(8) == 66, "baseline"
    read.bits(16)
    assert [read.code() for _ in range(4)] == [0, 0, 2, 1]
    assert read.bits(1) == 0
    columns, rows = read.code() + 1, read.code() + 1
    assert read.bits(1) == 1, "whole frames"
    read.bits(1)
    crop = (0, 0, 0, 0)
    if read.bits(1):
        crop = (read.code(), read.code(), read.code(), read.code())
    assert read.bits(1) == 0
    read.ends()
    return columns, rows, (crop[0] + crop[1], crop[2] + crop[3])


def _picture(unit: bytes) -> None:
    read = _Reader(_plain(unit))
    assert (read.code(), read.code(), read.bits(2)) == (0, 0, 0)
    assert (read.code(), read.code(), read.code(), read.bits(3)) == (0, 0, 0, 0)
    assert [read.code() for _ in range(3)] == [0, 0, 0]
    assert read.bits(3) == 0b100, "slices say how edges are smoothed"
    read.ends()


def _frame(sample: bytes, columns: int, rows: int, width: int, height: int) -> Frame:
    (length,) = struct.unpack(">I", sample[:4])
    unit = sample[4:]
    assert length == len(unit)
    read = _Reader(_plain(unit))
    assert [read.code() for _ in range(3)] == [0, 7, 0], "an I slice from the first macroblock on"
    assert read.bits(4) == 0
    idr_id = read.code()
    assert (read.bits(2), read.code(), read.code()) == (0, 0, 1)
    picture = [bytearray(columns * 16) for _ in range(rows * 16)]
    first: tuple[int, int] | None = None
    for index in range(columns * rows):
        assert read.code() == 25, "I_PCM"
        samples = read.take(384)
        x, y = index % columns * 16, index // columns * 16
        for row in range(16):
            picture[y + row][x : x + 16] = samples[16 * row : 16 * row + 16]
        first = first or (samples[256], samples[320])
    read.ends()
    assert first is not None
    return Frame(unit[0] & 31 == 5, idr_id, [bytes(row[:width]) for row in picture[:height]], *first)
