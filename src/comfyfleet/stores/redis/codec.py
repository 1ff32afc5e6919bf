"""Encodes values for the function library and decodes its answers.

Values that the library reads are text or MessagePack, because Lua's JSON rounds times. Values that it only
passes on (payloads, results, facts, workers) are JSON.
"""

from __future__ import annotations

import struct
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
    WriteResult,
)
from comfyfleet.model.fact import Fact, FactDraft, FactKind
from comfyfleet.model.failure import Failure
from comfyfleet.model.ids import JobId, WorkerId
from comfyfleet.model.job import Job, JobResult
from comfyfleet.stores.inprocess.blocks import MAX_PAIRS_PER_WORKER
from comfyfleet.stores.redis.client import Argument
from comfyfleet.stores.redis.dispatches import (
    StoredDispatch,
    as_bytes,
    decode_dispatch,
    decode_kept,
    decode_record,
    encode_dispatch,
    place_at,
    sha256_of,
    text_of_digest,
)

_pack = msgspec.msgpack.encode
_json = msgspec.json.encode

# The server's JSON accepts NaN and text that is not UTF-8.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Large parts of a record have their own keys.
_TEXTS = ("result", "failure")
_TIME = struct.Struct("<d")
_PLACED = struct.Struct("<ddd")
_META = struct.Struct("<16d")


class RecordFields(msgspec.Struct, frozen=True, omit_defaults=True):
    """The small parts of a job's record that change, except its phase."""

    round: int = 1
    worker_id: WorkerId | None = None
    prompt_id: str | None = None
    started_at: float | None = None
    completed_at: float | None = None
    is_late: bool = False
    priority: int | None = None


class _Line(msgspec.Struct, frozen=True):
    """A fact in its job's log. The first is number 1."""

    kind: FactKind
    at: float
    round: int
    data: dict[str, Any] | None = None


class _Begun(msgspec.Struct, frozen=True):
    """The start of an attempt in its job's log. It also stands for the fact that the job was leased."""

    worker_id: WorkerId
    lease_number: int
    round: int
    started_at: float
    attempt: int | None = None
    """None: the fact has its own line, as in a log from another store."""


class _Ended(msgspec.Struct, frozen=True):
    lease_number: int
    ended_at: float
    end: AttemptEnd


class _Late(msgspec.Struct, frozen=True):
    lease_number: int


class FleetHead(msgspec.Struct, frozen=True):
    """The fields of a fleet's head that are used here."""

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
    payload_bytes: int


_records = msgspec.msgpack.Decoder(RecordFields)
_jobs = msgspec.json.Decoder(Job)
_results = msgspec.json.Decoder(JobResult)
_failures = msgspec.json.Decoder(Failure)
_facts = msgspec.json.Decoder(_Line)
_attempts = msgspec.json.Decoder(Attempt)
_beginnings = msgspec.json.Decoder(_Begun)
_ends = msgspec.json.Decoder(_Ended)
_lates = msgspec.json.Decoder(_Late)
_blocks = msgspec.json.Decoder(Block)
_RECORD = frozenset(RecordFields.__struct_fields__)
_WRITABLE = _RECORD | {"phase"}
_FRESH = {
    "phase": Phase.QUEUED,
    **{name: getattr(RecordFields(), name) for name in _RECORD},
    **dict.fromkeys(_TEXTS),
}
_NO_RECORD = _pack(RecordFields())
_CHANGEABLE = tuple(zip(Change.__struct_fields__, Change.__struct_encode_fields__, strict=True))
_ENDINGS = {
    phase: Change(phase=phase, lease=None, wake_at=None)
    for phase in (Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED)
}


def as_list(value: object) -> list[object]:
    assert isinstance(value, list), f"the library answered {type(value).__name__} instead of a list"
    return value


def decode_head(value: object) -> FleetHead:
    text = as_bytes(value)
    numbers = _META.unpack_from(text)
    # Before revision 6 the head ended with the run.
    _, _, payload_bytes = text[_META.size :].partition(b"\0")
    counts = (*(int(number) for number in numbers[7:15]), int(payload_bytes or 0))
    return FleetHead(int(numbers[0]), bool(numbers[5]), *counts)


