"""Outputs as files of this machine: every one under a name of its own, and none outside its folder."""

from __future__ import annotations

import asyncio
import re
import string
from pathlib import Path

import msgspec

from comfyfleet.model.job import OutputFile

# Separators and drives, what some systems take no name with, and what no name should have: it means something to a
# terminal, or turns the direction of what is read.
_UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069<>:"|?*]')
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)
_LONGEST = 200
"""Bytes of a name; most systems take 255, and a number may follow."""
_SUFFIX = 20
FIELDS = ("job", "node", "index", "name", "ext")
"""Of a pattern: the job's id, the node's, the number of the output in its job from 1 on, the name that the server gave
it, and the end of that name, with its dot."""


def safe_name(filename: str) -> str:
    """The last part of a server's name for a file: it leads nowhere."""
    name = _UNSAFE.sub("_", filename.replace("\\", "/").rpartition("/")[2])
    if not name.strip(". "):
        return "output"
    return _cut(f"_{name}" if _DEVICES.fullmatch(name) else name)


def _cut(name: str) -> str:
    """No longer than a system takes; its suffix stays."""
    if len(name.encode()) <= _LONGEST:
        return name
    suffix = Path(name).suffix
    suffix = suffix if len(suffix.encode()) <= _SUFFIX else ""
    stem = name.removesuffix(suffix).encode()[: _LONGEST - len(suffix.encode())]
    return stem.decode(errors="ignore") + suffix


class OutputNames(msgspec.Struct, frozen=True):
    """Where outputs go: a folder, and the names that they get in it; unless said, those that their server gave them."""

    folder: Path
    pattern: tuple[str, ...] = ()
    """A name for each folder below, the file's last."""

    @classmethod
    def read(cls, text: str) -> OutputNames:
        """`out` is a folder, `out/{job}_{node}_{index}{ext}` a pattern from the first part with a field on. Raises
        `ValueError` in words."""
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
        """Every part is a name and no way out, whatever a server called the file, or its node."""
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
        raise ValueError(
            f"{part!r} is no pattern ({error}); a brace that is meant is written twice"
        ) from None
    if part == "..":
        raise ValueError(
            "a pattern must not lead out of its folder: '..' stands before the first field, or nowhere"
        )
    for _, name, spec, conversion in found:
        if name is None:
            continue
        if name not in FIELDS:
            raise ValueError(f"a pattern has no {{{name}}}; there are {known}")
        if conversion is not None or (spec and not (name == "index" and re.fullmatch(r"0?\d", spec))):
            raise ValueError(f"{{{name}}} takes no format, but for a width of {{index}}, as in {{index:03}}")


async def write_new(
    place: Path | OutputNames, file: OutputFile, content: bytes, *, job: str = "", index: int = 1
) -> Path:
    """Writes it under its own name or the first free one like it; makes the folder where there is none."""
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
