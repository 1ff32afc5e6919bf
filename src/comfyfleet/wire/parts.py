"""How a large file is cut into parts: the same at hub, worker and caller."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from comfyfleet.model.file import PartPlan

_PIECE = 1 << 20


class Part(NamedTuple):
    number: int
    start: int
    length: int


def parts_of(size: int, plan: PartPlan) -> list[Part]:
    """Of a file of so many bytes, counted from 1."""
    return [
        Part(number, plan.size * (number - 1), plan.length(number, size))
        for number in range(1, plan.count + 1)
    ]


def sha256_of(content: BinaryIO, part: Part) -> str:
    digest = hashlib.sha256()
    for piece in pieces_of(content, part):
        digest.update(piece)
    return digest.hexdigest()


def pieces_of(content: BinaryIO, part: Part) -> Iterator[bytes]:
    """None larger than a mebibyte."""
    content.seek(part.start)
    left = part.length
    while left and (piece := content.read(min(_PIECE, left))):
        left -= len(piece)
        yield piece
