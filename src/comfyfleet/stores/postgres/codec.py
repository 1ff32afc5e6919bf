"""Encodes values for `json` columns and decodes them without loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from comfyfleet.model.block import Block
from comfyfleet.model.dispatch import Attempt, Dispatch, Phase
from comfyfleet.model.fact import Fact, FactKind
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.requirement import RequirementClass
from comfyfleet.model.worker import WorkerRecord
from comfyfleet.model.workflow_stats import WorkflowStats

_ENCODER = msgspec.json.Encoder()
_NO_PAYLOAD = Submission({})
_COLUMNS = ("job_id", "tenant", "reference", "payload", "result", "phase")
_RECORD_FIELDS = tuple(name for name in Job.__struct_fields__ if name not in _COLUMNS)
_Record = msgspec.defstruct(
    "Record",
    [
        (each.name, each.type) if each.required else (each.name, each.type, each.default)
        for each in msgspec.structs.fields(Job)
        if each.name in _RECORD_FIELDS
    ],
    omit_defaults=True,
)

decode_dispatch = msgspec.json.Decoder(Dispatch).decode
decode_attempt = msgspec.json.Decoder(Attempt).decode
decode_block = msgspec.json.Decoder(Block).decode
decode_workflow_stats = msgspec.json.Decoder(WorkflowStats).decode
decode_class = msgspec.json.Decoder(RequirementClass).decode
decode_worker = msgspec.json.Decoder(WorkerRecord).decode
_decode_record = msgspec.json.Decoder(_Record).decode
_decode_payload = msgspec.json.Decoder(Submission).decode
_decode_result = msgspec.json.Decoder(JobResult).decode
_decode_data = msgspec.json.Decoder(dict[str, Any]).decode


def encode(value: Any) -> str:
    return _ENCODER.encode(value).decode()


def encode_or_none(value: Any) -> str | None:
    return None if value is None else encode(value)


def encode_record(job: Job) -> str:
    """The job without its own columns: its names and its large parts."""
    return encode(_Record(**{name: getattr(job, name) for name in _RECORD_FIELDS}))


def decode_record(dispatch: Dispatch, record: str, phase: str) -> Job:
    """The record without payload, result and reference."""
    return decode_job(dispatch.job_id, dispatch.tenant, None, record, None, None, phase)


def decode_job(
    job_id: str,
    tenant: str,
    reference: str | None,
    record: str,
    payload: str | None,
    result: str | None,
    phase: str,
) -> Job:
    return Job(
        job_id=JobId(job_id),
        tenant=TenantId(tenant),
        reference=reference,
        payload=_NO_PAYLOAD if payload is None else _decode_payload(payload),
        result=None if result is None else _decode_result(result),
        phase=Phase(phase),
        **msgspec.structs.asdict(_decode_record(record)),
    )


def fact_row(fact: Fact) -> tuple[object, ...]:
    return fact.job_id, fact.number, fact.kind.value, fact.at, fact.round, encode_or_none(fact.data)


def decode_fact(row: Sequence[Any]) -> Fact:
    job_id, number, kind, at, round_, data = row
    return Fact(
        JobId(job_id), number, FactKind(kind), at, round_, None if data is None else _decode_data(data)
    )
