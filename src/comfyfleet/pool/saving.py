"""Outputs as files of this machine: every one under a name of its own, and none outside its folder."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from comfyfleet.model.job import OutputFile

# Separators and drives, what some systems take no name with, and what no name should have.
_UNSAFE = re.compile(r'[\x00-\x1f<>:"|?*]')


def safe_name(filename: str) -> str:
    """The last part of a server's name for a file: it leads nowhere."""
    name = _UNSAFE.sub("_", filename.replace("\\", "/").rpartition("/")[2])
    return name if name.strip(". ") else "output"


async def write_new(folder: Path, file: OutputFile, content: bytes) -> Path:
    """Writes it under its own name or the first free one like it; makes the folder where there is none."""
    return await asyncio.to_thread(_write_new, folder, safe_name(file.filename), content)


def _write_new(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    number = 1
    while True:
        try:
            with path.open("xb") as target:
                target.write(content)
            return path
        except FileExistsError:
            number += 1
            path = folder / f"{Path(name).stem}-{number}{Path(name).suffix}"
