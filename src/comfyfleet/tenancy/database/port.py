"""The port of tenants' databases: jobs with payload and result, rounds with their outbox, the book of credits.

One database may serve many tenants. It keeps what policy made and guards it in the same write; it decides nothing.
Each method is one transaction, whole or not at all, and may be repeated: what is known already is answered, not done
again. The steps S1 … T2 are those of `docs/ledger.md`.
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

MAX_PAGE = 1_000
MAX_LEDGER = 100_000
"""So many postings a book may have to be read as a whole."""


Row = tuple[Any, ...]
PARTS = (
    "jobs",
    "rounds",
    "staged",
    "failures",
    "holds",
    "settlements",
    "grants",
    "postings",
    "runs",
    "documents",
)
"""What a database has of a tenant, in the order in which it moves."""


class PostingResult(StrEnum):
    """What became of an entry."""

    DONE = "done"
    KNOWN = "known"
    """It was made before, and nothing was changed."""
    SHORT = "short"
    """The account does not cover it, and nothing was changed."""
    REFUSED = "refused"
    """It does not fit what is there (a round before the last one ended, a grant that is void); nothing was changed."""


class AccountFrozen(Fault):
    """Nothing is written for this tenant here: it is on its way to another pool, or was here once."""

    def __init__(self, tenant: TenantId) -> None:
        super().__init__(
            f"tenant {tenant!r} is being moved to another pool, or deleted, and nothing is written for it meanwhile: "
            "try again in a moment"
        )


class RoundStart(msgspec.Struct, frozen=True):
    """One round of a job that is to begin: S1."""

    job: Job
    hold: Hold
    posting: Posting
    dispatch: Dispatch
    """What the relay brings to the central store."""
    price: Price | None = None
    """What the round will be charged by, whatever the price is then."""


class RoundStarted(msgspec.Struct, frozen=True):
    outcome: PostingResult
    account: Account
    job: Job | None = None
    """As it is kept now. Of a known one, the one that has this id or reference."""


class RoundEnd(msgspec.Struct, frozen=True):
    """The end of a round as the central store committed it: T1."""

    event_id: str
    """Of the central store's outbox entry: a second copy is known by it."""
    settlement: Settlement
    posting: Posting
    phase: Phase
    changes: dict[str, Any] = {}
    """New values for the job's record, its result among them."""
    run: RunEntry | None = None
    """What it took, for whoever accounts for it."""


class RoundEnded(msgspec.Struct, frozen=True):
    outcome: PostingResult
    settlement: Settlement | None
    """The one that stands. None: there is no such hold, or the event was another's."""


class OpenRound(msgspec.Struct, frozen=True):
    """What it takes to settle a round."""

    hold: Hold
    price: Price | None
    job: Job
    result: JobResult | None
    """What the attempt that is asked for left here before it was reported."""


class OutboxEntry(msgspec.Struct, frozen=True):
    """An open round and what is to be in the central store for it."""

    hold_id: HoldId
    tenant: TenantId
    opened_at: float
    dispatch: Dispatch


