"""Opens a database file, migrates it, and locks it for one process.

Each migration is atomic. The database keeps their checksums: a file with other migrations, or with newer
ones, is refused. The lock ends with its process.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from comfyfleet import private_files
from comfyfleet.model.errors import Fault
from comfyfleet.stores.migrations import Migration, migrations_of

# "CFlt": tells `file` and our check that this is our database.
APPLICATION_ID = 0x43466C74

# Larger than SQLite's default: a checkpoint waits for the disk twice.
_CHECKPOINT_PAGES = 4000
_LOG_BYTES = 64 * 2**20


def migrations() -> list[Migration]:
    return migrations_of("comfyfleet.stores.sqlite")


def connect(path: Path) -> sqlite3.Connection:
    """For the owner. A commit is on the disk before it is answered."""
    private_files.make_database(path)
    database = _connect(path, "rwc")
    try:
        (mode,) = database.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise Fault(
                f"the store {path} cannot keep a write-ahead log there (SQLite answers {mode!r}). "
                "Put it on a local disk: network file systems lack what it needs"
            )
        database.execute("PRAGMA synchronous = FULL")
        database.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
        database.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
    except (sqlite3.Error, Fault) as error:
        database.close()
        raise error if isinstance(error, Fault) else _unreadable(path, error) from error
    return database


def connect_to_read(path: Path) -> sqlite3.Connection:
    """For readers beside the owner: sees committed data and changes nothing."""
    if not path.is_file():
        raise Fault(f"there is no store at {path}")
    database = _connect(path, "ro")
    try:
        refuse_strangers(database, path)
    except BaseException:
        database.close()
        raise
    return database


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=10,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
        )
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: sqlite3.Error) -> Fault:
    return Fault(f"the store {path} cannot be opened: {error}. Check the path, its permissions and the disk")


def migrate(database: sqlite3.Connection, path: Path, known: list[Migration] | None = None) -> None:
    known = migrations() if known is None else known
    taken = refuse_strangers(database, path, known)
    try:
        for migration in known:
            if migration.number not in taken:
                _apply(database, migration)
    except sqlite3.Error as error:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise Fault(
            f"the tables of the store {path} cannot be migrated: {error}. Nothing was changed; "
            "free space on the disk or check its permissions, and start again"
        ) from error


def refuse_strangers(
    database: sqlite3.Connection, path: Path, known: list[Migration] | None = None
) -> dict[int, str]:
    """Returns the checksums of applied migrations, all of which this version knows."""
    try:
        (application,) = database.execute("PRAGMA application_id").fetchone()
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        if "migrations" not in tables:
            if tables or application not in (0, APPLICATION_ID):
                raise Fault(f"{path} is a SQLite database of another program; give the store its own file")
            return {}
        taken = dict(database.execute("SELECT number, checksum FROM migrations ORDER BY number").fetchall())
    except sqlite3.Error as error:
        raise _unreadable(path, error) from error
    by_number = {each.number: each for each in (migrations() if known is None else known)}
    newest = max(by_number, default=0)
    for number, checksum in taken.items():
        if number > newest:
            raise Fault(
                f"the store {path} was written by a newer version (its tables are at migration {number}, this "
                f"version knows {newest}). Use that version, or restore an older backup"
            )
        if number not in by_number or by_number[number].checksum != checksum:
            raise Fault(
                f"the store {path} was made by another migration {number} than this version has, so its tables may "
                "differ. Use the version that made it"
            )
    return taken


def _apply(database: sqlite3.Connection, migration: Migration) -> None:
    database.execute("BEGIN IMMEDIATE")
    database.execute(
        "CREATE TABLE IF NOT EXISTS migrations (number INTEGER PRIMARY KEY, name TEXT NOT NULL, checksum TEXT NOT NULL)"
    )
    for statement in _statements(migration.sql):
        database.execute(statement)
    database.execute(
        "INSERT INTO migrations VALUES (?, ?, ?)", (migration.number, migration.name, migration.checksum)
    )
    database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    database.execute("COMMIT")


def _statements(sql: str) -> Iterator[str]:
    statement = ""
    for line in sql.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    assert not statement.strip(), "the last statement of a migration ends in a semicolon"


class Ownership:
    """A lock on a file beside the database. The file stays; only the lock counts."""

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
                "One process owns a SQLite store: stop it first, or use its API"
            ) from error
        try:
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, str(os.getpid()).encode())
        except OSError as error:
            os.close(self._file)
            raise Fault(
                f"the store {database} cannot be opened: {path} cannot be written ({error.strerror}). "
                "Free space on its disk and start again"
            ) from error
        self._is_held = True

    async def opened(
        self, connect: Callable[[], sqlite3.Connection], undo: Callable[[], None]
    ) -> sqlite3.Connection:
        """Runs `connect` in a thread. If the call is cancelled, the lock stays until the thread ends."""
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
        # Beyond the process id, which other processes must be able to read.
        os.lseek(file, 1 << 20, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: int) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
