"""What the fleet has learned about a workflow: its duration on each class of worker, the memory it needs."""

from __future__ import annotations

import msgspec

from comfyfleet.model.ids import TenantId, WorkflowHash


class Duration(msgspec.Struct, frozen=True, gc=False):
    """A running mean of seconds on one class of worker."""

    mean_s: float
    runs: int


class Lesson(msgspec.Struct, frozen=True, omit_defaults=True):
    workflow_hash: WorkflowHash
    durations: dict[str, Duration] = {}
    """By worker class."""
    memory_above_gb: float = 0.0
    """The largest card that was too small, for everybody: learned before limits belonged to tenants."""
    memory_by_tenant: dict[TenantId, float] = {}
    """The largest card that was too small for the inputs of each tenant."""
