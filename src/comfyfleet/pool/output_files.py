"""Writes outputs to local files: each under a new name, and never outside its folder."""

from __future__ import annotations

import asyncio
import re
import string
from pathlib import Path

import msgspec

from comfyfleet.model.job import OutputFile

# Characters that some file systems reject, that control a terminal, or that change the direction of text.
_UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069<>:"|?*]')
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_LONGEST = 200
"""Bytes of a name. Most systems allow 255, and a number may follow."""
_SUFFIX = 20
FIELDS = ("job", "node", "index", "name", "ext")
"""Fields of a pattern: job id, node id, number of the output from 1 on, the server's file name and its extension."""


def safe_name(filename: str) -> str:
    """The last part of a server's file name, without unsafe characters."""
    name = _UNSAFE.sub("_", filename.replace("\\", "/").rpartition("/")[2])
    if not name.strip(". "):
        return "output"
    return _cut(f"_{name}" if _DEVICES.fullmatch(name) else name)


def _cut(name: str) -> str:
    """Shorten a long name but keep its extension."""
    if len(name.encode()) <= _LONGEST:
        return name
    suffix = Path(name).suffix
    suffix = suffix if len(suffix.encode()) <= _SUFFIX else ""
    stem = name.removesuffix(suffix).encode()[: _LONGEST - len(suffix.encode())]
    return stem.decode(errors="ignore") + suffix


class OutputNames(msgspec.Struct, frozen=True):
    """The folder and the names of outputs. The default is the server's name."""

    folder: Path
    pattern: tuple[str, ...] = ()
    """The names of the folders below, and of the file."""

    @classmethod
    def read(cls, text: str) -> OutputNames:
        """`out` is a folder; `out/{job}_{node}_{index}{ext}` has a pattern, which starts at the first part with a
        field. Raises `ValueError`."""
        parts = Path(text).parts
        first = next((number for number, part in enumerate(parts) if "{" in part or "}" in part), None)
        if first is None:
            return cls(Path(text))
        pattern = list(parts[first:])
        for part in pattern:
            _check(part)
        if text.endswith(("/", "\\")):
            pattern.append("{name}{ext}")
        elif "ext" not in _fields(pattern[-1]) and not Path(pattern[-1]).suffix:
            pattern[-1] += "{ext}"
        return cls(Path(*parts[:first]), tuple(pattern))

    def path(self, file: OutputFile, job: str, index: int) -> Path:
        """Every part is a safe name, so a server's names cannot lead out of the folder."""
        name = safe_name(file.filename)
        if not self.pattern:
            return self.folder / name
        values = {
            "job": safe_name(job),
            "node": safe_name(file.node_id),
            "index": index,
            "name": Path(name).stem,
            "ext": Path(name).suffix,
        }
        return self.folder.joinpath(*(safe_name(part.format_map(values)) for part in self.pattern))


def _fields(part: str) -> list[str]:
    return [name for _, name, _, _ in string.Formatter().parse(part) if name is not None]


def _check(part: str) -> None:
    known = ", ".join(f"{{{name}}}" for name in FIELDS)
    try:
        found = list(string.Formatter().parse(part))
    except ValueError as error:
        raise ValueError(f"{part!r} is not a valid pattern ({error}); write a literal brace twice") from None
    if part == "..":
        raise ValueError(
            "a pattern must not lead out of its folder: put '..' before the first field, or leave it out"
        )
    for _, name, spec, conversion in found:
        if name is None:
            continue
        if name not in FIELDS:
            raise ValueError(f"a pattern has no field {{{name}}}; the fields are {known}")
        if conversion is not None or (spec and not (name == "index" and re.fullmatch(r"0?\d", spec))):
            raise ValueError(
                f"{{{name}}} accepts no format; only {{index}} accepts a width, as in {{index:03}}"
            )


async def write_new(
    place: Path | OutputNames, file: OutputFile, content: bytes, *, job: str = "", index: int = 1
) -> Path:
    """Write the file under its name or the first free one like it. Create the folder if needed."""
    place = OutputNames(place) if isinstance(place, Path) else place
    return await asyncio.to_thread(_write_new, place.path(file, job, index), content)


def _write_new(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    wanted = path
    number = 1
    while True:
        try:
            with path.open("xb") as target:
                target.write(content)
            return path
        except FileExistsError:
            number += 1
            path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