class TenantDatabase(Records, Protocol):
    async def open(self) -> None:
        """Connects and migrates. Called once, before anything else."""

    async def close(self) -> None: ...
    def documents(self, tenant: TenantId) -> DocumentStore:
        """Small documents of this tenant alone: the records of its files."""

    # the protocol
    async def open_round(self, opening: RoundStart) -> RoundStarted:
        """S1: the job (or its next round), the hold and the outbox entry, if the account covers it."""

    async def outbox(self, *, is_sent: bool, after: HoldId | None, limit: int) -> list[OutboxEntry]:
        """Open rounds in the order of their ids: for the relay those not sent, for the reconciler the others."""

    async def count_open(self, tenant: TenantId, most: int) -> int:
        """How many rounds of a tenant are open; counting ends at `most`."""

    async def mark_sent(self, hold_id: HoldId) -> bool:
        """S3. False: it is closed, or its tenant's book is, or it was never there."""

    async def send_again(self, hold_id: HoldId) -> bool:
        """The central store does not know an open round any more. False: it is not open."""

    async def leasable(self, hold_id: HoldId) -> Job | None:
        """L2: the job with its payload, if this round of it goes on and its hold is held."""

    async def put_payload(self, hold_id: HoldId, payload: Submission) -> bool:
        """What was to be found out while the job waited is known now. False: the round is not open."""

    async def stage(self, hold_id: HoldId, attempt_id: str, result: JobResult, at: float) -> bool:
        """Before K: what an attempt is about to report. It counts for nothing until the round ends with this attempt,
        and goes with the end of the round. False: the round is not open here."""

    async def keep_failure(self, hold_id: HoldId, attempt_id: str, text: FailureText, at: float) -> bool:
        """Before the central store hears that an attempt failed; it stays as long as the job. False: the round is not
        open here."""

    async def failures_of(self, job_ids: Sequence[JobId]) -> Mapping[str, FailureText]:
        """By attempt, of all rounds."""

    async def open_round_of(self, hold_id: HoldId, attempt_id: str | None) -> OpenRound | None:
        """Before T1. None: it has ended, or was never there."""

    async def end_round(self, ending: RoundEnd) -> RoundEnded:
        """T1: settles the hold, ends the round, closes its outbox entry, all of it once."""

    async def phases(self, hold_ids: Sequence[HoldId]) -> dict[HoldId, Phase | None]:
        """How rounds ended; None for one that is open. A round that was never here is not in the answer."""

    async def forget_events(self, before: float, limit: int) -> int:
        """Of the inbox; the settlements stay, so a copy that comes later still than that changes nothing either."""

    async def ended_jobs(self, phase: Phase, before: float, limit: int) -> list[JobId]:
        """Those that ended so, and before then, the oldest first."""

    async def forget_jobs(self, job_ids: Sequence[JobId], before: float) -> int:
        """With payload, result and reference, those of them that ended before then and whose tenant's book is open.
        Rounds, holds, settlements and postings stay."""

    # records
    async def get_many(self, job_ids: Sequence[JobId]) -> Mapping[JobId, Job]:
        """Those that are there."""

    # the book
    async def hold(self, hold_id: HoldId) -> Hold | None: ...
    async def settlement(self, hold_id: HoldId) -> Settlement | None: ...
    async def open_holds(self, before: float, limit: int) -> list[Hold]:
        """Those made before then that are not settled, the oldest first."""

    async def account(self, tenant: TenantId) -> Account: ...
    async def grant(self, grant: CreditGrant, posting: Posting | None) -> PostingResult:
        """A pending one comes without a posting."""

    async def confirm(self, posting: Posting) -> PostingResult:
        """A pending grant, named by the posting, is granted."""

    async def void(self, tenant: TenantId, grant_id: str) -> PostingResult:
        """A pending grant comes to nothing."""

    async def adjust(self, posting: Posting) -> PostingResult: ...
    async def grant_of(self, tenant: TenantId, grant_id: str) -> CreditGrant | None: ...
    async def grants(
        self, tenant: TenantId, *, after: tuple[float, str] | None, limit: int
    ) -> list[CreditGrant]:
        """In the order of their times, and then of their ids, behind that one."""

    async def receipts(self, tenant: TenantId, job_id: JobId, *, limit: int) -> list[Receipt]:
        """The newest rounds of a job, the oldest of them first."""

    async def statement(self, tenant: TenantId, *, after: int, limit: int) -> list[Posting]:
        """Postings in their order, behind that number."""

    async def account_at(self, tenant: TenantId, number: int) -> Account:
        """What the postings up to that number add up to; what is pending is not among them."""

    async def runs(self, tenant: TenantId, *, after: int, limit: int) -> list[RunEntry]:
        """What ended rounds took, in their order, behind that number."""

    async def usage(
        self, tenant: TenantId | None, *, since: float, until: float, by: Collection[UsageBy], limit: int
    ) -> list[UsageLine]:
        """What rounds that ended in that time took, added up; of everybody unless a tenant is named."""

    async def ledger(self, tenant: TenantId) -> Ledger:
        """Everything, as of one moment, for whoever checks it. Refused if there is too much of it."""

    # coming and going; the fence is a number that grows with each attempt
    async def create_account(self, tenant: TenantId) -> None:
        """For a tenant that is set up here."""

    async def freeze_account(self, tenant: TenantId, fence: int) -> bool:
        """Nothing more is written for it: others get `AccountFrozen`. False: somebody came with a newer fence."""

    async def unfreeze_account(self, tenant: TenantId, fence: int) -> bool:
        """Its account is the sum of its postings. False: it is not closed by this fence (any more)."""

    async def has_account(self, tenant: TenantId) -> bool:
        """Open, closed or empty: whether it was ever set up here. Who lives in this database has one."""

    async def fence_of(self, tenant: TenantId) -> int | None: ...
    async def rows_of(self, tenant: TenantId, part: str, *, after: Row | None, limit: int) -> list[Row]:
        """Those of one of `PARTS` behind a row, in the order of their keys, to be taken in elsewhere as they are."""

    async def take_rows(self, tenant: TenantId, fence: int, part: str, rows: Sequence[Row]) -> bool:
        """Those that are here already stay. False: the book is not closed by this fence (any more)."""

    async def erase(self, tenant: TenantId, fence: int, limit: int) -> int | None:
        """Some of its rows; 0: none is left but the closed account, so that nothing that comes late is written. None:
        the book is not closed by this fence (any more)."""
