"""How much work waits, and how many more workers would clear it: the signal for autoscaling."""

from __future__ import annotations

import msgspec


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
