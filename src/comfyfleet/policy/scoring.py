"""How well a worker suits a job it may take: the dimensions that rank.

A score never keeps a job from running; it orders pairs that are equal in priority, preference, warmth and selectivity
(`matching.py`). Live values count here and only here.
"""

from __future__ import annotations

from comfyfleet.model.ids import WorkflowHash
from comfyfleet.model.requirement import COST_TIERS, Preferences, RequirementClass
from comfyfleet.model.worker import Capabilities, LiveState, WorkerRecord
from comfyfleet.policy.feasibility import collect_aliases, has_model, normal_model
from comfyfleet.policy.rules import Weights

# Each is the amount that scores one half. They set where a difference still matters, not what wins.
HALF_SPARE_MEMORY_GB = 16.0
HALF_EXPECTED_S = 60.0
HALF_RATE_PER_HOUR = 1.0

INDIFFERENT = 0.5
"""Neither for nor against: the value is unknown or nobody is preferred."""


def score(
    cls: RequirementClass, worker: WorkerRecord, load: float, weights: Weights, expected_s: float | None
) -> float:
    """The weighted sum of values from 0 to 1; higher is better.

    `load` is the share of the worker's slots in use, `expected_s` the learned duration of this workflow on its class of
    worker. The service dimension only filters and adds nothing.
    """
    capabilities, wishes = worker.capabilities, cls.preferences
    return (
        weights.hardware * _spare_room(cls, worker)
        + weights.models * _models_at_hand(cls, worker)
        + weights.tenant * _closeness(cls, capabilities)
        + weights.performance * (_quality(wishes, capabilities) + _speed(capabilities, expected_s)) / 2
        + weights.location * _region(wishes, capabilities)
        + weights.cost * _cheapness(wishes, capabilities)
        + weights.load * (1.0 - min(1.0, max(0.0, load)))
    )


def warmth(cls: RequirementClass, workflow_hash: WorkflowHash, live: LiveState) -> int:
    """2: every model the job needs is loaded now. 1: the worker ran the same workflow last. 0: cold."""
    needed = cls.requirements.models
    if needed and live.loaded_models:
        loaded = live.loaded_models | collect_aliases(live.loaded_models)
        if all(normal_model(name) in loaded for name in needed):
            return 2
    return 1 if live.last_workflow == workflow_hash else 0


def _spare_room(cls: RequirementClass, worker: WorkerRecord) -> float:
    """GPU memory left over beyond the need; what is free now where that is known, else the card's size."""
    need = cls.requirements.hardware
    free = worker.live.free_vram_gb
    room = worker.capabilities.hardware.gpu.memory_gb if free is None else free
    spare = max(0.0, room - max(need.gpu_memory_gb, need.gpu_memory_above_gb))
    return spare / (spare + HALF_SPARE_MEMORY_GB)


def _models_at_hand(cls: RequirementClass, worker: WorkerRecord) -> float:
    """The mean over needed and preferred models: loaded counts 1, installed one half. Nothing asked, nothing amiss."""
    names = {normal_model(name) for name in (*cls.requirements.models, *cls.preferences.models)}
    if not names:
        return 1.0
    loaded = worker.live.loaded_models
    known = loaded | collect_aliases(loaded) if loaded else loaded
    inventories = [
        service.models for service in worker.capabilities.services if service.name == cls.requirements.service
    ]
    total = 0.0
    for name in names:
        if name in known:
            total += 1.0
        elif any(models is None or has_model(models, name) for models in inventories):
            total += 0.5
    return total / len(names)


def _closeness(cls: RequirementClass, capabilities: Capabilities) -> float:
    """A loose worker prefers the tenants it lists, and a strict one is there for nobody else."""
    access = capabilities.tenant_access
    if access.isolation == "none" or not access.allowed:
        return INDIFFERENT
    return 1.0 if cls.tenant in access.allowed else 0.0


def _quality(wishes: Preferences, capabilities: Capabilities) -> float:
    """Whether the worker offers the quality level that was wished for."""
    if wishes.quality is None:
        return 1.0
    return 1.0 if wishes.quality in capabilities.performance.quality_levels else 0.0


def _speed(capabilities: Capabilities, expected_s: float | None) -> float:
    """What the fleet has learned, else what the worker says of itself (1 is usual, and scores one half)."""
    if expected_s is not None:
        return HALF_EXPECTED_S / (HALF_EXPECTED_S + max(0.0, expected_s))
    speed = max(0.0, capabilities.performance.speed)
    return speed / (speed + 1.0)


def _region(wishes: Preferences, capabilities: Capabilities) -> float:
    if wishes.region is None:
        return 1.0
    region = capabilities.location.region
    return 1.0 if region is not None and region.casefold() == wishes.region.casefold() else 0.0


def _cheapness(wishes: Preferences, capabilities: Capabilities) -> float:
    """The rate per hour, lower is better; where a tier was wished for, its nearness counts as much."""
    cost = capabilities.cost
    cheap = (
        INDIFFERENT
        if cost.rate_per_hour is None
        else HALF_RATE_PER_HOUR / (HALF_RATE_PER_HOUR + max(0.0, cost.rate_per_hour))
    )
    if wishes.cost_tier is None:
        return cheap
    distance = abs(COST_TIERS.index(cost.tier) - COST_TIERS.index(wishes.cost_tier))
    return (cheap + 1.0 - distance / (len(COST_TIERS) - 1)) / 2
