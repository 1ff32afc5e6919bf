"""Which worker may take which requirement class, and why not. This is the only place that decides it.

Ranking (`assignment.py`), free slots and blocks are separate. Fake workers take no jobs once the fleet has known a real
worker, online or not, because a fake produces no usable results.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Literal

import msgspec

from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.model.requirement import COST_TIERS, CostTier, HardwareNeed, RequirementClass, Requirements
from comfyfleet.model.worker import Capabilities, Hardware, Service, TenantAccess, WorkerRecord
from comfyfleet.policy.rules import Weights

Dimension = Literal["affinity", "service", "hardware", "models", "tenant", "performance", "location", "cost"]

REFUSES = "has node versions that do not accept this workflow"


class Mismatch(msgspec.Struct, frozen=True):
    """One reason why a worker may not take a job. The text continues a sentence that starts with the worker's name."""

    dimension: Dimension
    reason: str
    name: str | None = None
    """The missing node class or model. The worker may get it later."""


def misses(cls: RequirementClass, worker_id: WorkerId, capabilities: Capabilities) -> tuple[Mismatch, ...]:
    """Every reason why the worker may not take the class, heaviest dimension first. Empty: it may."""
    return tuple(_find(cls, worker_id, capabilities))


def is_feasible(cls: RequirementClass, worker_id: WorkerId, capabilities: Capabilities) -> bool:
    """Like `misses`, but stops at the first reason."""
    return next(_find(cls, worker_id, capabilities), None) is None


def names_missing(cls: RequirementClass, worker_id: WorkerId, capabilities: Capabilities) -> tuple[str, ...]:
    """The missing node classes and models, if nothing else keeps the worker from the class; otherwise empty."""
    names: list[str] = []
    for miss in _find(cls, worker_id, capabilities):
        if miss.name is None:
            return ()
        names.append(miss.name)
    return tuple(names)


def nearest_miss(missing: Mapping[WorkerId, Collection[Mismatch]], weights: Weights) -> WorkerId | None:
    """The worker with the fewest reasons, then the lightest, then by name. Workers without reasons do not count."""
    measured = (
        (len(found), sum(weight_of(miss.dimension, weights) for miss in found), worker_id)
        for worker_id, found in missing.items()
        if found
    )
    nearest = min(measured, default=None)
    return None if nearest is None else nearest[2]


def weight_of(dimension: Dimension, weights: Weights) -> float:
    # Affinity is as absolute as the service and has no weight of its own.
    if dimension == "affinity":
        return weights.service
    weight: float = getattr(weights, dimension)
    return weight


def _find(cls: RequirementClass, worker_id: WorkerId, capabilities: Capabilities) -> Iterator[Mismatch]:
    # Lazy, because most pairs of a large fleet fail at the first check. The checks are in the order of their weights.
    needs = cls.requirements
    yield from _affinity_misses(needs, worker_id)
    services = [service for service in capabilities.services if service.name == needs.service]
    if not services:
        yield Mismatch("service", f"does not offer the service '{needs.service}'")
    service = _best_service(needs, services)
    if service is not None and not _has_provider(needs, service):
        yield Mismatch("service", f"does not offer '{needs.service}' by the provider '{needs.provider}'")
    if needs.needs_files and not capabilities.moves_files:
        yield Mismatch("service", "does not exchange files with a hub, which this job needs")
    if needs.needs_hub and not capabilities.has_hub:
        yield Mismatch(
            "service", "reads jobs directly from the store, where this tenant's payloads are not readable"
        )
    yield from _hardware_misses(needs.hardware, capabilities.hardware)
    if service is not None:
        yield from _inventory_misses(needs, service)
    if not admits(capabilities.tenant_access, cls.tenant, is_strict=needs.isolation == "strict"):
        yield _tenant_miss(capabilities.tenant_access, cls.tenant)
    yield from _performance_misses(needs, capabilities)
    yield from _location_misses(needs, capabilities)
    if needs.max_cost_tier is not None and not is_within_tier(capabilities.cost.tier, needs.max_cost_tier):
        yield Mismatch(
            "cost",
            f"has the cost tier '{capabilities.cost.tier}', at most '{needs.max_cost_tier}' is allowed",
        )


def _affinity_misses(needs: Requirements, worker_id: WorkerId) -> Iterator[Mismatch]:
    if needs.workers is not None and worker_id not in needs.workers:
        named = ", ".join(f"'{name}'" for name in needs.workers) or "nobody"
        yield Mismatch("affinity", f"is not among the workers the job is restricted to ({named})")
    if worker_id in needs.exclude_workers:
        yield Mismatch("affinity", "is excluded by the job")


# --- service and inventory ---------------------------------------------------------------------------------------


def _best_service(needs: Requirements, services: list[Service]) -> Service | None:
    """A worker may offer a service several times with different models. One of them must meet all needs."""
    if len(services) <= 1:
        return services[0] if services else None
    return min(
        services,
        key=lambda service: (
            (not _has_provider(needs, service)) + len(list(_inventory_misses(needs, service)))
        ),
    )


def _has_provider(needs: Requirements, service: Service) -> bool:
    return needs.provider is None or needs.provider in service.providers


def _inventory_misses(needs: Requirements, service: Service) -> Iterator[Mismatch]:
    if service.node_classes is not None:
        for name in needs.node_classes:
            if name not in service.node_classes:
                yield Mismatch("models", f"lacks the node class '{name}'", name)
    if service.models is not None:
        for name in needs.models:
            if not has_model(service.models, name):
                yield Mismatch("models", f"does not have the model '{name}'", name)
    if service.signature is not None and service.signature in needs.refused_by:
        yield Mismatch("models", REFUSES)


