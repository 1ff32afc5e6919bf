"""An export on its way to a file or to standard output, and the number of its last line."""

from __future__ import annotations

import csv
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

import msgspec

from comfyfleet import private
from comfyfleet.cli.endings import CommandFailed, ExitCode

_Pieces = AsyncGenerator[bytes, None]


async def show(pieces: _Pieces, form: str) -> int | None:
    return await _write(pieces, sys.stdout.buffer, form)


async def save(out: Path, pieces: _Pieces, form: str) -> int | None:
    """Whole or not at all."""
    try:
        file = private.create(out)
    except FileExistsError as error:
        raise CommandFailed(f"{out} is there already: choose another name", ExitCode.USAGE) from error
    try:
        with file:
            return await _write(pieces, file, form)
    except BaseException:
        _drop(out)
        raise


def _drop(out: Path) -> None:
    out.unlink(missing_ok=True)


async def _write(pieces: _Pieces, file: BinaryIO, form: str) -> int | None:
    last, ended = b"", b""
    async with aclosing(pieces):
        async for piece in pieces:
            file.write(piece)
            *whole, last = (last + piece).split(b"\n")
            ended = next((line for line in reversed(whole) if line.strip()), ended)
    file.flush()
    return _number(ended, form)


def _number(line: bytes, form: str) -> int | None:
    """Of the last line; None of the heading, and of nothing."""
    if form == "jsonl":
        return int(msgspec.json.decode(line)["number"]) if line else None
    row = next(csv.reader([line.decode()]), [])
    return int(row[0]) if row and row[0].isdigit() else None
