"""Who owns a database file: one process at a time, by a lock that ends with the process, however it ends."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

from comfyfleet.model.errors import Fault


class Ownership:
    """The lock on the file beside the database. It stays where it is; only the lock on it counts."""

    def __init__(self, database: Path) -> None:
        path = database.with_name(database.name + ".lock")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        except OSError as error:
            raise Fault(
                f"the store {database} cannot be opened: {path} cannot be written ({error.strerror}). "
                "The folder must exist and be writable for this user"
            ) from error
        try:
            _lock(self._file)
        except OSError as error:
            owner = _read(self._file)
            os.close(self._file)
            raise Fault(
                f"the store {database} is in use by {f'process {owner}' if owner else 'another process'}. "
                "One process owns a SQLite store: stop it first, or speak to it over its API"
            ) from error
        try:
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, str(os.getpid()).encode())
        except OSError as error:
            os.close(self._file)
            raise Fault(
                f"the store {database} cannot be opened: {path} cannot be written ({error.strerror}). "
                "Make room on its disk and start again"
            ) from error
        self._is_held = True

    async def opened(
        self, connect: Callable[[], sqlite3.Connection], undo: Callable[[], None]
    ) -> sqlite3.Connection:
        """`connect` in a thread, which cannot be stopped: if it fails or is given up, the file stays ours until it has
        left it alone."""
        opening = asyncio.create_task(asyncio.to_thread(connect))
        try:
            return await asyncio.shield(opening)
        except BaseException:
            if opening.done():
                self._give_up(opening, undo)
            else:
                opening.add_done_callback(lambda _: self._give_up(opening, undo))
            raise

    def _give_up(self, opening: asyncio.Task[sqlite3.Connection], undo: Callable[[], None]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()
        undo()
        self.release()

    def release(self) -> None:
        if self._is_held:
            self._is_held = False
            os.close(self._file)


def _read(file: int) -> str:
    try:
        os.lseek(file, 0, os.SEEK_SET)
        text = os.read(file, 32).decode(errors="replace").strip()
    except OSError:
        return ""
    return text if text.isdigit() else ""


if sys.platform == "win32":
    import msvcrt

    def _lock(file: int) -> None:
        # Beyond the process id, which others must be able to read.
        os.lseek(file, 1 << 20, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