def normal_model(name: str) -> str:
    """Servers on Windows list models with backslashes."""
    return name.replace("\\", "/")


def has_model(models: frozenset[str], name: str) -> bool:
    """A bare name matches in any folder, a path only there: models of different families share base names, and a server
    accepts only the path."""
    name = normal_model(name)
    return name in models or name in model_aliases(models)


def collect_aliases(models: frozenset[str]) -> frozenset[str]:
    """Further names of the files of an inventory: with forward slashes, and without their folder."""
    normal = [normal_model(name) for name in models if "/" in name or "\\" in name]
    return frozenset(normal).union(name.rpartition("/")[2] for name in normal)


# Cached, so that an inventory of a thousand files is read once, not once for each class.
model_aliases = lru_cache(maxsize=1024)(collect_aliases)


# --- hardware ----------------------------------------------------------------------------------------------------


def _hardware_misses(need: HardwareNeed, have: Hardware) -> Iterator[Mismatch]:
    # Written as "not >=" so that NaN counts as a miss.
    if need.gpu_count and not have.gpu.count >= need.gpu_count:
        yield Mismatch("hardware", f"has {have.gpu.count} GPUs, {need.gpu_count} are needed")
    if need.gpu_memory_gb and not have.gpu.memory_gb >= need.gpu_memory_gb:
        yield Mismatch(
            "hardware",
            f"has {have.gpu.memory_gb:g} GB of GPU memory, {need.gpu_memory_gb:g} GB are needed",
        )
    if need.gpu_memory_above_gb and not have.gpu.memory_gb > need.gpu_memory_above_gb:
        yield Mismatch(
            "hardware",
            f"has {have.gpu.memory_gb:g} GB of GPU memory, "
            f"more than {need.gpu_memory_above_gb:g} GB are needed: that much was too little before",
        )
    if need.gpu_model is not None and not is_gpu_model(have.gpu.model, need.gpu_model):
        yield Mismatch(
            "hardware", f"has the GPU '{have.gpu.model or 'unknown'}', one like '{need.gpu_model}' is needed"
        )
    if need.cpu_cores and not have.cpu.cores >= need.cpu_cores:
        yield Mismatch("hardware", f"has {have.cpu.cores} CPU cores, {need.cpu_cores} are needed")
    if need.cpu_threads and not have.cpu.threads >= need.cpu_threads:
        yield Mismatch("hardware", f"has {have.cpu.threads} CPU threads, {need.cpu_threads} are needed")
    if need.ram_gb and not have.memory.total_gb >= need.ram_gb:
        yield Mismatch("hardware", f"has {have.memory.total_gb:g} GB of RAM, {need.ram_gb:g} GB are needed")


def is_gpu_model(have: str, wanted: str) -> bool:
    """'4090' means any GPU whose full name contains it."""
    return wanted.casefold() in have.casefold()


# --- tenant, performance, location, cost -------------------------------------------------------------------------


def admits(access: TenantAccess, tenant: TenantId, *, is_strict: bool) -> bool:
    """Whether the worker accepts the tenant. `denied` outweighs `allowed`. A strict job needs a strict worker."""
    if tenant in access.denied:
        return False
    if access.isolation == "strict":
        return tenant in access.allowed
    return not is_strict


def _tenant_miss(access: TenantAccess, tenant: TenantId) -> Mismatch:
    if tenant in access.denied:
        return Mismatch("tenant", f"denies the tenant '{tenant}'")
    if access.isolation == "strict":
        return Mismatch("tenant", f"works for listed tenants only, and '{tenant}' is not listed")
    return Mismatch("tenant", "takes jobs of other tenants too, and the job asks for strict isolation")


def _performance_misses(needs: Requirements, capabilities: Capabilities) -> Iterator[Mismatch]:
    levels = capabilities.performance.quality_levels
    if needs.quality is not None and needs.quality not in levels:
        offered = ", ".join(f"'{level}'" for level in levels) or "none"
        yield Mismatch("performance", f"offers the quality levels {offered}, '{needs.quality}' is required")
    if needs.max_processing_s is not None and capabilities.worker_class in needs.slow_worker_classes:
        yield Mismatch(
            "performance",
            f"takes longer for this workflow than the {needs.max_processing_s:g} s that are allowed",
        )


def _location_misses(needs: Requirements, capabilities: Capabilities) -> Iterator[Mismatch]:
    have, need = capabilities.location, needs.location
    if need.region is not None and (have.region is None or have.region.casefold() != need.region.casefold()):
        yield Mismatch(
            "location", f"is in the region '{have.region or 'unknown'}', '{need.region}' is required"
        )
    if need.compliance:
        complied = {entry.casefold() for entry in have.compliance}
        for entry in need.compliance:
            if entry.casefold() not in complied:
                yield Mismatch("location", f"does not comply with '{entry}'")
    if needs.environment is not None and capabilities.environment != needs.environment:
        yield Mismatch(
            "location",
            f"runs in the environment '{capabilities.environment}', '{needs.environment}' is required",
        )


def is_within_tier(tier: CostTier, limit: CostTier) -> bool:
    return COST_TIERS.index(tier) <= COST_TIERS.index(limit)


def is_held_back(worker: WorkerRecord, fleet: Iterable[WorkerRecord]) -> bool:
    """Whether a fake worker must not take jobs, because the fleet has a real one."""
    declared = worker.capabilities
    if not declared.is_fake or declared.works_beside_real:
        return False
    return any(map(is_known_real, fleet))


def is_known_real(worker: WorkerRecord) -> bool:
    """A worker whose server never answered offers no services, and may be a fake too."""
    return bool(worker.capabilities.services) and not worker.capabilities.is_fake
