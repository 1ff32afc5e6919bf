"""How values of the model are written into `json` columns and read back. Exact: what comes out equals what went in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from comfyfleet.model.block import Block
from comfyfleet.model.dispatch import Attempt, Dispatch, Phase
from comfyfleet.model.fact import Fact, FactKind
from comfyfleet.model.ids import JobId
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.lesson import Lesson
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord

_ENCODER = msgspec.json.Encoder()
_NO_PAYLOAD = Submission({})

decode_dispatch = msgspec.json.Decoder(Dispatch).decode
decode_attempt = msgspec.json.Decoder(Attempt).decode
decode_block = msgspec.json.Decoder(Block).decode
decode_lesson = msgspec.json.Decoder(Lesson).decode
decode_class = msgspec.json.Decoder(RequirementClass).decode
decode_worker = msgspec.json.Decoder(WorkerRecord).decode
_decode_record = msgspec.json.Decoder(Job).decode
_decode_payload = msgspec.json.Decoder(Submission).decode
_decode_result = msgspec.json.Decoder(JobResult).decode
_decode_data = msgspec.json.Decoder(dict[str, Any]).decode


def encode(value: Any) -> str:
    return _ENCODER.encode(value).decode()


def encode_or_none(value: Any) -> str | None:
    return None if value is None else encode(value)


def encode_record(job: Job) -> str:
    """A job without what may be large: payload and result have columns of their own."""
    return encode(msgspec.structs.replace(job, payload=_NO_PAYLOAD, result=None, phase=Phase.QUEUED))


def decode_record(record: str, phase: str) -> Job:
    return msgspec.structs.replace(_decode_record(record), phase=Phase(phase))


def decode_job(record: str, payload: str, result: str | None, phase: str) -> Job:
    return msgspec.structs.replace(
        _decode_record(record),
        payload=_decode_payload(payload),
        result=None if result is None else _decode_result(result),
        phase=Phase(phase),
    )


def fact_row(fact: Fact) -> tuple[object, ...]:
    return fact.job_id, fact.number, fact.kind.value, fact.at, fact.round, encode_or_none(fact.data)


def decode_fact(row: Sequence[Any]) -> Fact:
    job_id, number, kind, at, round_, data = row
    return Fact(
        JobId(job_id), number, FactKind(kind), at, round_, None if data is None else _decode_data(data)
    )
