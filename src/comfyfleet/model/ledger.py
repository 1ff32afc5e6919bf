"""Credits as entries in a book: postings that are only ever added, holds, their settlements, and what things cost.

Amounts are whole numbers of the operator's smallest unit. What follows from what is `policy/accounting.py`'s; the books
themselves lie in the tenants' databases (`tenancy/database/port.py`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

import msgspec

from comfyfleet.model.ids import JobId, TenantId, WorkerId, WorkflowHash

MAX_CREDITS = 10**15
"""The most that one entry may move; thousands of such entries still add up within 64 bits."""


Credits = Annotated[int, msgspec.Meta(ge=0, le=MAX_CREDITS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class HoldId(NamedTuple):
    """Of a hold, its settlement and both outbox entries. With the round, a late refund of the first round cannot settle
    the hold of the second."""

    job_id: JobId
    round: int

    def __str__(self) -> str:
        return f"{self.job_id}/{self.round}"


class PostingKind(StrEnum):
    GRANT = "grant"
    ADJUST = "adjust"
    RESERVE = "reserve"
    CONSUME = "consume"
    REFUND = "refund"


class Posting(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One line of a tenant's book. A mistake is put right by another line."""

    tenant: TenantId
    kind: PostingKind
    balance: int
    """By how much the balance changes …"""
    held: int
    """… and by how much what is held of it."""
    at: float
    reference: str
    """What it is for: a hold, a grant, an adjustment. Of one kind there is one posting for each."""
    note: str = ""
    number: int = 0
    """Its place in the book, given by the database."""


class Account(msgspec.Struct, frozen=True, gc=False):
    """What the postings of a tenant add up to."""

    tenant: TenantId
    balance: int = 0
    held: int = 0
    pending: int = 0
    """Granted but not yet confirmed: shown, and never spent."""

    @property
    def available(self) -> int:
        return self.balance - self.held


class Hold(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Credits set aside for one round of a job: the most it can cost."""

    hold_id: HoldId
    tenant: TenantId
    amount: int
    at: float


class Outcome(StrEnum):
    CONSUMED = "consumed"
    REFUNDED = "refunded"


class Settlement(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What became of a hold. There is one for each, for ever."""

    hold_id: HoldId
    outcome: Outcome
    consumed: int
    """Of what was held; the rest is returned."""
    at: float
    note: str = ""


class GrantState(StrEnum):
    PENDING = "pending"
    GRANTED = "granted"
    VOID = "void"


class CreditGrant(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Credits somebody gives to a tenant. While it is pending (a payment on its way) nothing is posted."""

    grant_id: str
    tenant: TenantId
    amount: int
    at: float
    state: GrantState = GrantState.GRANTED
    note: str = ""


class Adjustment(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A correction, up or down."""

    adjustment_id: str
    tenant: TenantId
    amount: int
    at: float
    note: str = ""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a run took, as far as a price asks for it."""

    service: str
    outputs: int = 0
    gpu_milliseconds: int = 0


class RunEntry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What an ended round took, and what it cost on either side: the tenant credits, the operator the worker's time."""

    hold_id: HoldId
    tenant: TenantId
    workflow_hash: WorkflowHash
    service: str
    phase: str
    at: float
    worker_id: WorkerId | None = None
    """Of the last attempt."""
    outputs: int = 0
    gpu_milliseconds: int = 0
    """Of all attempts; a price counts the last one's alone."""
    consumed: int = 0
    cost_micros: int | None = None
    """Millionths of whatever unit the worker's rate per hour is in. None: no rate is known."""
    verified_by: str = ""
    """Who looked at the outputs: `hub`, or the `worker` itself. Empty: there was nothing to look at."""
    number: int = 0
    """Its place in the list, given by the database."""


UsageBy = Literal["tenant", "workflow", "worker", "day"]


class UsageLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What ended rounds took together; of what was not asked for, nothing is said."""

    tenant: TenantId | None = None
    workflow_hash: WorkflowHash | None = None
    worker_id: WorkerId | None = None
    day: int | None = None
    """Of the end of a round, counted from 1970, by UTC."""
    rounds: int = 0
    completed: int = 0
    outputs: int = 0
    gpu_milliseconds: int = 0
    consumed: int = 0
    cost_micros: int | None = None
    """Of those rounds whose worker has a rate."""


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One round of a job as its tenant pays for it."""

    hold_id: HoldId
    phase: str
    """`open`, or how it ended."""
    opened_at: float
    held: int
    price: Price | None = None
    ended_at: float | None = None
    outcome: Outcome | None = None
    consumed: int = 0
    note: str = ""
    worker_id: WorkerId | None = None
    outputs: int = 0
    gpu_milliseconds: int = 0
    verified_by: str = ""


class FlatPrice(msgspec.Struct, frozen=True, tag="flat", tag_field="by", forbid_unknown_fields=True):
    credits: Credits


class ServicePrice(msgspec.Struct, frozen=True, tag="service", tag_field="by", forbid_unknown_fields=True):
    services: dict[str, Credits]
    otherwise: Credits | None = None
    """For a service that is not listed. None: it is not sold."""


class OutputPrice(msgspec.Struct, frozen=True, tag="output", tag_field="by", forbid_unknown_fields=True):
    credits_each: Credits
    most_outputs: Count
    """So many are held for, and charged at the most."""
    base: Credits = 0


class GpuPrice(msgspec.Struct, frozen=True, tag="gpu_second", tag_field="by", forbid_unknown_fields=True):
    credits_per_second: Credits
    most_seconds: Count
    """So many are held for, and charged at the most."""
    base: Credits = 0


Price = FlatPrice | ServicePrice | OutputPrice | GpuPrice


class Ledger(msgspec.Struct, frozen=True):
    """Everything a database knows of one tenant's credits, for whoever checks it."""

    account: Account
    postings: tuple[Posting, ...]
    holds: tuple[Hold, ...]
    """Open and settled."""
    settlements: tuple[Settlement, ...]
    grants: tuple[CreditGrant, ...] = ()
    endings: dict[HoldId, str] = {}
    """The phase of each round that the database says has ended."""
