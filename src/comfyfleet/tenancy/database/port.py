"""The port of tenant databases: jobs with payload and result, rounds with their outbox, the credit ledger.

One database can serve many tenants. It stores and guards what policy decides. Each method is one transaction
and may be repeated. `docs/ledger.md` explains the steps S1 … T2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.failure import FailureText
from comfyfleet.model.ids import JobId, TenantId
from comfyfleet.model.job import Job, JobResult, Submission
from comfyfleet.model.ledger import (
    Account,
    CreditGrant,
    Hold,
    HoldId,
    Ledger,
    Posting,
    Price,
    Receipt,
    RunEntry,
    Settlement,
    UsageBy,
    UsageLine,
)
from comfyfleet.ports import DocumentStore, Records
from comfyfleet.tenancy.database.executor import Row

MAX_LEDGER = 100_000
"""The most postings that `ledger` reads."""


class PostingResult(StrEnum):
    DONE = "done"
    KNOWN = "known"
    """It exists already; nothing changed."""
    SHORT = "short"
    """The account does not cover it; nothing changed."""
    REFUSED = "refused"
    """It conflicts with existing rows (a round is open, a grant is void); nothing changed."""


class AccountFrozen(Fault):
    """The database refuses writes: the tenant is being moved or deleted, or has left."""

    def __init__(self, tenant: TenantId) -> None:
        super().__init__(
            f"tenant {tenant!r} is being moved to another database or deleted, so nothing can be written for it: "
            "try again in a moment"
        )


class RoundStart(msgspec.Struct, frozen=True):
    """Starts a round of a job: S1."""

    job: Job
    hold: Hold
    posting: Posting
    dispatch: Dispatch
    """For the central store."""
    price: Price | None = None
    """The price of this round, even if it changes later."""


class RoundStarted(msgspec.Struct, frozen=True):
    outcome: PostingResult
    account: Account
    job: Job | None = None
    """The stored job with this id or reference."""


class RoundEnd(msgspec.Struct, frozen=True):
    """Ends a round as in the central store: T1."""

    event_id: str
    """Identifies repeats."""
    settlement: Settlement
    posting: Posting
    phase: Phase
    changes: dict[str, Any] = {}
    """New values for the job's record, including its result."""
    run: RunEntry | None = None
    """What the round used, for usage reports."""


class RoundEnded(msgspec.Struct, frozen=True):
    outcome: PostingResult
    settlement: Settlement | None
    """The valid settlement. None: there is no such hold, or the event id belongs to another."""


class OpenRound(msgspec.Struct, frozen=True):
    """All that is needed to settle a round."""

    hold: Hold
    price: Price | None
    job: Job
    result: JobResult | None
    """The staged result of the given attempt."""


class OutboxEntry(msgspec.Struct, frozen=True):
    """An open round and its dispatch for the central store."""

    hold_id: HoldId
    tenant: TenantId
    dispatch: Dispatch


