"""Credits in the API: grants, adjustments, statements, receipts, usage and exports as CSV or JSON lines.

Amounts are whole numbers of the smallest unit.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from comfyfleet.model.bounds import Name, PageSize
from comfyfleet.model.ledger import (
    MAX_CREDITS,
    Account,
    CreditGrant,
    GrantState,
    Outcome,
    Posting,
    PostingKind,
    Price,
    Receipt,
    RunEntry,
    UsageLine,
)
from comfyfleet.wire.bodies import Time
from comfyfleet.wire.views import timestamp, view_of

GrantId = Annotated[str, Meta(pattern="^[!-~]{1,200}$")]
Given = Annotated[int, Meta(ge=1, le=MAX_CREDITS)]
Corrected = Annotated[int, Meta(ge=-MAX_CREDITS, le=MAX_CREDITS)]
Note = Annotated[str, Meta(max_length=1_000)]


class GrantBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    amount: Given
    id: GrantId | None = None
    """Your own id, such as a payment number: the same id twice is one grant."""
    note: Note = ""
    pending: bool = False
    """Whether the grant needs confirmation before its credits can be spent."""


class AdjustBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    amount: Corrected
    """Up or down, but not below the credits held for open jobs."""
    note: Annotated[str, Meta(min_length=1, max_length=1_000)]
    id: GrantId | None = None
    """Your own id: the same id twice is one adjustment."""


class StatementQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    after: Annotated[int, Meta(ge=0, le=2**62)] = 0
    """Continue after the entry with this number."""
    limit: PageSize = 100
    cursor: Annotated[int, Meta(ge=0, le=2**62)] | None = None
    """The same as `after`, named as in other lists."""


class BalanceView(msgspec.Struct, frozen=True):
    tenant: str
    balance: int
    held: int
    available: int
    pending: int
    """Credits of grants that are not confirmed; not part of the balance."""


class GrantView(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    amount: int
    at: float
    state: GrantState
    note: str = ""


class GrantList(msgspec.Struct, frozen=True):
    grants: tuple[GrantView, ...]
    cursor: str | None = None


class EntryView(msgspec.Struct, frozen=True):
    number: int
    """1, 2, 3 … in the tenant's ledger, without gaps."""
    at: float
    kind: PostingKind
    balance: int
    """The change of the balance."""
    held: int
    """The change of the held credits."""
    reference: str
    """The grant, the adjustment, or the job and its round."""
    note: str = ""
    balance_after: int = 0
    """The balance after this entry."""
    held_after: int = 0
    """The held credits after this entry."""


class StatementView(msgspec.Struct, frozen=True):
    entries: tuple[EntryView, ...]
    cursor: str | None = None
    """Send it as `cursor` or `after` to get the next page."""


class RoundReceipt(msgspec.Struct, frozen=True):
    round: int
    status: str
    """`open`, or how the round ended."""
    opened_at: float
    held: int
    """Credits that were held for the round."""
    price: Price | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None
    consumed: int = 0
    returned: int = 0
    worker_id: str | None = None
    outputs: int = 0
    gpu_s: float = 0.0
    verified_by: str = ""
    """Who checked the outputs: `hub` or `worker`."""
    note: str = ""


class ReceiptView(msgspec.Struct, frozen=True):
    id: str
    tenant: str
    consumed: int
    held: int
    """Credits held for an open round."""
    rounds: tuple[RoundReceipt, ...]
    """Empty if the tenant has no ledger."""


def balance(account: Account) -> BalanceView:
    return view_of(BalanceView, account)


def grant(given: CreditGrant) -> GrantView:
    return view_of(GrantView, given, id=given.grant_id)


def entries(before: Account, postings: Iterable[Posting]) -> Iterator[EntryView]:
    """The postings with their running totals."""
    balance, held = before.balance, before.held
    for each in postings:
        balance, held = balance + each.balance, held + each.held
        yield view_of(EntryView, each, balance_after=balance, held_after=held)


def receipt(job_id: str, tenant: str, rounds: list[Receipt]) -> ReceiptView:
    shown = tuple(map(_round, rounds))
    held = sum(each.held for each in rounds if each.outcome is None)
    return ReceiptView(job_id, tenant, sum(each.consumed for each in shown), held, shown)


