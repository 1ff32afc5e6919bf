"""Converts values to rows and back, and puts the rows of each change into a batch. Migrations define the
columns.

The job is stored as submitted. Later changes of its record are a small map beside its dispatch, and its
result has its own table, so a lease neither reads nor writes a payload.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from comfyfleet.model.block import Block, Pair
from comfyfleet.model.dispatch import Attempt, Dispatch
from comfyfleet.model.fact import Fact, FactKind
from comfyfleet.model.ids import ClassKey, JobId, ProfileKey, TenantId, WorkerId, WorkflowHash
from comfyfleet.model.job import Job, JobResult
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.stores.inprocess.queue_state import JobEnd, QueueEntry, QueueState
from comfyfleet.stores.inprocess.store import Area
from comfyfleet.stores.sqlite.writer import Batch

_CHANGES = msgspec.defstruct(
    "Changes", [(name, kind | UnsetType, UNSET) for name, kind in get_type_hints(Job).items()]
)


class RowState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state column of a job; `row_of` writes it as a tuple."""

    dispatch: Dispatch
    reference: str | None
    fact_count: int
    facts: bytes
    """`fact_count` facts, concatenated."""
    attempts: tuple[Attempt, ...]
    changes: bytes | None
    """Changes of the job's record since submission."""

    def job_facts(self) -> list[Fact]:
        # The facts were encoded one by one; the head of an array32 before them makes one list.
        parts = _facts.decode(b"\xdd" + self.fact_count.to_bytes(4, "big") + self.facts)
        return [
            Fact(self.dispatch.job_id, number, kind, at, round_, data)
            for number, (kind, at, round_, data) in enumerate(parts, start=1)
        ]

    def record_changes(self) -> dict[str, Any] | None:
        if self.changes is None:
            return None
        changes = _changes.decode(self.changes)
        values = zip(_CHANGES.__struct_fields__, msgspec.structs.astuple(changes), strict=True)
        return {name: value for name, value in values if value is not UNSET}


_encoder = msgspec.msgpack.Encoder()
_changes = msgspec.msgpack.Decoder(_CHANGES)
_jobs = msgspec.msgpack.Decoder(Job)
_results = msgspec.msgpack.Decoder(JobResult)
_facts = msgspec.msgpack.Decoder(list[tuple[FactKind, float, int, dict[str, Any] | None]])

encode = _encoder.encode
decode_block = msgspec.msgpack.Decoder(Block).decode
decode_class = msgspec.msgpack.Decoder(RequirementClass).decode
decode_workflow_stats = msgspec.msgpack.Decoder(WorkflowStats).decode
decode_state = msgspec.msgpack.Decoder(RowState).decode
decode_worker = msgspec.msgpack.Decoder(WorkerRecord).decode


class SqliteEntry(QueueEntry, kw_only=True, eq=False, gc=False):
    """A job in memory, without payload and result."""

    reference: str | None = None
    changes: dict[str, Any] | None = None
    facts: bytes = b""
    """Encoded facts, concatenated."""


def row_of(entry: SqliteEntry) -> tuple[Any, ...]:
    """A row for the writer's batch: three columns for an open job, six for an ended one."""
    dispatch = entry.dispatch
    changes = None if entry.changes is None else encode(entry.changes)
    state = encode((dispatch, entry.reference, entry.fact_count, entry.facts, entry.attempts, changes))
    if entry.ending is None:
        return dispatch.sequence, dispatch.phase.value, state
    return dispatch.sequence, dispatch.phase.value, *entry.ending, state, apart(dispatch)


def apart(dispatch: Dispatch) -> str | None:
    """The value of the column `apart` for an ended job."""
    if not dispatch.has_tenant_database:
        return None
    return dispatch.job_id if dispatch.settled_at is None else ""


def entry_of(blob: bytes, ending: int | None, ended_at: float | None, names: dict[str, str]) -> SqliteEntry:
    """`names` interns strings: thousands of waiting jobs share class, tenant and workflow."""
    state = decode_state(blob)
    dispatch = state.dispatch
    share, one = msgspec.structs.force_setattr, names.setdefault
    share(dispatch, "class_key", ClassKey(one(dispatch.class_key, dispatch.class_key)))
    share(dispatch, "workflow_hash", WorkflowHash(one(dispatch.workflow_hash, dispatch.workflow_hash)))
    share(dispatch, "tenant", TenantId(one(dispatch.tenant, dispatch.tenant)))
    return SqliteEntry(
        dispatch=dispatch,
        reference=state.reference,
        attempts=state.attempts,
        fact_count=state.fact_count,
        facts=state.facts,
        ending=None if ending is None or ended_at is None else JobEnd(ending, ended_at),
        changes=state.record_changes(),
    )


