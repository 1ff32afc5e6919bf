"""The fake server's disk: input, output and temp folders.

Owns file names, counters and the rule that nothing leaves its folder. It outlives a crash of the server, as a disk
does; what is written into the files comes from `pictures`.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import msgspec

FOLDERS = ("input", "output", "temp")
_PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tiff")


class SavePlace(msgspec.Struct, frozen=True):
    """Where a save node writes: kind and path of the folder, name without counter, first free counter, subfolder."""

    kind: str
    folder: Path
    name: str
    counter: int
    subfolder: str


class FakeDisk:
    """Three folders under one base; a base that was made here is removed again."""

    def __init__(self, base_folder: str | None) -> None:
        self._is_ours = base_folder is None
        self.base = Path(
            tempfile.mkdtemp(prefix="fake-comfyui-") if base_folder is None else base_folder
        ).resolve()
        for name in FOLDERS:
            (self.base / name).mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        """Remove what was made here; a folder given from outside stays."""
        if self._is_ours:
            shutil.rmtree(self.base, ignore_errors=True)

    def empty_temp(self) -> None:
        """A starting ComfyUI empties its temp folder."""
        shutil.rmtree(self.base / "temp", ignore_errors=True)
        (self.base / "temp").mkdir(parents=True, exist_ok=True)

    def folder(self, kind: str) -> Path | None:
        """The folder of that kind, or None when there is no such kind."""
        return self.base / kind if kind in FOLDERS else None

    def inside(self, folder: Path, *parts: str) -> Path | None:
        """The path below `folder`, or None when it would leave it."""
        path = folder.joinpath(*parts).resolve()
        return path if path == folder or folder in path.parents else None

    def annotated(self, name: str) -> tuple[str, Path | None]:
        """Split "x.png [temp]" into the name and the folder it names; a plain name has no folder."""
        for kind in FOLDERS:
            mark = f"[{kind}]"
            if name.endswith(mark):
                return name.removesuffix(mark).rstrip(), self.base / kind
        return name, None

    def find_input(self, name: str) -> Path | None:
        """The file that a LoadImage input names, or None when it is not there."""
        plain, folder = self.annotated(name)
        path = self.inside(folder or self.base / "input", plain)
        return path if path is not None and path.is_file() else None

    def input_pictures(self) -> list[str]:
        """The pictures a LoadImage input may choose from."""
        entries = (self.base / "input").iterdir()
        return sorted(entry.name for entry in entries if entry.suffix.lower() in _PICTURE_ENDINGS)

    def save_place(self, kind: str, prefix: str, width: int = 0, height: int = 0) -> SavePlace | None:
        """Where the next file with this prefix goes; None when the prefix leads out of the folder."""
        root = self.base / kind
        wanted = Path(_fill_in(prefix, width, height))
        folder = self.inside(root, str(wanted.parent))
        if folder is None:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        subfolder = "" if wanted.parent == Path() else wanted.parent.as_posix()
        counter = _next_counter(folder, wanted.name)
        return SavePlace(kind=kind, folder=folder, name=wanted.name, counter=counter, subfolder=subfolder)


def _fill_in(prefix: str, width: int, height: int) -> str:
    now = time.localtime()
    values = {
        "width": str(width),
        "height": str(height),
        "year": str(now.tm_year),
        "month": f"{now.tm_mon:02}",
        "day": f"{now.tm_mday:02}",
        "hour": f"{now.tm_hour:02}",
        "minute": f"{now.tm_min:02}",
        "second": f"{now.tm_sec:02}",
    }
    for name, value in values.items():
        prefix = prefix.replace(f"%{name}%", value)
    return prefix


def _next_counter(folder: Path, name: str) -> int:
    highest = 0
    for entry in folder.iterdir():
        if entry.name.startswith(f"{name}_"):
            digits = entry.name[len(name) + 1 :].split("_")[0].split(".")[0]
            highest = max(highest, int(digits) if digits.isdigit() else 0)
    return highest + 1
