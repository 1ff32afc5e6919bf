"""Random workers and classes over a small world of names.

A class has few needs and two workers of a pair differ in little, so that verdicts often hang on one thing alone.
"""

from __future__ import annotations

from typing import Any, TypeVar

from hypothesis import strategies as st
from msgspec.structs import replace

from comfyfleet.model.ids import TenantId, WorkerId, WorkflowHash
from comfyfleet.model.requirement import (
    COST_TIERS,
    Environment,
    HardwareNeed,
    Isolation,
    LocationNeed,
    RequirementClass,
    Requirements,
)
from comfyfleet.model.worker import (
    Capabilities,
    Cost,
    Cpu,
    Gpu,
    Hardware,
    Location,
    Memory,
    Performance,
    Service,
    TenantAccess,
)

MODELS = ("flux.safetensors", "sdxl/base.safetensors", "sd15/base.safetensors", "sdxl\\refiner.safetensors")
ASKED_MODELS = (*MODELS, "base.safetensors", "refiner.safetensors", "sdxl/refiner.safetensors")
NODE_CLASSES = ("KSampler", "FaceDetailer", "SaveImage")
SIGNATURES = ("0.3.64", "0.7.0", "0.33.0")
ISOLATIONS: tuple[Isolation, ...] = ("strict", "loose", "none")
ENVIRONMENTS: tuple[Environment, ...] = ("cloud", "self_hosted")
TENANTS = tuple(map(TenantId, ("acme", "globex", "initech")))
WORKERS = tuple(map(WorkerId, ("north", "south", "west")))
GIGABYTES = (0.0, 8.0, 12.0, 24.0, 48.0)
COUNTS = (0, 1, 2, 4)
Value = TypeVar("Value")

HASH = WorkflowHash("a-workflow")

EVERYTHING = Capabilities(
    (Service("comfyui", ("local",), models=frozenset(MODELS), node_classes=frozenset(NODE_CLASSES)),),
    Hardware(Gpu(4, 48.0, "NVIDIA GeForce RTX 4090"), Cpu(4, 4), Memory(48.0)),
    performance=Performance(("fast", "best")),
    location=Location("eu", ("gdpr", "hipaa")),
    cost=Cost("economy"),
)
"""A worker that can take nearly every class; what a test draws takes from it."""

tenants = st.sampled_from(TENANTS)
worker_ids = st.sampled_from(WORKERS)


def some(*names: str) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(names), unique=True, max_size=2).map(tuple)


def optional(*values: Value) -> st.SearchStrategy[Value | None]:
    return st.sampled_from((None, *values))


services = st.builds(
    Service,
    name=st.sampled_from(("comfyui", "comfyui", "comfyui", "a1111")),
    providers=some("local", "cloud"),
    models=st.none() | st.frozensets(st.sampled_from(MODELS)),
    node_classes=st.none() | st.frozensets(st.sampled_from(NODE_CLASSES)),
    signature=optional(*SIGNATURES),
)

OFFERS: dict[str, st.SearchStrategy[Any]] = {
    "services": st.lists(services, min_size=1, max_size=2).map(tuple),
    "hardware": st.builds(
        Hardware,
        st.builds(
            Gpu,
            st.sampled_from(COUNTS),
            st.sampled_from(GIGABYTES),
            st.sampled_from(("", "NVIDIA GeForce RTX 4090", "NVIDIA A100")),
        ),
        st.builds(Cpu, st.sampled_from(COUNTS), st.sampled_from(COUNTS)),
        st.builds(Memory, st.sampled_from(GIGABYTES)),
    ),
    "tenant_access": st.builds(
        TenantAccess,
        st.sampled_from(ISOLATIONS),
        st.lists(tenants, unique=True).map(tuple),
        st.lists(tenants, unique=True, max_size=1).map(tuple),
    ),
    "location": st.builds(Location, optional("EU", "us"), some("GDPR", "hipaa")),
    "cost": st.builds(Cost, st.sampled_from(COST_TIERS)),
    "environment": st.sampled_from(ENVIRONMENTS),
    "moves_files": st.booleans(),
    "has_hub": st.booleans(),
    "performance": st.builds(Performance, some("fast", "best")),
}

slow_worker_classes = st.lists(
    OFFERS["hardware"].map(lambda hardware: Capabilities((), hardware).worker_class), unique=True, max_size=3
).map(tuple)

