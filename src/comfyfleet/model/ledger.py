"""Credits: append-only postings, holds, settlements, prices and usage.

Amounts are whole numbers of the operator's smallest unit. `policy/accounting.py` has the rules, and the tenant
databases hold the ledgers (`tenancy/database/`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, NamedTuple

import msgspec

from comfyfleet.model.ids import JobId, TenantId, WorkerId, WorkflowHash

MAX_CREDITS = 10**15
"""The maximum of one entry. The sum of thousands of such entries fits in 64 bits."""
Credits = Annotated[int, msgspec.Meta(ge=0, le=MAX_CREDITS)]
Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class HoldId(NamedTuple):
    """Identifies a hold, its settlement and both outbox entries. The round is part of it, so a late refund of one
    round cannot settle the hold of the next."""

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
    """One entry of a tenant's ledger. Another entry corrects a mistake."""

    tenant: TenantId
    kind: PostingKind
    balance: int
    """Change of the balance."""
    held: int
    """Change of the held amount."""
    at: float
    reference: str
    """The hold, grant or adjustment that caused it. Kind and reference together are unique."""
    note: str = ""
    number: int = 0
    """The database assigns the number."""


class Account(msgspec.Struct, frozen=True, gc=False):
    """The sums of a tenant's postings."""

    tenant: TenantId
    balance: int = 0
    held: int = 0
    pending: int = 0
    """Granted but not confirmed: shown, but not available."""

    @property
    def available(self) -> int:
        return self.balance - self.held


class Hold(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Credits reserved for one round of a job: its maximum price."""

    hold_id: HoldId
    tenant: TenantId
    amount: int
    at: float


class Outcome(StrEnum):
    CONSUMED = "consumed"
    REFUNDED = "refunded"


class Settlement(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The end of a hold. Each hold has exactly one."""

    hold_id: HoldId
    outcome: Outcome
    consumed: int
    """The consumed part of the hold. The rest is refunded."""
    at: float
    note: str = ""


class GrantState(StrEnum):
    PENDING = "pending"
    GRANTED = "granted"
    VOID = "void"


class CreditGrant(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Credits for a tenant. While the grant is pending (a payment in progress), nothing is posted."""

    grant_id: str
    tenant: TenantId
    amount: int
    at: float
    state: GrantState = GrantState.GRANTED
    note: str = ""


class Adjustment(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A positive or negative correction."""

    adjustment_id: str
    tenant: TenantId
    amount: int
    at: float
    note: str = ""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The usage of a run, as prices need it."""

    service: str
    outputs: int = 0
    gpu_milliseconds: int = 0


class RunEntry(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Usage and cost of an ended round: credits for the tenant, worker time for the operator."""

    hold_id: HoldId
    tenant: TenantId
    workflow_hash: WorkflowHash
    service: str
    phase: str
    at: float
    worker_id: WorkerId | None = None
    """The worker of the last attempt."""
    outputs: int = 0
    gpu_milliseconds: int = 0
    """All attempts. A price counts only the last one."""
    consumed: int = 0
    cost_micros: int | None = None
    """Millionths of the unit of the worker's hourly rate. None: the worker has no rate."""
    verified_by: str = ""
    """Who verified the outputs: `hub` or `worker`. Empty: there were no outputs."""
    number: int = 0
    """The database assigns the number."""


UsageBy = Literal["tenant", "workflow", "worker", "day"]


class UsageLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The summed usage of ended rounds. Only the requested grouping fields are set."""

    tenant: TenantId | None = None
    workflow_hash: WorkflowHash | None = None
    worker_id: WorkerId | None = None
    day: int | None = None
    """The UTC day on which the round ended, counted from 1970."""
    rounds: int = 0
    completed: int = 0
    outputs: int = 0
    gpu_milliseconds: int = 0
    consumed: int = 0
    cost_micros: int | None = None
    """The sum over rounds whose worker has a rate."""


class Receipt(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a tenant pays for one round of a job."""

    hold_id: HoldId
    phase: str
    """`open`, or the final phase."""
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
    """The price of a service that is not listed. None: such a service is not sold."""


class OutputPrice(msgspec.Struct, frozen=True, tag="output", tag_field="by", forbid_unknown_fields=True):
    credits_each: Credits
    most_outputs: Count
    """The hold covers this number, and no more is charged."""
    base: Credits = 0


class GpuPrice(msgspec.Struct, frozen=True, tag="gpu_second", tag_field="by", forbid_unknown_fields=True):
    credits_per_second: Credits
    most_seconds: Count
    """The hold covers this number, and no more is charged."""
    base: Credits = 0


Price = FlatPrice | ServicePrice | OutputPrice | GpuPrice


class Ledger(msgspec.Struct, frozen=True):
    """All credit records of one tenant, for checks."""

    account: Account
    postings: tuple[Posting, ...]
    holds: tuple[Hold, ...]
    """Open and settled."""
    settlements: tuple[Settlement, ...]
    grants: tuple[CreditGrant, ...] = ()
    endings: dict[HoldId, str] = {}
    """The final phase of each ended round."""
