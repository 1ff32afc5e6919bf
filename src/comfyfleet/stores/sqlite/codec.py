"""How values become rows and rows values again. What the columns are called is the migrations' business.

A job is kept as it was submitted; what its record says differently by now is a small map beside its dispatch, and its
result stands apart. So a lease neither reads nor writes a payload.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from comfyfleet.model.block import Block
from comfyfleet.model.dispatch import Attempt, Dispatch
from comfyfleet.model.fact import Fact, FactKind
from comfyfleet.model.ids import ClassKey, TenantId, WorkflowHash
from comfyfleet.model.job import Job, JobResult
from comfyfleet.model.lesson import Lesson
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.stores.kept import Ending, Entry

_CHANGES = msgspec.defstruct(
    "Changes", [(name, kind | UnsetType, UNSET) for name, kind in get_type_hints(Job).items()]
)


class State(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a row says of a job beside what its columns do; written as the tuple that `row_of` makes."""

    dispatch: Dispatch
    reference: str | None
    fact_count: int
    facts: bytes
    """One after the other; there are `fact_count` of them."""
    attempts: tuple[Attempt, ...]
    changes: bytes | None
    """What the job's record says differently by now."""

    def job_facts(self) -> list[Fact]:
        # They were written one by one; with the head of a list of 32 bits before them, they are one.
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
decode_lesson = msgspec.msgpack.Decoder(Lesson).decode
decode_state = msgspec.msgpack.Decoder(State).decode
decode_worker = msgspec.msgpack.Decoder(WorkerRecord).decode


class SqliteEntry(Entry, kw_only=True, eq=False, gc=False):
    """A job in memory: neither payload nor result."""

    reference: str | None = None
    changes: dict[str, Any] | None = None
    facts: bytes = b""
    """As they are written: one after the other."""


def row_of(entry: SqliteEntry) -> tuple[Any, ...]:
    """As the writer's batch takes it: three columns of an open job, six of one that has ended."""
    dispatch = entry.dispatch
    changes = None if entry.changes is None else encode(entry.changes)
    state = encode((dispatch, entry.reference, entry.fact_count, entry.facts, entry.attempts, changes))
    if entry.ending is None:
        return dispatch.sequence, dispatch.phase.value, state
    return dispatch.sequence, dispatch.phase.value, *entry.ending, state, apart(dispatch)


def apart(dispatch: Dispatch) -> str | None:
    """What the column of this name says of a job that has ended."""
    if not dispatch.is_apart:
        return None
    return dispatch.job_id if dispatch.settled_at is None else ""


def entry_of(blob: bytes, ending: int | None, ended_at: float | None, names: dict[str, str]) -> SqliteEntry:
    """`names` makes equal names one object: thousands of waiting jobs share their class, tenant and workflow."""
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
        ending=None if ending is None or ended_at is None else Ending(ending, ended_at),
        changes=state.record_changes(),
    )


def decode_job(job: bytes, state: bytes, result: bytes | None) -> Job:
    record = decode_open_job(job, decode_state(state).record_changes())
    if result is not None:
        record = msgspec.structs.replace(record, result=_results.decode(result))
    return record


def decode_open_job(job: bytes, changes: dict[str, Any] | None) -> Job:
    """One that has no result."""
    record = _jobs.decode(job)
    return record if changes is None else msgspec.structs.replace(record, **changes)


def encode_fact(fact: Fact) -> bytes:
    return encode((fact.kind, fact.at, fact.round, fact.data))
