"""What is expected of jobs: when they start and end, and what they would cost. Estimates promise nothing."""

from __future__ import annotations

import msgspec

from comfyfleet.model.ids import WorkflowHash


class JobEstimate(msgspec.Struct, frozen=True, omit_defaults=True):
    """When an open job is expected to start and to end."""

    starts_at: float
    """Of a running job: when it was leased."""
    ends_at: float
    is_rough: bool = False
    """A guess: its workflow has run fewer than five times there, it is further back than the forecast reaches, or it
    takes longer than expected."""


class Range(msgspec.Struct, frozen=True):
    """An expected value, and between which values it usually is."""

    expected: float
    low: float
    high: float


class CreditRange(msgspec.Struct, frozen=True):
    """What a job is expected to cost, and the least and the most that it can cost."""

    expected: int
    low: int
    high: int
    """So much is held while the job is open."""


class Quote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is expected of a job that is not submitted yet."""

    workflow_hash: WorkflowHash
    run_s: Range
    """The run with its models loaded."""
    load_s: float = 0.0
    """The expected time to load its models first."""
    runs: int = 0
    """How many runs the expectation comes from."""
    estimate: JobEstimate | None = None
    """None: no worker can run the job now, or the queue is paused."""
    credits: CreditRange | None = None
    """None: the tenant has no price."""
    unworkable: tuple[str, ...] = ()
    """Why the nearest worker cannot take the job."""