# calls


def encode_enqueue(dispatch: Dispatch, job: Job, facts: Sequence[FactDraft]) -> list[str | bytes]:
    record = encode_record(job)
    texts = [(name, value) for name in _TEXTS if (value := getattr(job, name)) is not None]
    is_fresh = not record and not texts and job.phase is Phase.QUEUED
    is_plain = dispatch.stands_in_lane and dispatch.wake_at is None and dispatch.relaxed_class is None
    workflow_hash, reference = dispatch.workflow_hash, job.reference
    payload = _json(job) if is_fresh else encode_payload(job)
    text = encode_dispatch(dispatch, job.phase, record, reference, payload)
    arguments: list[str | bytes] = [
        dispatch.job_id,
        text,
        dispatch.class_key,
        f"{dispatch.priority} {len(workflow_hash.encode())} {workflow_hash}{dispatch.tenant}",
        payload,
        f"{dispatch.tenant}\0{reference}" if reference else "",
        f"{f'1 {dispatch.payload_bytes}' if is_plain else '0 0'} {place_at(text)}",
        str(2 * len(texts)),
    ]
    for name, value in texts:
        arguments += (name, _json(value))
    return arguments + _pieces(facts, dispatch.round)


def encode_record(job: Job) -> bytes:
    """The changed small parts of the record, or nothing."""
    record = _pack(
        RecordFields(
            job.round,
            job.worker_id,
            job.prompt_id,
            job.started_at,
            job.completed_at,
            job.is_late,
            job.priority,
        )
    )
    return b"" if record == _NO_RECORD else record


def encode_payload(job: Job) -> bytes:
    """The record without its changing parts, which are in the dispatch and in keys of their own."""
    return _json(msgspec.structs.replace(job, **_FRESH))


def decode_enqueued(answer: object, dispatch: Dispatch, facts: Sequence[FactDraft]) -> WriteResult | None:
    match answer:
        case None:
            return None
        case [known]:
            return WriteResult(decode_dispatch(known), ())
    sequence, now, place = _PLACED.unpack(as_bytes(answer))
    placed = msgspec.structs.replace(dispatch, sequence=int(sequence), place=int(place))
    return WriteResult(placed, _numbered(placed, 0, now, facts))


def _lines(facts: Sequence[FactDraft], round_text: str) -> str:
    """Log lines. The library replaces \\1 by the time and \\2 by the round; neither occurs in JSON."""
    return "".join(
        [
            f'f{{"kind":"{draft.kind}","at":\1,"round":{round_text}}}\n'
            if draft.data is None
            else f'f{{"kind":"{draft.kind}","at":\1,"round":{round_text},"data":{_json(draft.data).decode()}}}\n'
            for draft in facts
        ]
    )


def _pieces(facts: Sequence[FactDraft], number_of_round: int) -> list[str]:
    """Log lines in pieces. The library puts the time between them."""
    return _lines(facts, str(number_of_round)).split("\1")


def encode_offer(offer: LeaseOffer) -> tuple[str, str, str, str, str]:
    seconds = f"{offer.acknowledge_s!r} {offer.charge_s!r} {offer.run_s!r} {offer.load_s!r}"
    return (offer.worker_id, offer.profile, offer.poll_id, offer.token, seconds)


def encode_ref(ref: LeaseRef) -> tuple[str, int, int, int, str]:
    return (ref.job_id, ref.round, ref.number, ref.epoch, _plain(ref.token))


def _plain(token: str) -> str:
    # Clients may send anything, even invalid text.
    return token if token.isascii() else token.encode(errors="replace").decode()