def decode_job(job: bytes, state: bytes, result: bytes | None) -> Job:
    record = decode_open_job(job, decode_state(state).record_changes())
    if result is not None:
        record = msgspec.structs.replace(record, result=_results.decode(result))
    return record


def decode_open_job(job: bytes, changes: dict[str, Any] | None) -> Job:
    """For a job without a result."""
    record = _jobs.decode(job)
    return record if changes is None else msgspec.structs.replace(record, **changes)


def encode_fact(fact: Fact) -> bytes:
    return encode((fact.kind, fact.at, fact.round, fact.data))


_VERSION = "UPDATE meta SET value = ? WHERE name = 'table_version'"
LEASE_TTL = "lease_ttl_ms"
"""A row of `meta`: the longest lease ever given."""
_FITS = "INSERT OR IGNORE INTO fits VALUES (?, ?)"


# jobs


def insert(batch: Batch, entry: SqliteEntry, job: bytes, facts: Sequence[Fact]) -> None:
    dispatch = entry.dispatch
    batch.added.append((dispatch.sequence, dispatch.job_id, dispatch.tenant, entry.reference, job))
    update(batch, entry, facts)


def update(batch: Batch, entry: SqliteEntry, facts: Sequence[Fact] = ()) -> None:
    for fact in facts:
        entry.facts += encode_fact(fact)
    job_id = entry.dispatch.job_id
    batch.keys[job_id] = None
    batch.rows[job_id] = row_of(entry)


def change_record(batch: Batch, entry: SqliteEntry, changes: dict[str, Any] | None) -> None:
    """A result has its own table: it may be large, and only callers read it."""
    if changes is None:
        return
    if "result" in changes:
        changes = dict(changes)
        result = changes.pop("result")
        batch.results[entry.dispatch.sequence] = None if result is None else encode(result)
    entry.changes = changes if entry.changes is None else {**entry.changes, **changes}


def purge(batch: Batch, job_id: JobId, sequence: int, is_open: bool = False) -> None:
    for table in ("open_jobs" if is_open else "ended_jobs", "jobs", "results"):
        batch.touch(job_id, f"DELETE FROM {table} WHERE sequence = ?", sequence)


def save_sequence(batch: Batch, sequence: int) -> None:
    """Keeps the last sequence number, so that none is used again after a purge."""
    batch.touch(Area.PLACES, "UPDATE meta SET value = ? WHERE name = 'sequence'", sequence)


# eligibility matrix


def put_class(
    batch: Batch,
    cls: RequirementClass,
    fits: Collection[ProfileKey],
    dropped: Collection[ClassKey],
    version: int,
) -> None:
    batch.touch(Area.TABLE, _VERSION, version)
    batch.touch(Area.TABLE, "INSERT OR IGNORE INTO classes VALUES (?, ?)", cls.key, encode(cls))
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


# workers, blocks, statistics


def put_worker(batch: Batch, worker_id: WorkerId, record: bytes) -> None:
    # No REPLACE: a worker keeps its position in the list.
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
            encode(block),
        )
    lift(batch, forgotten)


def lift(batch: Batch, pairs: Iterable[Pair]) -> None:
    for pair in pairs:
        batch.touch(Area.BLOCKS, "DELETE FROM blocks WHERE worker_id = ? AND target = ?", *pair)


def put_workflow_stats(
    batch: Batch, workflow_hash: WorkflowHash, stats: bytes, forgotten: WorkflowHash | None
) -> None:
    batch.touch(Area.WORKFLOW_STATS, "INSERT OR REPLACE INTO lessons VALUES (?, ?)", workflow_hash, stats)
    if forgotten is not None:
        batch.touch(Area.WORKFLOW_STATS, "DELETE FROM lessons WHERE workflow_hash = ?", forgotten)


def save_ttl(batch: Batch, queue: QueueState[SqliteEntry]) -> None:
    """If the commit fails, the next process writes it again."""
    if queue.is_ttl_new:
        queue.is_ttl_new = False
        milliseconds = math.ceil(queue.longest_ttl_s * 1000)
        batch.statements.append(("INSERT OR REPLACE INTO meta VALUES (?, ?)", (LEASE_TTL, milliseconds)))


def pause(batch: Batch, is_paused: bool) -> None:
    batch.touch(Area.PAUSE, "UPDATE meta SET value = ? WHERE name = 'is_paused'", int(is_paused))
