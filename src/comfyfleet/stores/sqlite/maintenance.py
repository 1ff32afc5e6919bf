"""Checks, vacuums and copies a database file, without opening the store."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from comfyfleet import private_files
from comfyfleet.model.dispatch import Phase
from comfyfleet.model.errors import Fault
from comfyfleet.stores.sqlite import codec
from comfyfleet.stores.sqlite.database import (
    APPLICATION_ID,
    Ownership,
    connect,
    connect_to_read,
    migrations,
    refuse_strangers,
)

_MAX_PROBLEMS = 100
_PHASES = """
SELECT phase, count(*) FROM (SELECT phase FROM open_jobs UNION ALL SELECT phase FROM ended_jobs) GROUP BY phase
"""


def check(path: str | Path) -> list[str]:
    """At most a hundred problems. Safe while the owner runs."""
    path = Path(path)
    problems = []
    with closing(connect_to_read(path)) as database:
        try:
            # A snapshot: the owner goes on writing.
            database.execute("BEGIN")
            for problem in _problems(database, path):
                problems.append(problem)
                if len(problems) == _MAX_PROBLEMS:
                    problems.append("there may be more: the check stops here")
                    break
        except sqlite3.DatabaseError as error:
            problems.append(f"the file cannot be read: {error}")
    return problems


def describe(path: str | Path) -> tuple[dict[str, int], dict[str, Any]]:
    """What the file holds, and its settings. Both are empty if it cannot be read."""
    path = Path(path)
    with closing(connect_to_read(path)) as database:
        try:
            database.execute("BEGIN")
            steps = refuse_strangers(database, path)
            holds = {phase.value: 0 for phase in Phase}
            if steps:
                holds.update(database.execute(_PHASES))
                for table in ("workers", "blocks", "lessons", "classes", "documents"):
                    ((holds[table],),) = database.execute(f"SELECT count(*) FROM {table}").fetchall()
            ((free,),) = database.execute("PRAGMA freelist_count").fetchall()
            ((page_bytes,),) = database.execute("PRAGMA page_size").fetchall()
        except sqlite3.DatabaseError:
            return {}, {}
    log = path.with_name(path.name + "-wal")
    return holds, {
        "schema": max(steps, default=0),
        "bytes": path.stat().st_size,
        "log_bytes": log.stat().st_size if log.exists() else 0,
        "free_bytes": free * page_bytes,
    }


def vacuum(path: str | Path) -> None:
    """Returns purged space to the disk. Locks the file, so the store must be closed."""
    path = Path(path)
    if not path.is_file():
        raise Fault(f"there is no store at {path}")
    ownership = Ownership(path)
    try:
        with closing(connect(path)) as database:
            refuse_strangers(database, path)
            try:
                database.execute("VACUUM")
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            except sqlite3.Error as error:
                raise Fault(
                    f"{path} could not be vacuumed: {error}. It is unchanged; it needs free space of its own size"
                ) from error
    finally:
        ownership.release()


def count_documents(path: str | Path) -> dict[str, int]:
    """Counts documents by collection."""
    return dict(_rows(path, "SELECT drawer, count(*) FROM documents GROUP BY drawer"))


def read_documents(path: str | Path, collection: str) -> list[bytes]:
    return [body for (body,) in _rows(path, "SELECT body FROM documents WHERE drawer = ?", collection)]


def _rows(path: str | Path, sql: str, *values: str) -> list[Any]:
    with closing(connect_to_read(Path(path))) as database:
        try:
            return database.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise Fault(f"{path} cannot be read: {error}") from error


def backup(path: str | Path, target: str | Path) -> None:
    """An atomic copy of one moment, safe while the owner runs. Older copies beside it become private, too."""
    path, target = Path(path), Path(target)
    if target.exists():
        raise Fault(f"{target} exists already; a backup never overwrites a file, so name another")
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        private_files.make_database(partial)
        with closing(connect_to_read(path)) as source, closing(sqlite3.connect(partial)) as copy:
            # All pages in one step: otherwise each write of the owner restarts the copy.
            source.backup(copy, pages=-1)
            # A backup is one file, without a log.
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.rename(target)
    except (sqlite3.Error, OSError) as error:
        partial.unlink(missing_ok=True)
        raise Fault(f"{path} could not be copied to {target}: {error}. No partial copy is left") from error
    for folder in {path.absolute().parent, target.absolute().parent}:
        tighten_databases(folder)


def tighten_databases(folder: Path) -> None:
    """Makes stores, tenant databases and backups in a folder private."""
    private_files.tighten_databases(folder, APPLICATION_ID)


def _problems(database: sqlite3.Connection, path: Path) -> Iterator[str]:
    for (line,) in database.execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"SQLite: {line}"
    missing = [each.number for each in migrations() if each.number not in refuse_strangers(database, path)]
    if missing:
        yield f"its tables lack the migrations {missing}; the store applies them when it is next opened"
        return
    for table, column, of in (
        ("open_jobs", "sequence", "jobs"),
        ("ended_jobs", "sequence", "jobs"),
        ("results", "sequence", "jobs"),
        ("fits", "class_key", "classes"),
        ("fits", "profile_key", "profiles"),
    ):
        for (key,) in database.execute(
            f"SELECT DISTINCT {column} FROM {table} WHERE {column} NOT IN (SELECT {column} FROM {of})"
        ):
            yield f"{table} has a row for {column} {key!r}, {of} has none"
    classes = {key for (key,) in database.execute("SELECT class_key FROM classes")}
    for job_id, *row in database.execute(
        "SELECT job_id, jobs.sequence, reference, open_jobs.phase, open_jobs.state, "
        "ended_jobs.phase, ended_jobs.state, ended_jobs.apart "
        "FROM jobs LEFT JOIN open_jobs USING (sequence) LEFT JOIN ended_jobs USING (sequence)"
    ):
        try:
            for problem in _job_problems(job_id, *row, classes=classes):
                yield f"job {job_id}: {problem}"
        except (msgspec.MsgspecError, ValueError) as error:
            yield f"job {job_id} cannot be read: {error}"


def _job_problems(
    job_id: str,
    sequence: int,
    reference: str | None,
    open_phase: str | None,
    open_blob: bytes | None,
    ended_phase: str | None,
    ended_blob: bytes | None,
    apart: str | None,
    *,
    classes: set[str],
) -> Iterator[str]:
    blob = ended_blob if open_blob is None else open_blob
    if blob is None:
        yield "it is neither open nor ended"
        return
    if open_blob is not None and ended_blob is not None:
        yield "it is both open and ended"
    phase = ended_phase if open_blob is None else open_phase
    state = codec.decode_state(blob)
    dispatch = state.dispatch
    if (dispatch.job_id, dispatch.sequence, dispatch.phase.value, state.reference) != (
        job_id,
        sequence,
        phase,
        reference,
    ):
        yield "its row and its dispatch differ in id, sequence, phase or reference"
    if dispatch.phase.is_final != (open_blob is None):
        yield f"its phase is {phase}, but it is in the table of {'ended' if open_blob is None else 'open'} jobs"
    if (phase == "leased") != (dispatch.lease is not None):
        yield f"its phase is {phase}, its lease is {dispatch.lease}"
    if open_blob is None and apart != codec.apart(dispatch):
        yield "its row and its dispatch differ on whether its end is settled"
    open_classes = () if dispatch.phase.is_final else (dispatch.class_key, dispatch.relaxed_class)
    for class_key in open_classes:
        if class_key is not None and class_key not in classes:
            yield f"its class {class_key} is not in the table"
    # Facts have no numbers in the file: decoding compares their count.
    state.job_facts()
    state.record_changes()
