"""The exceptions of this package.

ComfyFleetError
├── Refusal         an expected error from a closed list, which the caller can act on
├── Fault           the environment failed (disk, network, database); a retry may succeed
└── ServiceFailed   a service failed; carries a `Failure` (failure.py)
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
    """The base class of all exceptions of this package."""


class Refusal(ComfyFleetError):
    """An expected error. `details` is for programs, the message for people."""

    def __init__(self, code: RefusalCode, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details


class Fault(ComfyFleetError):
    """The environment failed, and a retry may succeed. In a call of several steps, such as a batch, other steps may
    have succeeded."""


def to_install(*extras: str) -> str:
    """The command that installs optional packages, for an error message."""
    wanted = ",".join(extras)
    return f"pip install 'comfyfleet[{wanted}]', or in a checkout pip install '.[{wanted}]'"
