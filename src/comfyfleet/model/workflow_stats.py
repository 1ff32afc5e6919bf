"""Statistics of a workflow: its duration on each worker class and the memory that it needs."""

from __future__ import annotations

import msgspec

from comfyfleet.model.ids import TenantId, WorkflowHash


class MeanDuration(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A running mean on one worker class."""

    mean_s: float
    runs: int
    spread_s: float = 0.0
    """A running mean of the distance from the mean. 0 also in records from before it was learned."""


class WorkflowStats(msgspec.Struct, frozen=True, omit_defaults=True):
    workflow_hash: WorkflowHash
    durations: dict[str, MeanDuration] = {}
    """By worker class."""
    memory_above_gb: float = 0.0
    """The largest GPU that was too small, for all tenants: from before limits belonged to tenants."""
    memory_by_tenant: dict[TenantId, float] = {}
    """The largest GPU that was too small for the inputs of each tenant."""


class WorkflowStatsDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one run adds: a duration on one worker class, or a GPU that was too small for a tenant. Deltas of
    concurrent runs commute. The writer chooses the weight and the limits."""

    workflow_hash: WorkflowHash
    worker_class: str = ""
    seconds: float | None = None
    fade: float = 1.0
    """The least weight of the newest run in the mean."""
    most_classes: int = 0
    tenant: TenantId | None = None
    memory_gb: float = 0.0
    most_tenants: int = 0

    def apply(self, stats: WorkflowStats | None) -> WorkflowStats:
        after = stats or WorkflowStats(self.workflow_hash)
        if self.seconds is not None:
            after = self._with_duration(after, self.seconds)
        return after if self.tenant is None else self._with_memory(after, self.tenant)

    def _with_duration(self, stats: WorkflowStats, seconds: float) -> WorkflowStats:
        known = stats.durations.get(self.worker_class)
        if known is None and len(stats.durations) >= self.most_classes:
            return stats
        mean_s, runs = (seconds, 0) if known is None else (known.mean_s, known.runs)
        weight, spread_s = max(self.fade, 1 / (runs + 1)), 0.0 if known is None else known.spread_s
        if runs:
            # The first distance is that of the second run.
            spread_s += max(self.fade, 1 / runs) * (abs(seconds - mean_s) - spread_s)
        mean_s += weight * (seconds - mean_s)
        durations = {**stats.durations, self.worker_class: MeanDuration(mean_s, runs + 1, spread_s)}
        return msgspec.structs.replace(stats, durations=durations)

    def _with_memory(self, stats: WorkflowStats, tenant: TenantId) -> WorkflowStats:
        limits = dict(stats.memory_by_tenant)
        limits[tenant] = max(limits.get(tenant, 0.0), self.memory_gb)
        if len(limits) > self.most_tenants:
            # The largest limits matter most.
            del limits[min(limits, key=lambda each: limits[each])]
        return msgspec.structs.replace(stats, memory_by_tenant=limits)