def encode_finish(write: Write) -> tuple[Argument, ...] | None:
    """For a write that only ends a lease and its job. None: this write does more or less."""
    guard, end, job = write.guard, write.attempt_end, write.job
    phase = write.change.phase
    if not isinstance(phase, Phase) or write.change != _ENDINGS.get(phase):
        return None
    if end is None or job is None or write.blocks or write.lifted or not isinstance(guard, HeldBy):
        return None
    record: dict[str, Any] = {}
    record_phase, result, forgets = None, b"", "0"
    for name, value in job.items():
        if name == "phase":
            record_phase = value
        elif name == "failure" and value is None:
            forgets = "1"
        elif name == "result" and value is not None:
            result = _json(value)
        elif name in _RECORD and value is not None:
            record[name] = value
        else:
            return None
    if record_phase is None:
        return None
    ref = guard.ref
    return (
        ref.job_id,
        ref.round,
        ref.number,
        ref.epoch,
        _plain(ref.token),
        phase.value,
        _json(end),
        record_phase.value,
        _pack(record) if record else b"",
        result,
        forgets,
        *_pieces(write.facts, ref.round),
    )


def encode_write(write: Write, payload: bytes | None = None) -> bytes:
    """`payload` replaces the submitted payload."""
    change, job = write.change, write.job
    assert change.lease is UNSET or change.lease is None, "a write ends a lease; only a lease begins one"
    changed = {stored: value for name, stored in _CHANGEABLE if (value := getattr(change, name)) is not UNSET}
    if isinstance(change.payload_sha256, bytes):
        changed["payload_sha256"] = text_of_digest(change.payload_sha256)
    record: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    if job:
        record = {name: value for name, value in job.items() if name not in _TEXTS and name != "payload"}
        assert record.keys() <= _WRITABLE, f"a write cannot change {record.keys() - _WRITABLE} of a job"
        texts = {name: job[name] and _json(job[name]).decode() for name in _TEXTS if name in job}
    if payload is not None:
        texts["payload"] = payload.decode()
        changed["record_sha256"] = sha256_of(payload)
    guard: int | tuple[int, int, int, str]
    match write.guard:
        case HeldBy(ref):
            guard = (ref.round, ref.number, ref.epoch, _plain(ref.token))
        case AtRevision(revision):
            guard = revision
    end = write.attempt_end
    return _pack(
        (
            write.job_id,
            guard,
            *_split(changed),
            end is not None and _json(end).decode(),
            *_split(record),
            *_split(texts),
            _lines(write.facts, "\2") or False,
            [_block_parts(block) for block in write.blocks] or False,
            write.lifted or False,
        )
    )


def _split(values: dict[str, Any]) -> tuple[dict[str, Any] | bool, list[str] | bool]:
    """Fields to set and to drop: MessagePack in Lua has no nil. An empty tuple is a default, too."""
    if not values:
        return False, False
    kept = {name: value for name, value in values.items() if value is not None and value != ()}
    return kept or False, len(kept) < len(values) and [name for name in values if name not in kept]


def decode_written(answer: object, drafts: Sequence[FactDraft]) -> WriteResult | None:
    if answer is None:
        return None
    data = as_bytes(answer)
    return _written(decode_kept(data, _TIME.size), _TIME.unpack_from(data)[0], drafts)


def decode_finished(answer: object, drafts: Sequence[FactDraft]) -> WriteResult | None:
    if answer is None:
        return None
    kept = decode_kept(as_bytes(answer), 0)
    return _written(kept, kept.ended_at, drafts)


def _written(kept: StoredDispatch, now: float, drafts: Sequence[FactDraft]) -> WriteResult:
    return WriteResult(kept.dispatch, _numbered(kept.dispatch, kept.facts - len(drafts), now, drafts))


def _numbered(dispatch: Dispatch, before: int, now: float, drafts: Sequence[FactDraft]) -> tuple[Fact, ...]:
    return tuple(
        [
            Fact(dispatch.job_id, number, draft.kind, now, dispatch.round, draft.data)
            for number, draft in enumerate(drafts, start=before + 1)
        ]
    )


def decode_leased(answer: object) -> WriteResult | None:
    if answer is None:
        return None
    kept = decode_kept(as_bytes(answer), 0)
    return WriteResult(kept.dispatch, (_fact_of_lease(kept.dispatch, kept.facts),))


