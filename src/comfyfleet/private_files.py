"""Files and folders that only their owner can read, independent of the umask.

Jobs, results, keys and uploads are on disk in plain form, and the machine may have other users.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path
from threading import Lock
from typing import BinaryIO

_LOG = logging.getLogger(__name__)

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MAKING = Lock()
"""A thread that finds a new file opens it only after the thread that made it has closed it."""
_BESIDE = ("-wal", "-shm", "-journal", ".lock")
"""Suffixes of the files beside an SQLite database."""


def create(path: Path) -> BinaryIO:
    """Create a new file. Raises `FileExistsError`."""
    return os.fdopen(_open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def make_folder(path: Path) -> None:
    """Create a folder and its parents. An existing folder does not change."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_database(path: Path) -> None:
    """Create the file before SQLite does, because SQLite copies its mode to the files beside it. Tighten old files.

    An existing file is never opened: closing it drops this process's locks on it, and SQLite in another process would
    then remove the write-ahead log that a connection here still uses."""
    with _MAKING, contextlib.suppress(OSError):
        # Of any other error SQLite reports the next step.
        os.close(_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    _tighten_database(path)


def _tighten_database(path: Path) -> None:
    for each in (path, *(path.with_name(path.name + ending) for ending in _BESIDE)):
        _tighten_one(each)


def tighten_databases(folder: Path, application_id: int) -> None:
    """Tighten the databases with this application id in a folder. Other files do not change."""
    if os.name != "posix":
        return
    try:
        found = [path for path in folder.iterdir() if _is_open_database(path, application_id)]
    except OSError as error:
        _LOG.warning("the folder %s cannot be listed: %s", folder, error)
        return
    for path in found:
        _tighten_database(path)


def _is_open_database(path: Path, application_id: int) -> bool:
    """Whether it is our database and readable by others. A database in use here is already private, so this never opens
    it: closing it again would drop SQLite's locks."""
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
    """Tighten a file, or a folder with its content. The content comes first, so a private folder is complete, and an
    interrupted run is completed by the next."""
    if path.is_symlink():
        return
    if path.is_dir():
        if not stat.S_IMODE(path.stat().st_mode) & _OTHERS:
            return
        try:
            for each in path.iterdir():
                tighten(each)
        except OSError as error:
            _LOG.warning("other users may be able to read %s: %s", path, error)
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
            _LOG.info("other users could read %s until now", path)
    except FileNotFoundError:
        return
    except OSError as error:
        # The file has another owner, who alone can change the mode. It still works.
        _LOG.warning("other users can read %s, and its mode cannot be changed here: %s", path, error)
