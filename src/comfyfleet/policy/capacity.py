"""How many more workers would clear the waiting work within a given time. Pure.

The present slots first do what only they can: work with the fewest slots that may take it goes first. What is left
when the time is over is for further workers, of the class in the fleet that does it fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

from comfyfleet.model.estimate import WantedWorkers
from comfyfleet.model.requirement import Requirements

_MAX_NAMED = 3
"""A description names at most so many models."""
_EPSILON_S = 1e-6


class Work(NamedTuple):
    """The waiting work of one class."""

    needs: str
    seconds: Mapping[str, float]
    """How long it takes on each worker class of the fleet that could take it, also on workers that are away."""
    takers: frozenset[int]
    """The groups of present slots that may take it."""
    otherwise_s: float
    """How long it takes if no worker of the fleet could take it."""


class SlotGroup(NamedTuple):
    """Present slots of equal workers."""

    worker_class: str
    slots: int
    busy_s: float
    """How long they are still busy, all together."""


def wanted_workers(work: Sequence[Work], groups: Sequence[SlotGroup], within_s: float) -> list[WantedWorkers]:
    """The kinds with the most work first."""
    free = [max(0.0, group.slots * within_s - group.busy_s) for group in groups]
    left: dict[tuple[str, str | None], float] = {}
    for each in sorted(work, key=lambda one: (sum(groups[taker].slots for taker in one.takers), one.needs)):
        share = 1.0
        # The fastest first. Work and time are shares, because each class needs its own time for the same work.
        for taker in sorted(each.takers, key=lambda one: (each.seconds[groups[one].worker_class], one)):
            seconds = share * each.seconds[groups[taker].worker_class]
            done = min(seconds, free[taker])
            free[taker] -= done
            share -= share * done / seconds if seconds > _EPSILON_S else share
        if share <= _EPSILON_S:
            continue
        best = min(each.seconds, key=lambda name: (each.seconds[name], name), default=None)
        seconds = share * (each.otherwise_s if best is None else each.seconds[best])
        kind = (each.needs if best is None else best, best)
        left[kind] = left.get(kind, 0.0) + seconds
    found = [
        WantedWorkers(ceil(seconds / within_s - _EPSILON_S), kind, worker_class, round(seconds, 3))
        for (kind, worker_class), seconds in left.items()
        if seconds > _EPSILON_S
    ]
    return sorted(found, key=lambda each: (-each.gpu_seconds, each.kind))


def described(needs: Requirements) -> str:
    """What jobs need of a worker, for people."""
    hardware = needs.hardware
    parts = [needs.service]
    if hardware.gpu_memory_above_gb >= hardware.gpu_memory_gb and hardware.gpu_memory_above_gb:
        parts.append(f"more than {hardware.gpu_memory_above_gb:g} GB")
    elif hardware.gpu_memory_gb:
        parts.append(f"at least {hardware.gpu_memory_gb:g} GB")
    if hardware.gpu_count > 1:
        parts.append(f"{hardware.gpu_count} GPUs")
    if hardware.gpu_model:
        parts.append(hardware.gpu_model)
    if needs.location.region:
        parts.append(needs.location.region)
    if needs.workers is not None:
        parts.append("only certain workers")
    if needs.models:
        named = ", ".join(needs.models[:_MAX_NAMED])
        more = len(needs.models) - _MAX_NAMED
        parts.append(named + (f" and {more} more models" if more > 0 else ""))
    return ", ".join(parts)
