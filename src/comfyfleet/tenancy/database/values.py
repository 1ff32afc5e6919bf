"""What the calls of a tenant database take and answer, and how it refuses. `sql_database.py` has the calls."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from comfyfleet.model.dispatch import Dispatch, Phase
from comfyfleet.model.errors import Fault
from comfyfleet.model.ids import TenantId
from comfyfleet.model.job import Job, JobResult
from comfyfleet.model.ledger import (
    Account,
    Hold,
    HoldId,
    Posting,
    Price,
    RunEntry,
    Settlement,
)

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
