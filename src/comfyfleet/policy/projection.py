"""Workers that no live class can tell apart share a profile: capabilities are projected on what classes mention.

A key holds what a worker *has* of the vocabulary, never what it lacks. So keys made with different vocabularies may
meet: whatever one holder of a key was found able to take, every holder is able to take. A key that is out of date can
delay a job until its worker is projected anew; it cannot grant one. Verdicts themselves are made in `feasibility.py`.
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
    """Every name and bound that some live class mentions as a need.

    Wishes rank and are not part of it. Nor are tenants: they come and go with every customer, while the few lists of a
    fleet that name them change by hand, so a key holds those lists whole.
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
        """The class mentions nothing new, so profiles stay as they are."""
        return all(
            getattr(self, name).issuperset(mentioned) for name, mentioned in _words(requirement_class).items()
        )

    def extended(self, requirement_class: RequirementClass) -> Vocabulary:
        words = _words(requirement_class)
        return msgspec.structs.replace(
            self, **{name: getattr(self, name).union(mentioned) for name, mentioned in words.items()}
        )


def _words(requirement_class: RequirementClass) -> dict[str, Iterable[Any]]:
    """What one class mentions, by field of the vocabulary."""
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
    """Equal keys: equal verdicts on every class the vocabulary covers."""
    services = {
        _ENCODER.encode(_project_service(service, vocabulary))
        for service in capabilities.services
        if service.name in vocabulary.services
    }
    projected = [*sorted(services), _ENCODER.encode(_project(worker_id, capabilities, vocabulary))]
    return ProfileKey(hashlib.sha256(b"\n".join(projected)).hexdigest()[:24])


def _project_service(service: Service, vocabulary: Vocabulary) -> tuple[Any, ...]:
    # None, for a service without a list to match, stands as it is: it passes whatever the vocabulary.
    models, node_classes = service.models, service.node_classes
    return (
        service.name,
        vocabulary.providers.intersection(service.providers),
        None if node_classes is None else vocabulary.node_classes & node_classes,
        None
        if models is None
        else (vocabulary.models & models) | (vocabulary.models & model_aliases(models)),
        # As with excluded workers: its own signature is the one that is absent.
        vocabulary.refusing_signatures - {service.signature},
    )


def _project(worker_id: WorkerId, capabilities: Capabilities, vocabulary: Vocabulary) -> tuple[Any, ...]:
    hardware, location = capabilities.hardware, capabilities.location
    gpu = hardware.gpu
    return (
        vocabulary.named_workers & {worker_id},
        # Whose exclusion this worker need not mind: its own name is the one that is absent.
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
        # As with exclusion: its own class is the one that is absent.
        vocabulary.slow_worker_classes - {capabilities.worker_class},
        *(vocabulary.files & {capabilities.moves_files}),
        *(vocabulary.hubs if capabilities.has_hub else ()),
        # What few classes mention is left out where none does: keys stay as they were.
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
    """All that `admits` can see: a strict worker's listed tenants, anybody else's denied ones."""
    if access.isolation == "strict":
        return True, frozenset(access.allowed).difference(access.denied)
    return False, frozenset(access.denied)


def _highest(met: Iterable[float]) -> str:
    """Who meets a bound meets all lower ones, so the highest says it all. Empty: not one is met."""
    highest = max(met, default=None)
    # 8 and 8.0 are one bound and must be one text.
    return "" if highest is None else repr(float(highest))
