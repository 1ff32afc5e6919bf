"""What is expected of jobs: when they start and end, and what they would cost. Estimates promise nothing.

The signal for autoscaling is here too: how much work waits, and how many more workers would clear it.
"""

from __future__ import annotations

import msgspec

from comfyfleet.model.ids import WorkflowHash


class JobEstimate(msgspec.Struct, frozen=True):
    """When an open job is expected to start and to end."""

    starts_at: float
    """When it is expected to start, in seconds since 1970. Of a running job: when it was leased."""
    ends_at: float
    """When it is expected to end, in seconds since 1970."""
    is_rough: bool = False
    """A guess: its workflow has run fewer than five times there, it is further back than the forecast reaches, or it
    takes longer than expected."""


class Range(msgspec.Struct, frozen=True):
    """An expected value, and between which values it usually is."""

    expected: float
    """The most likely value."""
    low: float
    """It is seldom less."""
    high: float
    """It is seldom more."""


class CreditRange(msgspec.Struct, frozen=True):
    """What a job is expected to cost, and the least and the most that it can cost."""

    expected: int
    """The most likely cost."""
    low: int
    """The job costs at least so much."""
    high: int
    """The job costs at most so much, which is held while it is open."""


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


class WaitingWork(msgspec.Struct, frozen=True):
    """The waiting jobs with equal needs."""

    key: str
    """Identifies these needs. It is the same in every hub and after a restart."""
    needs: str
    """What the jobs need of a worker, for people: service, GPU memory, models."""
    waiting: int
    """How many jobs wait."""
    gpu_seconds: float
    """How long one worker would need for all of them, with the loads of models that no worker has loaded."""
    slots: int
    """How many slots may take the jobs now, busy ones included."""
    is_rough: bool
    """A guess: some of these workflows have run fewer than five times."""


class WantedWorkers(msgspec.Struct, frozen=True):
    """Workers of one kind that would help."""

    workers: int
    """How many more would clear the work in time."""
    kind: str
    """For people: a worker class of the fleet, or what a worker needs that no worker of the fleet has."""
    worker_class: str | None
    """The worker class of the fleet. Null: the fleet has no worker that could take the jobs."""
    gpu_seconds: float
    """The work that the present workers do not clear in time."""


class CapacityReport(msgspec.Struct, frozen=True):
    within_s: float
    """The time in which the work should be done."""
    waiting: int
    """Jobs that could be leased now, those of classes that are not listed included."""
    gpu_seconds: float
    """How long one worker would need for all of them."""
    slots: int
    """Slots of the workers that take jobs, busy ones included."""
    classes: tuple[WaitingWork, ...]
    """The classes with the most work first."""
    wanted: tuple[WantedWorkers, ...]
    """Empty: the present workers clear the work in time."""