def _round(each: Receipt) -> RoundReceipt:
    return view_of(
        RoundReceipt,
        each,
        round=each.hold_id.round,
        status=each.phase,
        returned=0 if each.outcome is None else each.held - each.consumed,
        gpu_s=each.gpu_milliseconds / 1000,
    )


_KIND = "(tenant|workflow|worker|day)"

Format = Literal["csv", "jsonl"]
CONTENT_TYPES: dict[Format, str] = {"csv": "text/csv; charset=utf-8", "jsonl": "application/jsonl"}


class PostingLine(msgspec.Struct, frozen=True):
    """A line of an export. The fields are its columns."""

    number: int
    at: str
    tenant: str
    kind: PostingKind
    balance: int
    """The change of the balance."""
    held: int
    """The change of the held credits."""
    reference: str
    note: str
    balance_after: int
    held_after: int


class RunLine(msgspec.Struct, frozen=True):
    number: int
    at: str
    tenant: str
    job_id: str
    round: int
    workflow_hash: str
    service: str
    status: str
    worker_id: str | None
    outputs: int
    gpu_s: float
    consumed: int
    verified_by: str
    cost: float | None


class UsageQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    tenant: Name | None = None
    since: Time | None = None
    """From this time on. Default: thirty days ago."""
    until: Time | None = None
    by: Annotated[str, Meta(pattern=f"^{_KIND}(,{_KIND}){{0,3}}$")] = "tenant"
    """How usage is grouped: `tenant`, `workflow`, `worker`, `day`, or several with commas."""


class ExportQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    of: Literal["postings", "runs"] = "postings"
    """`postings`: the entries of the ledger. `runs`: what each ended round of a job used."""
    format: Format = "csv"
    after: Annotated[int, Meta(ge=0, le=2**62)] = 0
    """Continue after the line with this number, so that exports join without gap or overlap."""


class UsageView(msgspec.Struct, frozen=True):
    """Fields that `by` does not name are null."""

    tenant: str | None
    workflow_hash: str | None
    worker_id: str | None
    day: date | None
    rounds: int
    """How many rounds ended."""
    completed: int
    outputs: int
    gpu_s: float
    credits: int
    cost: float | None
    """GPU-seconds × the workers' rates. Only for operators; null if no rate is known."""


class UsageList(msgspec.Struct, frozen=True):
    since: float
    until: float
    usage: tuple[UsageView, ...]


def usage_view(line: UsageLine, *, shows_cost: bool) -> UsageView:
    return view_of(
        UsageView,
        line,
        day=None if line.day is None else date(1970, 1, 1) + timedelta(days=line.day),
        gpu_s=line.gpu_milliseconds / 1000,
        credits=line.consumed,
        cost=_cost(line.cost_micros) if shows_cost else None,
    )


def posting_lines(before: Account, postings: Sequence[Posting]) -> list[PostingLine]:
    return [
        view_of(
            PostingLine,
            posting,
            at=timestamp(posting.at),
            balance_after=entry.balance_after,
            held_after=entry.held_after,
        )
        for posting, entry in zip(postings, entries(before, postings), strict=True)
    ]


def run_line(run: RunEntry, *, shows_cost: bool) -> RunLine:
    return view_of(
        RunLine,
        run,
        at=timestamp(run.at),
        job_id=run.hold_id.job_id,
        round=run.hold_id.round,
        status=run.phase,
        gpu_s=run.gpu_milliseconds / 1000,
        cost=_cost(run.cost_micros) if shows_cost else None,
    )


def encode_lines(lines: Iterable[PostingLine | RunLine], format_: Format) -> bytes:
    if format_ == "jsonl":
        return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows(map(_cells, lines))
    return text.getvalue().encode()


def _cells(line: PostingLine | RunLine) -> list[Any]:
    """Without line breaks: each line of the file is one entry."""
    return [_cell(each) if isinstance(each, str) else each for each in msgspec.structs.astuple(line)]


def _cell(text: str) -> str:
    text = " ".join(text.split())
    # Callers choose some of these texts, and spreadsheets execute what looks like a formula.
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def header_line(kind: type[PostingLine | RunLine], format_: Format) -> bytes:
    return ",".join(kind.__struct_fields__).encode() + b"\r\n" if format_ == "csv" else b""


def _cost(micros: int | None) -> float | None:
    return None if micros is None else micros / 1_000_000
