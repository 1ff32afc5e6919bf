"""What each change writes: functions that put rows into a batch. They neither decide nor read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.fact import Fact
from comfyfleet.model.ids import ClassKey, JobId, ProfileKey, WorkerId, WorkflowHash
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.stores.kept import Kept
from comfyfleet.stores.sqlite import codec
from comfyfleet.stores.sqlite.codec import SqliteEntry
from comfyfleet.stores.sqlite.writer import Area, Batch

_VERSION = "UPDATE meta SET value = ? WHERE name = 'table_version'"
LEASE_TTL = "lease_ttl_ms"
"""The longest for which a lease was ever given: a row of `meta`."""
_FITS = "INSERT OR IGNORE INTO fits VALUES (?, ?)"


# jobs


def insert(batch: Batch, entry: SqliteEntry, job: bytes, facts: Sequence[Fact]) -> None:
    dispatch = entry.dispatch
    batch.added.append((dispatch.sequence, dispatch.job_id, dispatch.tenant, entry.reference, job))
    update(batch, entry, facts)


def update(batch: Batch, entry: SqliteEntry, facts: Sequence[Fact] = ()) -> None:
    for fact in facts:
        entry.facts += codec.encode_fact(fact)
    job_id = entry.dispatch.job_id
    batch.keys[job_id] = None
    batch.rows[job_id] = codec.row_of(entry)


def change_record(batch: Batch, entry: SqliteEntry, changes: dict[str, Any] | None) -> None:
    """The result goes its own way: it may be large, and nothing but a caller reads it."""
    if changes is None:
        return
    if "result" in changes:
        changes = dict(changes)
        result = changes.pop("result")
        batch.results[entry.dispatch.sequence] = None if result is None else codec.encode(result)
    entry.changes = changes if entry.changes is None else {**entry.changes, **changes}


def purge(batch: Batch, job_id: JobId, sequence: int, is_open: bool = False) -> None:
    for table in ("open_jobs" if is_open else "ended_jobs", "jobs", "results"):
        batch.touch(job_id, f"DELETE FROM {table} WHERE sequence = ?", sequence)


def keep_place(batch: Batch, sequence: int) -> None:
    """No place in line is given twice, though the last job that had one is purged."""
    batch.touch(Area.PLACES, "UPDATE meta SET value = ? WHERE name = 'sequence'", sequence)


# the table profile × class


def put_class(
    batch: Batch,
    cls: RequirementClass,
    fits: Collection[ProfileKey],
    dropped: Collection[ClassKey],
    version: int,
) -> None:
    batch.touch(Area.TABLE, _VERSION, version)
    batch.touch(Area.TABLE, "INSERT OR IGNORE INTO classes VALUES (?, ?)", cls.key, codec.encode(cls))
    for profile in fits:
        batch.touch(Area.TABLE, _FITS, cls.key, profile)
    for class_key in dropped:
        batch.touch(Area.TABLE, "DELETE FROM classes WHERE class_key = ?", class_key)
        batch.touch(Area.TABLE, "DELETE FROM fits WHERE class_key = ?", class_key)


def put_profile(batch: Batch, profile: ProfileKey, fits: Collection[ClassKey], version: int) -> None:
    batch.touch(Area.TABLE, _VERSION, version)
    batch.touch(Area.TABLE, "INSERT OR IGNORE INTO profiles VALUES (?)", profile)
    for class_key in fits:
        batch.touch(Area.TABLE, _FITS, class_key, profile)


def drop_profile(batch: Batch, profile: ProfileKey) -> None:
    batch.touch(Area.TABLE, "DELETE FROM profiles WHERE profile_key = ?", profile)
    batch.touch(Area.TABLE, "DELETE FROM fits WHERE profile_key = ?", profile)


# the rest


def put_worker(batch: Batch, worker_id: WorkerId, record: bytes) -> None:
    # Not a replace: a worker keeps its place in the list.
    batch.touch(
        Area.WORKERS,
        "INSERT INTO workers VALUES (?, ?) ON CONFLICT (worker_id) DO UPDATE SET record = excluded.record",
        worker_id,
        record,
    )


def remove_worker(batch: Batch, worker_id: WorkerId) -> None:
    batch.touch(Area.WORKERS, "DELETE FROM workers WHERE worker_id = ?", worker_id)
    batch.touch(Area.BLOCKS, "DELETE FROM blocks WHERE worker_id = ?", worker_id)


def put_blocks(batch: Batch, blocks: Iterable[Block], forgotten: Iterable[Pair]) -> None:
    for block in blocks:
        batch.touch(
            Area.BLOCKS,
            "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)",
            block.worker_id,
            block.target,
            codec.encode(block),
        )
    lift(batch, forgotten)


def lift(batch: Batch, pairs: Iterable[Pair]) -> None:
    for pair in pairs:
        batch.touch(Area.BLOCKS, "DELETE FROM blocks WHERE worker_id = ? AND target = ?", *pair)


def put_lesson(
    batch: Batch, workflow_hash: WorkflowHash, lesson: bytes, forgotten: WorkflowHash | None
) -> None:
    batch.touch(Area.LESSONS, "INSERT OR REPLACE INTO lessons VALUES (?, ?)", workflow_hash, lesson)
    if forgotten is not None:
        batch.touch(Area.LESSONS, "DELETE FROM lessons WHERE workflow_hash = ?", forgotten)


def note_ttl(batch: Batch, kept: Kept[SqliteEntry]) -> None:
    """What is lost of it with a commit that fails is said again by the next process."""
    if kept.is_ttl_new:
        kept.is_ttl_new = False
        milliseconds = math.ceil(kept.longest_ttl_s * 1000)
        batch.statements.append(("INSERT OR REPLACE INTO meta VALUES (?, ?)", (LEASE_TTL, milliseconds)))


def pause(batch: Batch, is_paused: bool) -> None:
    batch.touch(Area.PAUSE, "UPDATE meta SET value = ? WHERE name = 'is_paused'", int(is_paused))
