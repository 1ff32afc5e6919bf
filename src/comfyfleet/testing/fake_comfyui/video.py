"""MP4 files that play: H.264 frames whose pixels are stored as they are.

A frame is one slice of I_PCM macroblocks (ITU-T H.264, 7.3.5), which every decoder reads and which needs no
compression. Files are small because pictures are small and few: a longer video shows its frames over and
over.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image as PillowImage

_BLOCK = 16
_PROFILE = bytes((66, 0xC0, 30))
"""Constrained Baseline, level 3."""
_I_PCM = 25
_EMULATION = re.compile(rb"\0\0(?=[\0-\3])")
_MATRIX = struct.pack(">9I", 0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000)


def mp4(pictures: Sequence[PillowImage.Image], count: int, frames_per_second: float) -> bytes:
    """`count` frames: the pictures, which have one size, over and over."""
    width, height = (max(2, edge // 2 * 2) for edge in pictures[0].size)
    samples = [_sample(picture.crop((0, 0, width, height)), index) for index, picture in enumerate(pictures)]
    starts = [sum(map(len, samples[:index])) for index in range(len(samples))]
    order = [index % len(samples) for index in range(count)]
    head = _box(b"ftyp", b"isom", struct.pack(">I", 512), b"isomavc1mp41")

    def movie(first: int) -> bytes:
        offsets = [first + starts[index] for index in order]
        sizes = [len(samples[index]) for index in order]
        return _movie(width, height, frames_per_second, offsets, sizes)

    # The length of the movie box does not depend on where the frames begin.
    data_at = len(head) + len(movie(0)) + 8
    return head + movie(data_at) + _box(b"mdat", *samples)


# the stream


class _Bits:
    """Bits from the first to the last, with the codes of H.264."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def number(self, value: int, bits: int) -> _Bits:
        self._text.append(f"{value:0{bits}b}")
        return self

    def code(self, *values: int) -> _Bits:
        """ue(v), and se(v) of zero."""
        for value in values:
            digits = f"{value + 1:b}"
            self._text.append("0" * (len(digits) - 1) + digits)
        return self

    def to_bytes(self) -> bytes:
        """Filled up with zeros."""
        text = "".join(self._text)
        text += "0" * (-len(text) % 8)
        return int(text, 2).to_bytes(len(text) // 8, "big")

    def ended(self) -> bytes:
        return self.number(1, 1).to_bytes()


def _unit(header: int, content: bytes) -> bytes:
    """A NAL unit, with escapes for bytes that look like the start of another one."""
    return bytes((header,)) + _EMULATION.sub(b"\0\0\3", content)


def _sequence_set(width: int, height: int) -> bytes:
    columns, rows = -(-width // _BLOCK), -(-height // _BLOCK)
    right, bottom = (columns * _BLOCK - width) // 2, (rows * _BLOCK - height) // 2
    # Its id, length of frame numbers, order of output as decoded, one reference frame.
    bits = _Bits().code(0, 0, 2, 1).number(0, 1).code(columns - 1, rows - 1)
    # Whole frames only, direct inference, cropping, no usability information.
    bits.number(0b111, 3).code(0, right, 0, bottom).number(0, 1)
    return _unit(0x67, _PROFILE + bits.ended())


def _picture_set() -> bytes:
    bits = _Bits().code(0, 0).number(0, 2).code(0, 0, 0).number(0, 3).code(0, 0, 0)
    # The slice says how edges are smoothed: not at all.
    return _unit(0x68, bits.number(0b100, 3).ended())


def _sample(picture: PillowImage.Image, index: int) -> bytes:
    """One frame that needs no other, as it lies in the file: its length, then itself."""
    # First macroblock, I slice, picture set; frame number; which of two neighbours it is; reference marking; quality;
    # no smoothing.
    header = _Bits().code(0, 7, 0).number(0, 4).code(index % 2).number(0, 2).code(0, 1)
    blocks = _blocks(picture)
    content = [header.code(_I_PCM).to_bytes(), blocks[0]]
    # From here on everything is byte-aligned.
    following = _Bits().code(_I_PCM).to_bytes()
    for block in blocks[1:]:
        content += following, block
    unit = _unit(0x65, b"".join(content) + b"\x80")
    return struct.pack(">I", len(unit)) + unit


def _blocks(picture: PillowImage.Image) -> list[bytes]:
    """The samples of each macroblock: brightness, then both colours at half the size, in the range of
    video."""
    from PIL import Image

    width, height = (-(-edge // _BLOCK) * _BLOCK for edge in picture.size)
    whole = Image.new("RGB", (width, height))
    whole.paste(picture.convert("RGB"))
    bright, blue, red = whole.convert("YCbCr").split()
    bright = bright.point([16 + round(value * 219 / 255) for value in range(256)])
    scale = [128 + round((value - 128) * 224 / 255) for value in range(256)]
    half = (width // 2, height // 2)
    blue, red = (channel.point(scale).resize(half, Image.Resampling.BOX) for channel in (blue, red))
    return [
        bright.crop((x, y, x + _BLOCK, y + _BLOCK)).tobytes()
        + b"".join(
            channel.crop((x // 2, y // 2, (x + _BLOCK) // 2, (y + _BLOCK) // 2)).tobytes()
            for channel in (blue, red)
        )
        for y in range(0, height, _BLOCK)
        for x in range(0, width, _BLOCK)
    ]


# the file


def _movie(
    width: int, height: int, frames_per_second: float, offsets: Sequence[int], sizes: Sequence[int]
) -> bytes:
    count = len(sizes)
    scale, each = max(1, round(1000 * frames_per_second)), 1000
    duration_ms = round(1000 * count * each / scale)
    movie_header = _full(
        b"mvhd",
        struct.pack(">IIIIIH", 0, 0, 1000, duration_ms, 0x10000, 0x100),
        bytes(10),
        _MATRIX,
        bytes(24),
        struct.pack(">I", 2),
    )
    track_header = _full(
        b"tkhd",
        struct.pack(">IIIII", 0, 0, 1, 0, duration_ms),
        bytes(16),
        _MATRIX,
        struct.pack(">II", width << 16, height << 16),
        flags=3,
    )
    media_header = _full(b"mdhd", struct.pack(">IIIIHH", 0, 0, scale, count * each, 0x55C4, 0))
    handler = _full(b"hdlr", bytes(4), b"vide", bytes(12), b"video\0")
    data_is_here = _box(b"dinf", _full(b"dref", struct.pack(">I", 1), _full(b"url ", flags=1)))
    table = _box(
        b"stbl",
        _full(b"stsd", struct.pack(">I", 1), _description(width, height)),
        _full(b"stts", struct.pack(">III", 1, count, each)),
        _full(b"stsc", struct.pack(">IIII", 1, 1, 1, 1)),
        _full(b"stsz", struct.pack(f">II{count}I", 0, count, *sizes)),
        _full(b"stco", struct.pack(f">I{count}I", count, *offsets)),
    )
    information = _box(b"minf", _full(b"vmhd", bytes(8), flags=1), data_is_here, table)
    media = _box(b"mdia", media_header, handler, information)
    return _box(b"moov", movie_header, _box(b"trak", track_header, media))


def _description(width: int, height: int) -> bytes:
    sequence, picture = _sequence_set(width, height), _picture_set()
    configuration = _box(
        b"avcC",
        b"\1" + _PROFILE + b"\xff\xe1",
        struct.pack(">H", len(sequence)) + sequence,
        b"\1" + struct.pack(">H", len(picture)) + picture,
    )
    return _box(
        b"avc1",
        bytes(6) + struct.pack(">H", 1) + bytes(16),
        struct.pack(">HHIIIH", width, height, 0x480000, 0x480000, 0, 1),
        bytes(32),
        struct.pack(">Hh", 24, -1),
        configuration,
    )


def _full(kind: bytes, *content: bytes, flags: int = 0) -> bytes:
    """A box with version and flags."""
    return _box(kind, struct.pack(">I", flags), *content)


def _box(kind: bytes, *content: bytes) -> bytes:
    return struct.pack(">I", sum(map(len, content)) + 8) + kind + b"".join(content)
