"""Values of the model as the function library takes and keeps them, and back.

Dispatches travel as MessagePack, because the library looks into them and Lua's JSON would round their times; what it
only passes on (payloads, results, facts, workers) is JSON that any reader understands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from comfyfleet.model.block import Block
from comfyfleet.model.dispatch import (
    AtRevision,
    Attempt,
    AttemptEnd,
    Change,
    Dispatch,
    HeldBy,
    LeaseOffer,
    LeaseRef,
    Phase,
    Write,
    Written,
)
from comfyfleet.model.fact import Fact, FactDraft, FactKind
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.job import Job, JobResult
from comfyfleet.stores.shelf import MAX_PAIRS_PER_WORKER

_pack = msgspec.msgpack.encode
_json = msgspec.json.encode

# Large parts of a record stand in keys of their own.
_TEXTS = ("result", "failure")
# What the library reads of every dispatch is always said, though it be the default.
_ALWAYS = ("tenant", "round", "revision", "phase", "standing", "lease_number", "attempts")


class Record(msgspec.Struct, frozen=True):
    """The small parts of a job's record that change."""

    phase: Phase = Phase.QUEUED
    round: int = 1
    worker_id: WorkerId | None = None
    prompt_id: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    is_late: bool = False
    priority: int | None = None


class _Kept(msgspec.Struct, frozen=True):
    record: Record


class _Line(msgspec.Struct, frozen=True):
    """A fact in the log of its job."""

    number: int
    kind: FactKind
    at: float
    round: int
    data: dict[str, Any] | None = None


class _Ended(msgspec.Struct, frozen=True):
    lease_number: int
    ended_at: float
    end: AttemptEnd


class _Late(msgspec.Struct, frozen=True):
    lease_number: int


class Head(msgspec.Struct, frozen=True):
    """The head of a fleet, as far as it is of interest here."""

    epoch: int
    is_paused: bool
    queued: int
    leased: int
    completed: int
    failed: int
    cancelled: int
    in_lane: int
    delayed: int
    paused: int


_dispatches = msgspec.msgpack.Decoder(Dispatch)
_kept = msgspec.msgpack.Decoder(_Kept)
_heads = msgspec.msgpack.Decoder(Head)
_jobs = msgspec.json.Decoder(Job)
_results = msgspec.json.Decoder(JobResult)
_failures = msgspec.json.Decoder(Failure)
_facts = msgspec.json.Decoder(_Line)
_attempts = msgspec.json.Decoder(Attempt)
_ends = msgspec.json.Decoder(_Ended)
_lates = msgspec.json.Decoder(_Late)
_blocks = msgspec.json.Decoder(Block)
_RECORD = frozenset(Record.__struct_fields__)
_FRESH = {**{name: getattr(Record(), name) for name in _RECORD}, **dict.fromkeys(_TEXTS)}


def as_bytes(value: object) -> bytes:
    assert isinstance(value, bytes), f"the library answered {type(value).__name__} instead of text"
    return value


def as_list(value: object) -> list[object]:
    assert isinstance(value, list), f"the library answered {type(value).__name__} instead of a list"
    return value


# dispatches, offers, writes


def decode_dispatch(value: object) -> Dispatch:
    return _dispatches.decode(as_bytes(value))


def decode_head(value: object) -> Head:
    return _heads.decode(as_bytes(value))


