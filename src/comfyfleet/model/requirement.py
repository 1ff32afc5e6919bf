"""Requirements and preferences of a job: requirements filter workers, preferences rank them.

Jobs with equal requirements and preferences form a requirement class. `policy/feasibility.py` decides once for each
class and worker profile whether they match.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from comfyfleet.model.ids import DEFAULT_TENANT, ClassKey, TenantId, WorkerId

Isolation = Literal["strict", "loose", "none"]
CostTier = Literal["economy", "standard", "premium"]
Environment = Literal["cloud", "self_hosted"]

COST_TIERS: tuple[CostTier, ...] = ("economy", "standard", "premium")


class HardwareNeed(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    gpu_count: int = 0
    gpu_memory_gb: float = 0
    gpu_model: str | None = None
    cpu_cores: int = 0
    ram_gb: float = 0
    gpu_memory_above_gb: float = 0
    """A GPU with this memory was too small. The job needs strictly more."""
    cpu_threads: int = 0


class LocationNeed(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    region: str | None = None
    compliance: tuple[str, ...] = ()


class Requirements(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A worker that misses one requirement never gets the job."""

    service: str = "comfyui"
    """Also says how the payload is read (`model/payload.py`)."""
    provider: str | None = None
    hardware: HardwareNeed = HardwareNeed()
    models: tuple[str, ...] = ()
    node_classes: tuple[str, ...] = ()
    isolation: Isolation = "none"
    location: LocationNeed = LocationNeed()
    max_processing_s: float | None = None
    slow_worker_classes: tuple[str, ...] = ()
    """From statistics: worker classes on which this workflow takes longer than `max_processing_s`."""
    refused_by: tuple[str, ...] = ()
    """From the catalogs: signatures of servers whose node versions do not accept this workflow."""
    environment: Environment | None = None
    max_cost_tier: CostTier | None = None
    workers: tuple[WorkerId, ...] | None = None
    """Only these workers. None: any."""
    exclude_workers: tuple[WorkerId, ...] = ()
    needs_files: bool = False
    """Only workers that fetch files from the hub and upload outputs there."""
    needs_hub: bool = False
    """Only workers that take jobs from a hub, because direct workers cannot read the payload in the store."""
    quality: str | None = None
    """Only workers that offer this quality level."""


class Preferences(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """They rank the workers that may take the job."""

    workers: tuple[WorkerId, ...] = ()
    models: tuple[str, ...] = ()
    quality: str | None = None
    region: str | None = None
    cost_tier: CostTier | None = None


class RequirementClass(msgspec.Struct, frozen=True, omit_defaults=True):
    """All jobs of a tenant with equal requirements and preferences."""

    requirements: Requirements
    preferences: Preferences = Preferences()
    tenant: TenantId = DEFAULT_TENANT

    @property
    def key(self) -> ClassKey:
        """Equal classes have equal keys in every process."""
        return ClassKey(hashlib.sha256(_ENCODER.encode(_normal(self))).hexdigest()[:24])


_ENCODER = msgspec.json.Encoder(order="deterministic")


def _normal(cls: RequirementClass) -> RequirementClass:
    """Sort the tuples that are sets: their order must not distinguish classes."""
    needs, preferences = cls.requirements, cls.preferences
    return msgspec.structs.replace(
        cls,
        requirements=msgspec.structs.replace(
            needs,
            models=tuple(sorted(set(needs.models))),
            node_classes=tuple(sorted(set(needs.node_classes))),
            location=msgspec.structs.replace(
                needs.location, compliance=tuple(sorted(set(needs.location.compliance)))
            ),
            workers=None if needs.workers is None else tuple(sorted(set(needs.workers))),
            exclude_workers=tuple(sorted(set(needs.exclude_workers))),
            slow_worker_classes=tuple(sorted(set(needs.slow_worker_classes))),
            refused_by=tuple(sorted(set(needs.refused_by))),
        ),
        preferences=msgspec.structs.replace(preferences, models=tuple(sorted(set(preferences.models)))),
    )
