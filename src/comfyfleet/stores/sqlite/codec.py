"""How values become rows and rows values again. What the columns are called is the migrations' business.

A job is kept as it was submitted; what its record says differently by now is a small map beside its dispatch, and its
result stands apart. So a lease neither reads nor writes a payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from comfyfleet.model.block import Block
from comfyfleet.model.dispatch import Attempt, Dispatch
from comfyfleet.model.errors import Refusal, RefusalCode
from comfyfleet.model.fact import Fact, FactKind
from comfyfleet.model.ids import ClassKey, JobId, TenantId, WorkflowHash
from comfyfleet.model.job import Job, JobResult
from comfyfleet.model.lesson import Lesson
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.stores.kept import Entry

EntryRow = tuple[str | None, int, int | None, float | None, bytes, bytes, bytes | None, bytes | None]
"""reference, fact_count, ending, ended_at, dispatch, facts, attempts, changes"""

_CHANGES = msgspec.defstruct(
    "Changes", [(name, kind | UnsetType, UNSET) for name, kind in get_type_hints(Job).items()]
)

_encoder = msgspec.msgpack.Encoder()
_dispatches = msgspec.msgpack.Decoder(Dispatch)
_attempts = msgspec.msgpack.Decoder(tuple[Attempt, ...])
_changes = msgspec.msgpack.Decoder(_CHANGES)
_jobs = msgspec.msgpack.Decoder(Job)
_results = msgspec.msgpack.Decoder(JobResult)
_facts = msgspec.msgpack.Decoder(list[tuple[FactKind, float, int, dict[str, Any] | None]])

encode = _encoder.encode
decode_block = msgspec.msgpack.Decoder(Block).decode
decode_class = msgspec.msgpack.Decoder(RequirementClass).decode
decode_dispatch = _dispatches.decode
decode_lesson = msgspec.msgpack.Decoder(Lesson).decode
decode_worker = msgspec.msgpack.Decoder(WorkerRecord).decode


class SqliteEntry(Entry):
    """A job in memory: neither payload nor result."""

    __slots__ = ("changes", "facts")

    def __init__(self, dispatch: Dispatch, reference: str | None) -> None:
        super().__init__(dispatch, reference)
        self.changes: dict[str, Any] | None = None
        self.facts = b""
        """As they are written: one after the other."""


def encode_or_refuse(value: object) -> bytes:
    """Called before anything is changed: what cannot be written must not be found out by the writer."""
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise Refusal(
            RefusalCode.INVALID_REQUEST,
            f"this cannot be stored: {error}. Values must be plain JSON: text in UTF-8, numbers of 64 bits",
        ) from error


def row_of(entry: SqliteEntry) -> tuple[Any, ...]:
    dispatch = entry.dispatch
    return (
        dispatch.sequence,
        dispatch.job_id,
        dispatch.tenant,
        entry.reference,
        dispatch.phase.value,
        entry.fact_count,
        entry.ending,
        entry.ended_at,
        encode(dispatch),
        entry.facts,
        encode(entry.attempts) if entry.attempts else None,
        None if entry.changes is None else encode(entry.changes),
    )


def entry_of(row: EntryRow, names: dict[str, str]) -> SqliteEntry:
    """`names` makes equal names one object: thousands of waiting jobs share their class, tenant and workflow."""
    reference, fact_count, ending, ended_at, blob, facts, attempts, changes = row
    dispatch = _dispatches.decode(blob)
    share, one = msgspec.structs.force_setattr, names.setdefault
    share(dispatch, "class_key", ClassKey(one(dispatch.class_key, dispatch.class_key)))
    share(dispatch, "workflow_hash", WorkflowHash(one(dispatch.workflow_hash, dispatch.workflow_hash)))
    share(dispatch, "tenant", TenantId(one(dispatch.tenant, dispatch.tenant)))
    entry = SqliteEntry(dispatch, reference)
    entry.facts = facts
    entry.fact_count, entry.ending, entry.ended_at = fact_count, ending, ended_at
    if attempts is not None:
        entry.attempts = _attempts.decode(attempts)
    if changes is not None:
        entry.changes = decode_changes(changes)
    return entry


def decode_attempts(blob: bytes | None) -> list[Attempt]:
    return [] if blob is None else list(_attempts.decode(blob))


def decode_changes(blob: bytes) -> dict[str, Any]:
    changes = _changes.decode(blob)
    return {
        name: value for name in _CHANGES.__struct_fields__ if (value := getattr(changes, name)) is not UNSET
    }


def decode_job(job: bytes, changes: bytes | None, result: bytes | None) -> Job:
    record = _jobs.decode(job)
    if changes is not None:
        record = msgspec.structs.replace(record, **decode_changes(changes))
    if result is not None:
        record = msgspec.structs.replace(record, result=_results.decode(result))
    return record


def encode_facts(facts: Sequence[Fact]) -> bytes:
    return b"".join([encode((fact.kind, fact.at, fact.round, fact.data)) for fact in facts])


def decode_facts(job_id: JobId, count: int, blob: bytes) -> list[Fact]:
    # They were written one by one; with the head of a list of 32 bits before them, they are one.
    parts = _facts.decode(b"\xdd" + count.to_bytes(4, "big") + blob)
    return [
        Fact(job_id, number, kind, at, round_, data)
        for number, (kind, at, round_, data) in enumerate(parts, start=1)
    ]