HARDWARE_NEEDS: dict[str, st.SearchStrategy[Any]] = {
    "gpu_count": st.sampled_from(COUNTS),
    "gpu_memory_gb": st.sampled_from(GIGABYTES),
    "gpu_model": optional("4090", "rtx", "A100", "nvidia"),
    "cpu_cores": st.sampled_from(COUNTS),
    "ram_gb": st.sampled_from(GIGABYTES),
    "gpu_memory_above_gb": st.sampled_from(GIGABYTES),
    "cpu_threads": st.sampled_from(COUNTS),
}

NEEDS: dict[str, st.SearchStrategy[Any]] = {
    "service": st.just("a1111"),
    "provider": optional("local", "cloud"),
    **HARDWARE_NEEDS,
    "models": some(*ASKED_MODELS),
    "node_classes": some(*NODE_CLASSES),
    "refused_by": some(*SIGNATURES),
    "isolation": st.sampled_from(ISOLATIONS),
    "location": st.builds(LocationNeed, optional("eu", "US"), some("gdpr", "HIPAA")),
    "max_processing_s": optional(1.0, 10.0),
    "environment": optional(*ENVIRONMENTS),
    "max_cost_tier": optional(*COST_TIERS),
    "workers": st.none() | st.lists(worker_ids, unique=True).map(tuple),
    "exclude_workers": st.lists(worker_ids, unique=True, max_size=2).map(tuple),
    "needs_files": st.booleans(),
    "needs_hub": st.booleans(),
    "quality": optional("fast", "best"),
}


DECIDED_BY = {
    **dict.fromkeys(("service", "provider", "models", "node_classes", "refused_by"), "services"),
    **dict.fromkeys((*HARDWARE_NEEDS, "max_processing_s"), "hardware"),
    "isolation": "tenant_access",
    "location": "location",
    "environment": "environment",
    "max_cost_tier": "cost",
    "workers": "environment",
    "exclude_workers": "environment",
    "needs_files": "moves_files",
    "needs_hub": "has_hub",
    "quality": "performance",
}
"""Which offer can decide a need. A worker's name is no offer; there any will do."""

SERVICE = EVERYTHING.services[0]

NARROW_OFFERS: dict[str, st.SearchStrategy[Any]] = {
    "provider": some("local", "cloud").map(lambda names: (replace(SERVICE, providers=names),)),
    "models": st.frozensets(st.sampled_from(MODELS)).map(lambda names: (replace(SERVICE, models=names),)),
    "node_classes": st.frozensets(st.sampled_from(NODE_CLASSES)).map(
        lambda names: (replace(SERVICE, node_classes=names),)
    ),
    "refused_by": optional(*SIGNATURES).map(lambda name: (replace(SERVICE, signature=name),)),
    "isolation": st.lists(tenants, unique=True).map(
        lambda denied: TenantAccess("strict", TENANTS, tuple(denied))
    ),
}
"""Offers that vary in the one thing which decides the need."""


@st.composite
def capabilities(draw: st.DrawFn) -> Capabilities:
    offered = draw(st.lists(st.sampled_from(sorted(OFFERS)), unique=True, max_size=4))
    return replace(EVERYTHING, **{name: draw(OFFERS[name]) for name in offered})


@st.composite
def alike(draw: st.DrawFn, need: str) -> tuple[Capabilities, Capabilities]:
    """Two workers that differ only in an offer which can decide the need, if at all."""
    worker = draw(st.just(EVERYTHING) | capabilities())
    offer = DECIDED_BY[need]
    values = NARROW_OFFERS.get(need, OFFERS[offer]) if draw(st.booleans()) else OFFERS[offer]
    return replace(worker, **{offer: draw(values)}), replace(worker, **{offer: draw(values)})


@st.composite
def classes(draw: st.DrawFn, *always: str, most_others: int = 2) -> RequirementClass:
    """A class that has these needs for certain, and a few others."""
    others = draw(st.lists(st.sampled_from(sorted(NEEDS)), max_size=most_others))
    names = sorted({*always, *others})
    drawn = {name: draw(NEEDS[name]) for name in names}
    needs = {name: drawn.pop(name) for name in names if name not in HARDWARE_NEEDS}
    needs["hardware"] = HardwareNeed(**drawn)
    if needs.get("max_processing_s") is not None:
        needs["slow_worker_classes"] = draw(slow_worker_classes)
    return RequirementClass(Requirements(**needs), tenant=draw(tenants))
