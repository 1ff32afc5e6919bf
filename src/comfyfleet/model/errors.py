"""Three kinds of no.

ComfyFleetError
├── Refusal         an expected no from a closed list: the caller can do something about it
├── Fault           our environment failed (disk, network, database): the shell retries
└── ServiceFailed   a service failed; carries a `Failure`, the value that says what became of it (failure.py)
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class RefusalCode(StrEnum):
    """The closed list. A code never changes its meaning."""

    NOT_FOUND = "not_found"
    UNAUTHENTICATED = "unauthenticated"
    NOT_ALLOWED = "not_allowed"
    INVALID_REQUEST = "invalid_request"
    INVALID_WORKFLOW = "invalid_workflow"
    UNWORKABLE = "unworkable"
    CREDITS_SHORT = "credits_short"
    DUPLICATE_DIFFERS = "duplicate_differs"
    WRONG_PHASE = "wrong_phase"
    LEASE_LOST = "lease_lost"
    QUEUE_FULL = "queue_full"
    TOO_LARGE = "too_large"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"


class ComfyFleetError(Exception):
    """The root of everything this package raises on purpose."""


class Refusal(ComfyFleetError):
    """An expected no. `details` holds what a program needs to react; the message is for people."""

    def __init__(self, code: RefusalCode, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details


class Fault(ComfyFleetError):
    """Something around us failed, and trying again may work. What it says is of one step: of a call that takes several,
    a batch above all, others may have been done."""


def to_install(*extras: str) -> str:
    """The command for optional packages that are not installed, in words."""
    wanted = ",".join(extras)
    return f"pip install 'comfyfleet[{wanted}]', or in a checkout pip install '.[{wanted}]'"