class TenantDatabase(Records, Protocol):
    async def open(self) -> None:
        """Connects and migrates. Call this once, first."""

    async def close(self) -> None: ...
    def documents(self, tenant: TenantId) -> DocumentStore:
        """The documents of this tenant, such as file records."""

    # rounds
    async def open_round(self, opening: RoundStart) -> RoundStarted:
        """S1: writes the job (or its next round), the hold and the outbox entry, if the account covers it."""

    async def outbox(self, *, is_sent: bool, after: HoldId | None, limit: int) -> list[OutboxEntry]:
        """Open rounds by id: the relay reads the unsent ones, the reconciler the sent ones."""

    async def count_open(self, tenant: TenantId, most: int) -> int:
        """Counts a tenant's open rounds, up to `most`."""

    async def mark_sent(self, hold_id: HoldId) -> bool:
        """S3. False: the round is unknown or has ended, or the account is frozen."""

    async def send_again(self, hold_id: HoldId) -> bool:
        """Puts a round that the central store has lost back into the outbox. False: it is not open."""

    async def leasable(self, hold_id: HoldId) -> Job | None:
        """L2: the job with its payload, if this round is open and not settled."""

    async def put_payload(self, hold_id: HoldId, payload: Submission) -> bool:
        """Replaces the payload. False: the round is not open."""

    async def stage(self, hold_id: HoldId, attempt_id: str, result: JobResult, at: float) -> bool:
        """Before K: saves a result that counts if the round ends with this attempt. False: the round is not open."""

    async def save_failure(self, hold_id: HoldId, attempt_id: str, text: FailureText, at: float) -> bool:
        """Call this before reporting the failure to the central store. False: the round is not open."""

    async def failures_of(self, job_ids: Sequence[JobId]) -> Mapping[str, FailureText]:
        """By attempt id, of all rounds."""

    async def open_round_of(self, hold_id: HoldId, attempt_id: str | None) -> OpenRound | None:
        """Before T1. None: the round has ended or is unknown."""

    async def end_round(self, ending: RoundEnd) -> RoundEnded:
        """T1: settles the hold, ends the round and closes its outbox entry."""

    async def phases(self, hold_ids: Sequence[HoldId]) -> dict[HoldId, Phase | None]:
        """How rounds ended; None: it is open. Leaves out unknown rounds."""

    async def forget_events(self, before: float, limit: int) -> int:
        """Deletes old inbox entries. Settlements stay, so a very late repeat still changes nothing."""

    async def ended_jobs(self, phase: Phase, before: float, limit: int) -> list[JobId]:
        """The oldest first."""

    async def forget_jobs(self, job_ids: Sequence[JobId], before: float) -> int:
        """Deletes jobs that ended before `before`, unless the account is frozen. Ledger and rounds stay."""

    # records
    async def get_many(self, job_ids: Sequence[JobId]) -> Mapping[JobId, Job]: ...

    # ledger
    async def hold(self, hold_id: HoldId) -> Hold | None: ...
    async def settlement(self, hold_id: HoldId) -> Settlement | None: ...
    async def open_holds(self, before: float, limit: int) -> list[Hold]:
        """Unsettled holds, the oldest first."""

    async def account(self, tenant: TenantId) -> Account: ...
    async def grant(self, given: CreditGrant, posting: Posting | None) -> PostingResult:
        """A pending grant has no posting."""

    async def confirm(self, posting: Posting) -> PostingResult:
        """Grants the pending grant that the posting names."""

    async def void(self, tenant: TenantId, grant_id: str) -> PostingResult:
        """Cancels a pending grant."""

    async def adjust(self, posting: Posting) -> PostingResult: ...
    async def grant_of(self, tenant: TenantId, grant_id: str) -> CreditGrant | None: ...
    async def grants(
        self, tenant: TenantId, *, after: tuple[float, str] | None, limit: int
    ) -> list[CreditGrant]:
        """Ordered by time and id."""

    async def receipts(self, tenant: TenantId, job_id: JobId, *, limit: int) -> list[Receipt]:
        """The newest rounds of a job, the oldest of them first."""

    async def statement(self, tenant: TenantId, *, after: int, limit: int) -> list[Posting]:
        """Postings after that number."""

    async def account_at(self, tenant: TenantId, number: int) -> Account:
        """The sum of the postings up to that number, without pending grants."""

    async def runs(self, tenant: TenantId, *, after: int, limit: int) -> list[RunEntry]:
        """What ended rounds used, after that number."""

    async def usage(
        self, tenant: TenantId | None, *, since: float, until: float, by: Collection[UsageBy], limit: int
    ) -> list[UsageLine]:
        """Sums over the rounds that ended in that time; `tenant` None: of all tenants."""

    async def ledger(self, tenant: TenantId) -> Ledger:
        """The whole ledger in one snapshot. Refused if it has more than `MAX_LEDGER` postings."""

    # relocation and deletion; the fence is a number that grows with each attempt
    async def create_account(self, tenant: TenantId) -> None: ...
    async def freeze_account(self, tenant: TenantId, fence: int) -> bool:
        """From now on writes raise `AccountFrozen`. False: a newer fence has frozen it."""

    async def unfreeze_account(self, tenant: TenantId, fence: int) -> bool:
        """Sets the account to the sum of its postings. False: this fence does not hold it."""

    async def has_account(self, tenant: TenantId) -> bool:
        """Also True for a frozen account. Every tenant of this database has one."""

    async def fence_of(self, tenant: TenantId) -> int | None: ...
    async def rows_of(self, tenant: TenantId, part: str, *, after: Row | None, limit: int) -> list[Row]:
        """A page of one of `tenant_rows.PARTS`, ordered by key, for `import_rows` of another database."""

    async def import_rows(self, tenant: TenantId, fence: int, part: str, taken: Sequence[Row]) -> bool:
        """Keeps rows that exist already. False: this fence does not hold the account."""

    async def erase(self, tenant: TenantId, fence: int, limit: int) -> int | None:
        """Deletes some rows; 0: only the frozen account is left. None: this fence does not hold the account."""
