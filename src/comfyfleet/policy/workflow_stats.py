"""What each run adds to the workflow statistics, and what follows for requirements and live values.

Durations apply to all tenants. Memory depends on the inputs, so an out-of-memory limit applies to the tenant that met
it, and to all tenants only as far as two tenants have met it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from comfyfleet.model.ids import TenantId, WorkflowHash
from comfyfleet.model.requirement import Requirements
from comfyfleet.model.worker import Capabilities, LiveState
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta

# The least weight of the newest run in the mean: old runs fade, and one unusual run does not decide.
_FADE = 0.2
_MAX_WORKER_CLASSES = 64
_MAX_TENANTS = 16


def of_run(workflow_hash: WorkflowHash, worker_class: str, seconds: float) -> WorkflowStatsDelta:
    return WorkflowStatsDelta(workflow_hash, worker_class, seconds, _FADE, _MAX_WORKER_CLASSES)


def of_out_of_memory(workflow_hash: WorkflowHash, tenant: TenantId, vram_gb: float) -> WorkflowStatsDelta:
    return WorkflowStatsDelta(workflow_hash, tenant=tenant, memory_gb=vram_gb, most_tenants=_MAX_TENANTS)


def memory_above_gb(stats: WorkflowStats, tenant: TenantId) -> float:
    """The largest GPU that was too small for this tenant, or for two other tenants."""
    limits = stats.memory_by_tenant
    met_by_two = sorted(limits.values())[-2] if len(limits) > 1 else 0.0
    return max(stats.memory_above_gb, limits.get(tenant, 0.0), met_by_two)


def expected_s(stats: WorkflowStats | None, worker_class: str) -> float | None:
    """The mean seconds on this worker class, else over all known classes, else None."""
    if stats is None or not stats.durations:
        return None
    exact = stats.durations.get(worker_class)
    if exact is not None:
        return exact.mean_s
    return sum(duration.mean_s for duration in stats.durations.values()) / len(stats.durations)


def without_slow(needs: Requirements, stats: WorkflowStats | None) -> Requirements:
    """Keep a job with a `max_processing_s` from worker classes that take longer."""
    limit = needs.max_processing_s
    if limit is None or stats is None:
        return needs
    slow = tuple(sorted(name for name, duration in stats.durations.items() if duration.mean_s > limit))
    return msgspec.structs.replace(needs, slow_worker_classes=slow) if slow else needs


def with_memory(
    needs: Requirements, stats: WorkflowStats | None, tenant: TenantId, fleet: Iterable[Capabilities]
) -> Requirements:
    """Require more memory than was too little before, if any worker has more."""
    above_gb = 0.0 if stats is None else memory_above_gb(stats, tenant)
    if above_gb <= needs.hardware.gpu_memory_above_gb:
        return needs
    if not any(worker.hardware.gpu.memory_gb > above_gb for worker in fleet):
        return needs
    hardware = msgspec.structs.replace(needs.hardware, gpu_memory_above_gb=above_gb)
    return msgspec.structs.replace(needs, hardware=hardware)


def warmed(live: LiveState, models: Iterable[str], workflow_hash: WorkflowHash) -> LiveState:
    """Live values after a run. ComfyUI does not report loaded models, so those of the last run count as loaded."""
    loaded = frozenset(models) or live.loaded_models
    return msgspec.structs.replace(live, loaded_models=loaded, last_workflow=workflow_hash)


def merge_live_state(known: LiveState, reported: LiveState) -> LiveState:
    """The reported live values, with the last run's values where the worker reports none."""
    return msgspec.structs.replace(
        reported,
        loaded_models=reported.loaded_models or known.loaded_models,
        last_workflow=reported.last_workflow or known.last_workflow,
    )