def encode_enqueue(dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> list[str | bytes]:
    arguments: list[str | bytes] = [*encode_kept(dispatch, job, 0)]
    arguments += [job.reference or "", _pack(_drafts(facts))]
    for name in _TEXTS:
        if (value := getattr(job, name)) is not None:
            arguments += [name, _json(value)]
    return arguments


def encode_kept(dispatch: Dispatch, job: Job, fact_count: int) -> tuple[bytes, bytes]:
    """A job as the library keeps it: the dispatch with the small parts of its record, and the payload."""
    kept: dict[str, Any] = msgspec.to_builtins(dispatch)
    for name in _ALWAYS:
        kept[name] = getattr(dispatch, name)
    kept["facts"] = fact_count
    kept["record"] = {name: value for name in _RECORD if (value := getattr(job, name)) is not None}
    if job.reference is not None:
        kept["reference"] = job.reference
    return _pack(kept), encode_payload(job)


def encode_payload(job: Job) -> bytes:
    """The record without what changes: that stands with the dispatch and in texts of its own."""
    return _json(msgspec.structs.replace(job, **_FRESH))


def _drafts(facts: Sequence[FactDraft]) -> list[tuple[str, str]]:
    return [(draft.kind.value, "" if draft.data is None else _json(draft.data).decode()) for draft in facts]


def encode_offer(offer: LeaseOffer) -> bytes:
    return _pack(offer)


def encode_ref(ref: LeaseRef) -> bytes:
    return _pack(_plain(ref))


def _plain(ref: LeaseRef) -> dict[str, Any]:
    # What a stranger sends may be anything, even text that is no text.
    token = ref.token.encode(errors="replace").decode()
    return {
        "job_id": ref.job_id,
        "round": ref.round,
        "number": ref.number,
        "epoch": ref.epoch,
        "token": token,
    }


def encode_write(write: Write, payload: bytes | None = None) -> bytes:
    """`payload` is the text that takes the place of the one the job was submitted with."""
    message: dict[str, Any] = {"job_id": write.job_id}
    change = {name: value for name in _CHANGEABLE if (value := getattr(write.change, name)) is not UNSET}
    # MessagePack in Lua knows no nil in a map, and an empty tuple is every field's default.
    _split(message, "set", "drop", change)
    if write.job:
        record = {name: value for name, value in write.job.items() if name != "payload"}
        texts = {name: record.pop(name) for name in _TEXTS if name in record}
        assert record.keys() <= _RECORD, f"a write cannot change {record.keys() - _RECORD} of a job"
        _split(message, "record", "record_drop", record)
        texts = {name: value and _json(value).decode() for name, value in texts.items()}
        if payload is not None:
            texts["payload"] = payload.decode()
        _split(message, "texts", "texts_drop", texts)
    if write.facts:
        message["facts"] = _drafts(write.facts)
    if write.blocks:
        message["blocks"] = [_block_parts(block) for block in write.blocks]
    if write.lifted:
        message["lifted"] = list(write.lifted)
    match write.guard:
        case HeldBy(ref):
            message["ref"] = _plain(ref)
        case AtRevision(revision):
            message["revision"] = revision
    if write.attempt_end is not None:
        message["ended"] = _json(write.attempt_end).decode()
    return _pack(message)


def _split(message: dict[str, Any], to_set: str, to_drop: str, values: dict[str, Any]) -> None:
    kept = {name: value for name, value in values.items() if value is not None and value != ()}
    if kept:
        message[to_set] = kept
    if len(kept) < len(values):
        message[to_drop] = [name for name in values if name not in kept]


_CHANGEABLE: tuple[str, ...] = Change.__struct_fields__


def decode_written(answer: object, drafts: Sequence[FactDraft]) -> Written | None:
    if answer is None:
        return None
    text, before, at = as_list(answer)
    dispatch = decode_dispatch(text)
    assert isinstance(before, int)
    if before < 0:
        return Written(dispatch, ())
    now = float(as_bytes(at))
    facts = tuple(
        Fact(dispatch.job_id, before + place, draft.kind, now, dispatch.round, draft.data)
        for place, draft in enumerate(drafts, start=1)
    )
    return Written(dispatch, facts)


def decode_leased(answer: object, offer: LeaseOffer) -> Written | None:
    if answer is None:
        return None
    dispatch = decode_dispatch(as_list(answer)[0])
    data = {"worker_id": offer.worker_id, "lease": dispatch.lease_number, "attempt": dispatch.attempts}
    return decode_written(answer, (FactDraft(FactKind.LEASED, data),))


# blocks


def _block_parts(block: Block) -> tuple[str, str, float | bool, str, int]:
    until = False if block.blocked_until is None else block.blocked_until
    # JSON has no word for "for ever", so the end stands before it, on a line of its own.
    rest = _json(msgspec.structs.replace(block, blocked_until=None)).decode()
    return (block.worker_id, block.target, until, f"{block.blocked_until}\n{rest}", MAX_PAIRS_PER_WORKER)


def encode_block(block: Block) -> bytes:
    return _pack(_block_parts(block))


def decode_block(value: object) -> Block:
    until, _, rest = as_bytes(value).partition(b"\n")
    return msgspec.structs.replace(
        _blocks.decode(rest), blocked_until=None if until == b"None" else float(until)
    )


# what is kept with a job


def decode_job(row: Sequence[object]) -> Job:
    """From the dispatch, the payload, the result and the failure."""
    kept, payload, result, failure = row
    record = _kept.decode(as_bytes(kept)).record
    return msgspec.structs.replace(
        _jobs.decode(as_bytes(payload)),
        result=None if result is None else _result(as_bytes(result)),
        failure=None if failure is None else _failures.decode(as_bytes(failure)),
        **{name: getattr(record, name) for name in _RECORD},
    )


def _result(text: bytes) -> JobResult:
    try:
        return _results.decode(text)
    except msgspec.ValidationError:
        # Of a worker in another language: an object, but not of our form. It is shown as it is.
        return JobResult(outputs={"": msgspec.json.decode(text, type=dict[str, Any])})


def decode_facts(job_id: JobId, log: object, after: int) -> list[Fact]:
    lines = [] if log is None else as_bytes(log).splitlines()
    told = [_facts.decode(line[1:]) for line in lines if line[:1] == b"f"]
    return [Fact(job_id, each.number, each.kind, each.at, each.round, each.data) for each in told[after:]]


def decode_attempts(log: object) -> list[Attempt]:
    attempts: dict[int, Attempt] = {}
    for line in [] if log is None else as_bytes(log).splitlines():
        match line[:1]:
            case b"a":
                attempt = _attempts.decode(line[1:])
                attempts[attempt.lease_number] = attempt
            case b"e":
                ended = _ends.decode(line[1:])
                attempts[ended.lease_number] = msgspec.structs.replace(
                    attempts[ended.lease_number],
                    outcome=ended.end.outcome,
                    ended_at=ended.ended_at,
                    charged_to=ended.end.charged_to,
                    failure=ended.end.failure,
                )
            case b"l":
                late = _lates.decode(line[1:]).lease_number
                attempts[late] = msgspec.structs.replace(attempts[late], reported_late=True)
    return list(attempts.values())
