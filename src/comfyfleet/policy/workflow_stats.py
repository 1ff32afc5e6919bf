"""What the fleet learns from each run: durations by workflow hash and worker class, and the memory a workflow needs.

Durations are everybody's. How much memory a run takes depends on its inputs, so what one tenant's ran out of counts for
that tenant, and for everybody only as far as two tenants have met it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from comfyfleet.model.ids import TenantId, WorkflowHash
from comfyfleet.model.requirement import Requirements
from comfyfleet.model.worker import Capabilities, LiveState
from comfyfleet.model.workflow_stats import WorkflowStats, WorkflowStatsDelta

# The weight of the newest run once there are many: old runs fade, one odd run does not decide.
_FADE = 0.2
_MAX_WORKER_CLASSES = 64
_MAX_TENANTS = 16


def of_run(workflow_hash: WorkflowHash, worker_class: str, seconds: float) -> WorkflowStatsDelta:
    return WorkflowStatsDelta(workflow_hash, worker_class, seconds, _FADE, _MAX_WORKER_CLASSES)


def of_out_of_memory(workflow_hash: WorkflowHash, tenant: TenantId, vram_gb: float) -> WorkflowStatsDelta:
    return WorkflowStatsDelta(workflow_hash, tenant=tenant, memory_gb=vram_gb, most_tenants=_MAX_TENANTS)


def after_run(stats: WorkflowStats, worker_class: str, seconds: float) -> WorkflowStats:
    return of_run(stats.workflow_hash, worker_class, seconds).apply(stats)


def after_out_of_memory(stats: WorkflowStats, tenant: TenantId, vram_gb: float) -> WorkflowStats:
    return of_out_of_memory(stats.workflow_hash, tenant, vram_gb).apply(stats)


def memory_above_gb(stats: WorkflowStats, tenant: TenantId) -> float:
    """The largest card known to be too small for this tenant: its own, or one that was for two others."""
    limits = stats.memory_by_tenant
    met_by_two = sorted(limits.values())[-2] if len(limits) > 1 else 0.0
    return max(stats.memory_above_gb, limits.get(tenant, 0.0), met_by_two)


def expected_s(stats: WorkflowStats | None, worker_class: str) -> float | None:
    """Seconds on this class of worker, else the mean over those that are known, else nothing."""
    if stats is None or not stats.durations:
        return None
    exact = stats.durations.get(worker_class)
    if exact is not None:
        return exact.mean_s
    return sum(duration.mean_s for duration in stats.durations.values()) / len(stats.durations)


def without_slow(needs: Requirements, stats: WorkflowStats | None) -> Requirements:
    """Keep a job with a limit on its processing time from the classes of workers known to take longer."""
    limit = needs.max_processing_s
    if limit is None or stats is None:
        return needs
    slow = tuple(sorted(name for name, duration in stats.durations.items() if duration.mean_s > limit))
    return msgspec.structs.replace(needs, slow_worker_classes=slow) if slow else needs


def with_memory(
    needs: Requirements, stats: WorkflowStats | None, tenant: TenantId, fleet: Iterable[Capabilities]
) -> Requirements:
    """Ask for more memory than was seen to be too little, if any worker has more; else a hopeless need helps nobody."""
    above_gb = 0.0 if stats is None else memory_above_gb(stats, tenant)
    if above_gb <= needs.hardware.gpu_memory_above_gb:
        return needs
    if not any(worker.hardware.gpu.memory_gb > above_gb for worker in fleet):
        return needs
    hardware = msgspec.structs.replace(needs.hardware, gpu_memory_above_gb=above_gb)
    return msgspec.structs.replace(needs, hardware=hardware)


def no_workflow_stats(workflow_hash: WorkflowHash) -> WorkflowStats:
    return WorkflowStats(workflow_hash)


def warmed(live: LiveState, models: Iterable[str], workflow_hash: WorkflowHash) -> LiveState:
    """After a run. ComfyUI does not say what is loaded: what the run needed is, and one without models evicts none."""
    loaded = frozenset(models) or live.loaded_models
    return msgspec.structs.replace(live, loaded_models=loaded, last_workflow=workflow_hash)


def still_warm(known: LiveState, told: LiveState) -> LiveState:
    """What a worker tells of itself now, and what is remembered of its last run until it says otherwise."""
    return msgspec.structs.replace(
        told,
        loaded_models=told.loaded_models or known.loaded_models,
        last_workflow=told.last_workflow or known.last_workflow,
    )