def _fact_of_lease(dispatch: Dispatch, number: int) -> Fact:
    lease = dispatch.lease
    assert lease is not None, "the library answers a job it has just leased"
    data = {"worker_id": lease.worker_id, "lease": lease.number, "attempt": dispatch.attempts}
    return Fact(dispatch.job_id, number, FactKind.LEASED, lease.leased_at, dispatch.round, data)


# blocks


def _block_parts(block: Block) -> tuple[str, str, float | bool, str, int]:
    until = False if block.blocked_until is None else block.blocked_until
    # JSON has no infinity, so the end is on its own line before it.
    rest = _json(msgspec.structs.replace(block, blocked_until=None)).decode()
    return (block.worker_id, block.target, until, f"{block.blocked_until}\n{rest}", MAX_PAIRS_PER_WORKER)


def encode_block(block: Block) -> bytes:
    return _pack(_block_parts(block))


def decode_block(value: object) -> Block:
    until, _, rest = as_bytes(value).partition(b"\n")
    return msgspec.structs.replace(
        _blocks.decode(rest), blocked_until=None if until == b"None" else float(until)
    )


# jobs, facts, attempts


def decode_job(row: Sequence[object]) -> Job:
    """From the dispatch, the payload, the result and the failure."""
    kept, payload, result, failure = row
    phase, text = decode_record(kept)
    record = _records.decode(text) if text else RecordFields()
    return msgspec.structs.replace(
        _jobs.decode(as_bytes(payload)),
        result=None if result is None else _result(as_bytes(result)),
        failure=None if failure is None else _failures.decode(as_bytes(failure)),
        phase=phase,
        **{name: getattr(record, name) for name in _RECORD},
    )


def _result(text: bytes) -> JobResult:
    try:
        return _results.decode(text)
    except UNREADABLE:
        # A direct worker in another language may send other forms, or no valid JSON. Show the text as it is.
        return JobResult(outputs={"": _shown(text)})


def _shown(text: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE:
        return {"text": text.decode(errors="replace")}


def decode_facts(job_id: JobId, row: Sequence[object], after: int) -> list[Fact]:
    """From the dispatch and the log."""
    kept, lines = row[0], _lines_of(row[1])
    facts = [fact for line in lines if (fact := _decode_fact(job_id, line)) is not None]
    if kept is not None and (running := decode_kept(as_bytes(kept), 0)).is_unnoted:
        facts.append(_fact_of_lease(running.dispatch, 0))
    return [msgspec.structs.replace(fact, number=at) for at, fact in enumerate(facts, start=1)][after:]


def _lines_of(log: object) -> list[bytes]:
    return [] if log is None else as_bytes(log).splitlines()


def _decode_fact(job_id: JobId, line: bytes) -> Fact | None:
    if line[:1] == b"f":
        fact = _facts.decode(line[1:])
        return Fact(job_id, 0, fact.kind, fact.at, fact.round, fact.data)
    if line[:1] != b"a" or (begun := _beginnings.decode(line[1:])).attempt is None:
        return None
    data = {"worker_id": begun.worker_id, "lease": begun.lease_number, "attempt": begun.attempt}
    return Fact(job_id, 0, FactKind.LEASED, begun.started_at, begun.round, data)


def decode_attempts(row: Sequence[object]) -> list[Attempt]:
    """From the dispatch and the log."""
    kept, lines = row[0], _lines_of(row[1])
    attempts: dict[int, Attempt] = {}
    for line in lines:
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
    if kept is not None and (running := decode_kept(as_bytes(kept), 0)).is_unnoted:
        ref, lease = running.dispatch.lease_ref(), running.dispatch.lease
        assert lease is not None, "only a lease is missing in the log"
        begun = Attempt(ref.attempt_id, lease.worker_id, ref.number, ref.round, lease.leased_at)
        attempts[ref.number] = begun
    return list(attempts.values())
