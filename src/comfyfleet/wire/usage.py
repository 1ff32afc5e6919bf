"""What was used by whom, added up, and books line by line for accounting: as CSV or as JSON, a line each."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from comfyfleet.model.ledger import Posting, RunEntry, UsageLine
from comfyfleet.wire.bodies import Name, Time

_KIND = "(tenant|workflow|worker|day)"

Format = Literal["csv", "jsonl"]
CONTENT_TYPES: dict[Format, str] = {"csv": "text/csv; charset=utf-8", "jsonl": "application/jsonl"}

POSTING_COLUMNS = ("number", "at", "tenant", "kind", "balance", "held", "reference", "note")
RUN_COLUMNS = (
    "number",
    "at",
    "tenant",
    "job_id",
    "round",
    "workflow_hash",
    "service",
    "status",
    "worker_id",
    "outputs",
    "gpu_s",
    "consumed",
    "verified_by",
    "cost",
)


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    tenant: Name | None = None
    since: Time | None = None
    """The last thirty days unless given."""
    until: Time | None = None
    by: Annotated[str, Meta(pattern=f"^{_KIND}(,{_KIND}){{0,3}}$")] = "tenant"
    """For each of what it is added up."""


class ExportQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    of: Literal["postings", "runs"] = "postings"
    """The entries of the book, or what each ended round took."""
    format: Format = "csv"
    after: Annotated[int, Meta(ge=0, le=2**62)] = 0
    """The last number that is known already: two exports join without gap or overlap."""


class UsageView(msgspec.Struct, frozen=True):
    """Of what was not asked for in `by`, null."""

    tenant: str | None
    workflow_hash: str | None
    worker_id: str | None
    day: date | None
    rounds: int
    completed: int
    outputs: int
    gpu_s: float
    credits: int
    cost: float | None
    """GPU-seconds × the workers' rates, in their unit, for operators; null where no rate is known."""


class UsageList(msgspec.Struct, frozen=True):
    since: float
    until: float
    usage: tuple[UsageView, ...]


def usage_view(line: UsageLine, *, shows_cost: bool) -> UsageView:
    return UsageView(
        line.tenant,
        line.workflow_hash,
        line.worker_id,
        None if line.day is None else date(1970, 1, 1) + timedelta(days=line.day),
        line.rounds,
        line.completed,
        line.outputs,
        line.gpu_milliseconds / 1000,
        line.consumed,
        _cost(line.cost_micros) if shows_cost else None,
    )


def posting_line(posting: Posting) -> dict[str, Any]:
    return {
        "number": posting.number,
        "at": _time(posting.at),
        "tenant": posting.tenant,
        "kind": posting.kind.value,
        "balance": posting.balance,
        "held": posting.held,
        "reference": posting.reference,
        "note": posting.note,
    }


def run_line(run: RunEntry, *, shows_cost: bool) -> dict[str, Any]:
    return {
        "number": run.number,
        "at": _time(run.at),
        "tenant": run.tenant,
        "job_id": run.hold_id.job_id,
        "round": run.hold_id.round,
        "workflow_hash": run.workflow_hash,
        "service": run.service,
        "status": run.phase,
        "worker_id": run.worker_id,
        "outputs": run.outputs,
        "gpu_s": run.gpu_milliseconds / 1000,
        "consumed": run.consumed,
        "verified_by": run.verified_by,
        "cost": _cost(run.cost_micros) if shows_cost else None,
    }


def written(lines: Iterable[dict[str, Any]], format_: Format) -> bytes:
    if format_ == "jsonl":
        return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows(map(_cells, lines))
    return text.getvalue().encode()


def _cells(line: dict[str, Any]) -> list[Any]:
    """Each line of the file is one entry, whatever a note holds."""
    return [_cell(each) if isinstance(each, str) else each for each in line.values()]


def _cell(text: str) -> str:
    text = " ".join(text.split())
    # Callers choose some of these texts, and spreadsheets carry out what looks like a formula.
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def heading(columns: tuple[str, ...], format_: Format) -> bytes:
    return ",".join(columns).encode() + b"\r\n" if format_ == "csv" else b""


def _cost(micros: int | None) -> float | None:
    return None if micros is None else micros / 1_000_000


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
