"""What an operator does to a database file: check it, make it small, copy it. No store has to be opened for that."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import JobId
from comfyfleet.stores.sqlite import codec
from comfyfleet.stores.sqlite.migrating import connect, connect_to_read, migrations, refuse_strangers
from comfyfleet.stores.sqlite.owner import Ownership

_MAX_PROBLEMS = 100


def check(path: str | Path) -> list[str]:
    """What is wrong with the file, at most a hundred lines; nothing if it is sound. Safe while its owner runs."""
    path = Path(path)
    problems = []
    with closing(connect_to_read(path)) as database:
        try:
            # One look at one moment, though the owner goes on writing.
            database.execute("BEGIN")
            for problem in _problems(database, path):
                problems.append(problem)
                if len(problems) == _MAX_PROBLEMS:
                    problems.append("and perhaps more: the check ended here")
                    break
        except sqlite3.DatabaseError as error:
            problems.append(f"the file cannot be read: {error}")
    return problems


def vacuum(path: str | Path) -> None:
    """Gives the room of what was purged back to the disk. The store must not be open: it owns the file meanwhile."""
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
                    f"{path} could not be vacuumed: {error}. It is as it was; up to its own size is needed beside it"
                ) from error
    finally:
        ownership.release()


def backup(path: str | Path, target: str | Path) -> None:
    """A copy of one moment, complete or not there at all. Safe while the owner runs."""
    path, target = Path(path), Path(target)
    if target.exists():
        raise Fault(f"{target} exists already; a backup never overwrites, name another file")
    partial = target.with_name(target.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        with closing(connect_to_read(path)) as source, closing(sqlite3.connect(partial)) as copy:
            # All pages in one step: otherwise each write of the owner makes it begin again.
            source.backup(copy, pages=-1)
            # A backup is one file: without a log beside it.
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.rename(target)
    except (sqlite3.Error, OSError) as error:
        partial.unlink(missing_ok=True)
        raise Fault(f"{path} could not be copied to {target}: {error}. Nothing was left behind") from error


def _problems(database: sqlite3.Connection, path: Path) -> Iterator[str]:
    for (line,) in database.execute("PRAGMA integrity_check"):
        if line != "ok":
            yield f"SQLite: {line}"
    missing = [each.number for each in migrations() if each.number not in refuse_strangers(database, path)]
    if missing:
        yield f"its tables lack the steps {missing}; the store takes them when it is next opened"
        return
    meta = dict(database.execute("SELECT name, value FROM meta"))
    ((highest,),) = database.execute("SELECT coalesce(max(sequence), 0) FROM dispatches").fetchall()
    if meta.get("sequence", -1) < highest:
        yield f"the last place given is {meta.get('sequence')}, but a job stands at {highest}"
    for table, column, of in (
        ("jobs", "sequence", "dispatches"),
        ("results", "sequence", "dispatches"),
        ("dispatches", "sequence", "jobs"),
        ("fits", "class_key", "classes"),
        ("fits", "profile_key", "profiles"),
    ):
        for (key,) in database.execute(
            f"SELECT DISTINCT {column} FROM {table} WHERE {column} NOT IN (SELECT {column} FROM {of})"
        ):
            yield f"{table} has a row for {column} {key!r}, {of} has none"
    classes = {key for (key,) in database.execute("SELECT class_key FROM classes")}
    for row in database.execute(
        "SELECT job_id, sequence, phase, fact_count, ending, facts, dispatch, attempts, changes FROM dispatches"
    ):
        job_id = row[0]
        try:
            for problem in _job_problems(*row, classes=classes):
                yield f"job {job_id}: {problem}"
        except (msgspec.MsgspecError, ValueError) as error:
            yield f"job {job_id} cannot be read: {error}"


def _job_problems(
    job_id: str,
    sequence: int,
    phase: str,
    fact_count: int,
    ending: int | None,
    facts: bytes,
    blob: bytes,
    attempts: bytes | None,
    changes: bytes | None,
    *,
    classes: set[str],
) -> Iterator[str]:
    dispatch = codec.decode_dispatch(blob)
    if (dispatch.job_id, dispatch.sequence, dispatch.phase.value) != (job_id, sequence, phase):
        yield "its row and its dispatch say different things"
    if dispatch.phase.is_final != (ending is not None):
        yield f"its phase is {phase}, its end is {ending}"
    if (phase == "leased") != (dispatch.lease is not None):
        yield f"its phase is {phase}, its lease is {dispatch.lease}"
    open_classes = () if dispatch.phase.is_final else (dispatch.class_key, dispatch.relaxed_class)
    for class_key in open_classes:
        if class_key is not None and class_key not in classes:
            yield f"its class {class_key} is not in the table"
    # Facts carry no numbers of their own: they are dense if there are as many as were counted.
    codec.decode_facts(JobId(job_id), fact_count, facts)
    codec.decode_attempts(attempts)
    if changes is not None:
        codec.decode_changes(changes)
