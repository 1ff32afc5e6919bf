"""Worker profiles: capabilities reduced to what live requirement classes mention. Equal workers share a profile.

A key contains what a worker *has* of the vocabulary, never what it lacks. So keys from different vocabularies are
compatible: what one holder of a key may take, every holder may take. An outdated key can delay a job but never grant
one. `feasibility.py` makes the decisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from comfyfleet.model.ids import ProfileKey, TenantId, WorkerId
from comfyfleet.model.requirement import CostTier, Environment, RequirementClass
from comfyfleet.model.worker import Capabilities, Service, TenantAccess
from comfyfleet.policy.feasibility import is_gpu_model, is_within_tier, model_aliases, normal_model

_ENCODER = msgspec.json.Encoder(order="deterministic")


class Vocabulary(msgspec.Struct, frozen=True):
    """Every name and limit that a live class requires.

    Preferences are not part of it. Nor are tenants, which change often: a key contains the whole tenant lists of a
    worker, which change rarely.
    """

    services: frozenset[str] = frozenset()
    providers: frozenset[str] = frozenset()
    node_classes: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    """With forward slashes."""
    named_workers: frozenset[WorkerId] = frozenset()
    excluded_workers: frozenset[WorkerId] = frozenset()
    regions: frozenset[str] = frozenset()
    compliance: frozenset[str] = frozenset()
    environments: frozenset[Environment] = frozenset()
    cost_tiers: frozenset[CostTier] = frozenset()
    gpu_models: frozenset[str] = frozenset()
    gpu_counts: frozenset[int] = frozenset()
    gpu_memory_gb: frozenset[float] = frozenset()
    gpu_memory_above_gb: frozenset[float] = frozenset()
    cpu_cores: frozenset[int] = frozenset()
    ram_gb: frozenset[float] = frozenset()
    slow_worker_classes: frozenset[str] = frozenset()
    refusing_signatures: frozenset[str] = frozenset()
    files: frozenset[bool] = frozenset()
    hubs: frozenset[str] = frozenset()
    cpu_threads: frozenset[int] = frozenset()
    qualities: frozenset[str] = frozenset()

    @classmethod
    def of(cls, classes: Iterable[RequirementClass]) -> Vocabulary:
        words: dict[str, set[Any]] = {name: set() for name in cls.__struct_fields__}
        for requirement_class in classes:
            for name, mentioned in _words(requirement_class).items():
                words[name].update(mentioned)
        return cls(**{name: frozenset(mentioned) for name, mentioned in words.items()})

    def covers(self, requirement_class: RequirementClass) -> bool:
        """Whether the class mentions nothing new, so that profiles do not change."""
        return all(
            getattr(self, name).issuperset(mentioned) for name, mentioned in _words(requirement_class).items()
        )

    def extended(self, requirement_class: RequirementClass) -> Vocabulary:
        words = _words(requirement_class)
        return msgspec.structs.replace(
            self, **{name: getattr(self, name).union(mentioned) for name, mentioned in words.items()}
        )


def _words(requirement_class: RequirementClass) -> dict[str, Iterable[Any]]:
    """The words of one class, by field of the vocabulary."""
    needs = requirement_class.requirements
    hardware, location = needs.hardware, needs.location
    return {
        "services": (needs.service,),
        "providers": _one(needs.provider),
        "node_classes": needs.node_classes,
        "models": map(normal_model, needs.models),
        "named_workers": needs.workers or (),
        "excluded_workers": needs.exclude_workers,
        "regions": _one(_folded(location.region)),
        "compliance": map(str.casefold, location.compliance),
        "environments": _one(needs.environment),
        "cost_tiers": _one(needs.max_cost_tier),
        "gpu_models": _one(_folded(hardware.gpu_model)),
        "gpu_counts": _bound(hardware.gpu_count),
        "gpu_memory_gb": _bound(hardware.gpu_memory_gb),
        "gpu_memory_above_gb": _bound(hardware.gpu_memory_above_gb),
        "cpu_cores": _bound(hardware.cpu_cores),
        "ram_gb": _bound(hardware.ram_gb),
        "slow_worker_classes": needs.slow_worker_classes,
        "refusing_signatures": needs.refused_by,
        "files": (True,) if needs.needs_files else (),
        "hubs": ("hub",) if needs.needs_hub else (),
        "cpu_threads": _bound(hardware.cpu_threads),
        "qualities": _one(needs.quality),
    }


def _one(value: str | None) -> tuple[str, ...]:
    return () if value is None else (value,)


def _folded(name: str | None) -> str | None:
    return None if name is None else name.casefold()


def _bound(value: float) -> tuple[float, ...]:
    return (value,) if value else ()


def profile_key(worker_id: WorkerId, capabilities: Capabilities, vocabulary: Vocabulary) -> ProfileKey:
    """Equal keys mean equal decisions on every class that the vocabulary covers."""
    services = {
        _ENCODER.encode(_project_service(service, vocabulary))
        for service in capabilities.services
        if service.name in vocabulary.services
    }
    projected = [*sorted(services), _ENCODER.encode(_project(worker_id, capabilities, vocabulary))]
    return ProfileKey(hashlib.sha256(b"\n".join(projected)).hexdigest()[:24])


def _project_service(service: Service, vocabulary: Vocabulary) -> tuple[Any, ...]:
    # None stays None: a service without a list matches every name.
    models, node_classes = service.models, service.node_classes
    return (
        service.name,
        vocabulary.providers.intersection(service.providers),
        None if node_classes is None else vocabulary.node_classes & node_classes,
        None
        if models is None
        else (vocabulary.models & models) | (vocabulary.models & model_aliases(models)),
        # As for excluded workers: only its own signature is absent.
        vocabulary.refusing_signatures - {service.signature},
    )


def _project(worker_id: WorkerId, capabilities: Capabilities, vocabulary: Vocabulary) -> tuple[Any, ...]:
    hardware, location = capabilities.hardware, capabilities.location
    gpu = hardware.gpu
    return (
        vocabulary.named_workers & {worker_id},
        # The exclusions that do not concern this worker: only its own id is absent.
        vocabulary.excluded_workers - {worker_id},
        _project_access(capabilities.tenant_access),
        vocabulary.regions.intersection(_one(_folded(location.region))),
        vocabulary.compliance.intersection(map(str.casefold, location.compliance)),
        vocabulary.environments & {capabilities.environment},
        [tier for tier in sorted(vocabulary.cost_tiers) if is_within_tier(capabilities.cost.tier, tier)],
        [model for model in sorted(vocabulary.gpu_models) if is_gpu_model(gpu.model, model)],
        _highest(bound for bound in vocabulary.gpu_counts if gpu.count >= bound),
        _highest(bound for bound in vocabulary.gpu_memory_gb if gpu.memory_gb >= bound),
        _highest(bound for bound in vocabulary.gpu_memory_above_gb if gpu.memory_gb > bound),
        _highest(bound for bound in vocabulary.cpu_cores if hardware.cpu.cores >= bound),
        _highest(bound for bound in vocabulary.ram_gb if hardware.memory.total_gb >= bound),
        # As for excluded workers: only its own class is absent.
        vocabulary.slow_worker_classes - {capabilities.worker_class},
        *(vocabulary.files & {capabilities.moves_files}),
        *(vocabulary.hubs if capabilities.has_hub else ()),
        # Later additions are left out if no class mentions them, so that old keys stay valid.
        *_threads(hardware.cpu.threads, vocabulary),
        *_qualities(capabilities, vocabulary),
    )


def _threads(threads: int, vocabulary: Vocabulary) -> tuple[tuple[str, str], ...]:
    met = _highest(bound for bound in vocabulary.cpu_threads if threads >= bound)
    return (("threads", met),) if met else ()


def _qualities(capabilities: Capabilities, vocabulary: Vocabulary) -> tuple[tuple[str, frozenset[str]], ...]:
    offered = vocabulary.qualities.intersection(capabilities.performance.quality_levels)
    return (("quality", offered),) if offered else ()


def _project_access(access: TenantAccess) -> tuple[bool, frozenset[TenantId]]:
    """What `admits` reads: the allowed tenants of a strict worker, the denied ones of any other."""
    if access.isolation == "strict":
        return True, frozenset(access.allowed).difference(access.denied)
    return False, frozenset(access.denied)


def _highest(met: Iterable[float]) -> str:
    """The highest limit that is met, which implies all lower ones. Empty: none."""
    highest = max(met, default=None)
    # 8 and 8.0 must give one text.
    return "" if highest is None else repr(float(highest))
