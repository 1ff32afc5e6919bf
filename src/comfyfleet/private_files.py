"""Files and folders that only their owner can read, whatever the umask of the process says.

Jobs, results, keys and uploads are on disk as they are. On a machine that others use too, none of it is theirs to read.
"""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import BinaryIO

_LOG = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_BESIDE = ("-wal", "-shm", "-journal", ".lock")
"""What SQLite and its owner keep beside a database."""


def create(path: Path) -> BinaryIO:
    """A new file to write. Raises `FileExistsError`."""
    return os.fdopen(_open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def make_folder(path: Path) -> None:
    """As far as it is not there. One that is there stays as it is."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_database(path: Path) -> None:
    """The file, before SQLite makes it: those that it puts beside it get its rights. What is there is tightened."""
    try:
        os.close(_open(path, os.O_RDWR | os.O_CREAT))
    except OSError:
        # Told by SQLite in its own words, with what to do.
        return
    _tighten_database(path)


def _tighten_database(path: Path) -> None:
    for each in (path, *(path.with_name(path.name + ending) for ending in _BESIDE)):
        _tighten_one(each)


def tighten_databases(folder: Path, application_id: int) -> None:
    """Those with this mark in their head, with what lies beside them, in a folder that may hold anything else too: that
    stays as it is."""
    if os.name != "posix":
        return
    try:
        found = [path for path in folder.iterdir() if _is_open_database(path, application_id)]
    except OSError as error:
        _LOG.warning("what is in %s could not be looked at: %s", folder, error)
        return
    for path in found:
        _tighten_database(path)


def _is_open_database(path: Path, application_id: int) -> bool:
    """Ours, and readable by others. One that is in use here is not, and so is never opened past SQLite, which would
    take its locks away."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or not about.st_mode & _OTHERS or about.st_uid != os.geteuid():
            return False
        with path.open("rb") as file:
            head = file.read(100)
    except OSError:
        return False
    return head.startswith(b"SQLite format 3\0") and head[68:72] == application_id.to_bytes(4, "big")


def tighten(path: Path) -> None:
    """A file, or a folder and all that is in it. A folder that nobody else can enter is taken to be done: what it holds
    is tightened first, so that a start that was cut off is made good by the next."""
    if path.is_symlink():
        return
    if path.is_dir():
        if not stat.S_IMODE(path.stat().st_mode) & _OTHERS:
            return
        try:
            for each in path.iterdir():
                tighten(each)
        except OSError as error:
            _LOG.warning("%s could be read by others: %s", path, error)
    _tighten_one(path)


def is_open_to_others(path: Path) -> bool:
    return os.name == "posix" and path.is_file() and bool(path.stat().st_mode & _OTHERS)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o600)


def _tighten_one(path: Path) -> None:
    if os.name != "posix":
        return
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OTHERS:
            path.chmod(mode & ~_OTHERS)
            _LOG.info("%s could be read by others until now", path)
    except FileNotFoundError:
        return
    except OSError as error:
        # Somebody else's file: it works as it is, and only its owner can change it.
        _LOG.warning("%s can be read by others, and that cannot be changed here: %s", path, error)
