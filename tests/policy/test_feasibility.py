"""Who may take what: the table of dimensions, one row a test, and the agreement of the verdict with its reasons."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from tests.policy._fleets import capabilities, classes, worker_ids

from comfyfleet.model.ids import TenantId, WorkerId
from comfyfleet.model.requirement import (
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
from comfyfleet.policy.feasibility import Mismatch, is_feasible, misses, nearest_miss, weight_of
from comfyfleet.policy.rules import Weights

NORTH = WorkerId("north")
ACME = TenantId("acme")
COMFYUI = Service(
    "comfyui",
    providers=("local",),
    models=frozenset({"flux1-dev.safetensors", "sdxl\\base.safetensors", "sd15/vae.pt"}),
    node_classes=frozenset({"KSampler", "SaveImage"}),
)
WORKER = Capabilities(
    services=(COMFYUI,),
    hardware=Hardware(Gpu(1, 24, "NVIDIA GeForce RTX 4090"), Cpu(16, 32), Memory(64)),
    location=Location("EU-West", ("GDPR",)),
    performance=Performance(("fast", "quality")),
)


def job(**needs: object) -> RequirementClass:
    return RequirementClass(msgspec.structs.replace(Requirements(), **needs), tenant=ACME)


def reasons(cls: RequirementClass, worker: Capabilities = WORKER) -> list[str]:
    return [miss.reason for miss in misses(cls, NORTH, worker)]


@given(worker_ids, capabilities(), classes())
def test_the_verdict_agrees_with_its_reasons(
    worker_id: WorkerId, worker: Capabilities, cls: RequirementClass
) -> None:
    assert is_feasible(cls, worker_id, worker) == (not misses(cls, worker_id, worker))


# Found by chance, and rare: a worker that moves no files and is too small as well.
@example(NORTH, WORKER, job(needs_files=True, hardware=HardwareNeed(gpu_memory_above_gb=48.0)))
@example(NORTH, WORKER, job(needs_hub=True, models=("flux1-schnell.safetensors",)))
@given(worker_ids, capabilities(), classes())
def test_reasons_come_weightiest_first(
    worker_id: WorkerId, worker: Capabilities, cls: RequirementClass
) -> None:
    weights = [weight_of(miss.dimension, Weights()) for miss in misses(cls, worker_id, worker)]
    assert weights == sorted(weights, reverse=True)


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        ({"service": "a1111"}, "does not offer the service 'a1111'"),
        ({"provider": "cloud"}, "does not offer 'comfyui' by the provider 'cloud'"),
        ({"hardware": HardwareNeed(gpu_count=2)}, "has 1 GPUs, 2 are needed"),
        ({"hardware": HardwareNeed(gpu_memory_gb=48)}, "has 24 GB of GPU memory, 48 GB are needed"),
        (
            {"hardware": HardwareNeed(gpu_memory_above_gb=24)},
            "has 24 GB of GPU memory, more than 24 GB are needed: that much was too little before",
        ),
        (
            {"hardware": HardwareNeed(gpu_model="A100")},
            "has the GPU 'NVIDIA GeForce RTX 4090', one like 'A100' is needed",
        ),
        ({"hardware": HardwareNeed(cpu_cores=32)}, "has 16 CPU cores, 32 are needed"),
        ({"hardware": HardwareNeed(cpu_threads=33)}, "has 32 CPU threads, 33 are needed"),
        ({"quality": "best"}, "offers the quality levels 'fast', 'quality', 'best' is required"),
        ({"hardware": HardwareNeed(ram_gb=64.5)}, "has 64 GB of RAM, 64.5 GB are needed"),
        ({"node_classes": ("KSampler", "FaceDetailer")}, "lacks the node class 'FaceDetailer'"),
        ({"models": ("flux1-schnell.safetensors",)}, "does not have the model 'flux1-schnell.safetensors'"),
        (
            {"needs_hub": True},
            "reads jobs directly from the store, where this tenant's payloads are not readable",
        ),
        (
            {"isolation": "strict"},
            "takes jobs of other tenants too, and the job asks for strict isolation",
        ),
        ({"location": LocationNeed("us-east")}, "is in the region 'EU-West', 'us-east' is required"),
        ({"location": LocationNeed(None, ("gdpr", "hipaa"))}, "does not comply with 'hipaa'"),
        ({"environment": "cloud"}, "runs in the environment 'self_hosted', 'cloud' is required"),
        ({"max_cost_tier": "economy"}, "has the cost tier 'standard', at most 'economy' is allowed"),
        ({"workers": (WorkerId("south"),)}, "is not among the workers the job is restricted to ('south')"),
        ({"workers": ()}, "is not among the workers the job is restricted to (nobody)"),
        ({"exclude_workers": (NORTH,)}, "is excluded by the job"),
    ],
)
def test_a_need_that_is_not_met_is_named(needs: dict[str, object], reason: str) -> None:
    assert reasons(job(**needs)) == [reason]


@pytest.mark.parametrize(
    "needs",
    [
        {},
        {"provider": "local"},
        {"hardware": HardwareNeed(1, 24, "rtx 4090", 16, 64, gpu_memory_above_gb=23.9)},
        {"node_classes": ("SaveImage",)},
        {"location": LocationNeed("eu-west", ("gdpr",))},
        {"environment": "self_hosted"},
        {"max_cost_tier": "standard"},
        {"max_cost_tier": "premium"},
        {"workers": (WorkerId("south"), NORTH)},
        {"exclude_workers": (WorkerId("south"),)},
        {"isolation": "loose"},
        {"hardware": HardwareNeed(cpu_threads=32)},
        {"quality": "fast"},
    ],
)
def test_a_need_that_is_met_is_no_reason(needs: dict[str, object]) -> None:
    assert reasons(job(**needs)) == []


def test_every_reason_is_given_not_only_the_first() -> None:
    cls = job(service="a1111", hardware=HardwareNeed(gpu_count=8, ram_gb=512), max_cost_tier="economy")
    assert [miss.dimension for miss in misses(cls, NORTH, WORKER)] == [
        "service",
        "hardware",
        "hardware",
        "cost",
    ]


@pytest.mark.parametrize(
    ("asked", "is_found"),
    [
        ("flux1-dev.safetensors", True),
        ("sdxl/base.safetensors", True),
        ("sdxl\\base.safetensors", True),
        ("base.safetensors", True),
        ("vae.pt", True),
        ("sd15\\vae.pt", True),
        ("sdxl/vae.pt", False),
        ("sd15/flux1-dev.safetensors", False),
        ("sdxl", False),
        ("ase.safetensors", False),
    ],
)
def test_a_bare_model_name_is_found_in_any_folder_and_a_path_only_there(asked: str, is_found: bool) -> None:
    assert is_feasible(job(models=(asked,)), NORTH, WORKER) is is_found


def test_a_service_without_a_list_passes_whatever_the_graph_names() -> None:
    worker = Capabilities(services=(Service("comfyui"),))
    assert reasons(job(models=("any.safetensors",), node_classes=("Any",)), worker) == []


def test_an_empty_list_is_a_list_and_has_nothing() -> None:
    worker = Capabilities(services=(Service("comfyui", models=frozenset(), node_classes=frozenset()),))
    assert len(reasons(job(models=("any.safetensors",), node_classes=("Any",)), worker)) == 2


def test_one_service_must_do_it_all_when_a_worker_offers_it_twice() -> None:
    first = Service("comfyui", models=frozenset({"a"}), node_classes=frozenset({"A"}))
    second = Service("comfyui", models=frozenset({"b"}), node_classes=frozenset({"B", "C"}))
    worker = Capabilities(services=(first, second, Service("a1111")))
    assert reasons(job(models=("b",), node_classes=("B", "C")), worker) == []
    assert reasons(job(models=("a",), node_classes=("B", "C")), worker) == ["does not have the model 'a'"]


@pytest.mark.parametrize("asks", ["strict", "loose", "none"])
@pytest.mark.parametrize("isolation", ["strict", "loose", "none"])
@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("is_denied", [True, False])
def test_isolation_is_kept_from_both_sides(
    asks: Isolation, isolation: Isolation, is_listed: bool, is_denied: bool
) -> None:
    access = TenantAccess(isolation, (ACME,) if is_listed else (), (ACME,) if is_denied else ())
    worker = msgspec.structs.replace(WORKER, tenant_access=access)
    if is_denied:
        expected = False
    elif asks == "strict" or isolation == "strict":
        expected = isolation == "strict" and is_listed
    else:
        expected = True
    assert is_feasible(job(isolation=asks), NORTH, worker) is expected


def test_a_worker_that_denies_a_listed_tenant_says_that_it_denies() -> None:
    access = TenantAccess("strict", (ACME,), (ACME,))
    assert reasons(job(), msgspec.structs.replace(WORKER, tenant_access=access)) == [
        "denies the tenant 'acme'"
    ]


def test_a_time_limit_keeps_a_job_from_the_classes_of_workers_known_to_be_too_slow() -> None:
    slow = (WORKER.worker_class,)
    assert reasons(job(max_processing_s=10.0)) == []
    assert reasons(job(max_processing_s=10.0, slow_worker_classes=("another",))) == []
    assert reasons(job(max_processing_s=10.0, slow_worker_classes=slow)) == [
        "takes longer for this workflow than the 10 s that are allowed"
    ]


def test_a_cost_tier_is_a_limit_and_not_a_wish() -> None:
    cheap = msgspec.structs.replace(WORKER, cost=Cost("economy"))
    assert is_feasible(job(max_cost_tier="premium"), NORTH, cheap)
    assert not is_feasible(
        job(max_cost_tier="economy"), NORTH, msgspec.structs.replace(WORKER, cost=Cost("premium"))
    )


def test_the_nearest_miss_has_the_fewest_then_the_lightest_reasons() -> None:
    light, heavy = Mismatch("cost", "costs too much"), Mismatch("hardware", "is too small")
    able, near, far = WorkerId("able"), WorkerId("near"), WorkerId("far")
    assert nearest_miss({far: (light, light), near: (heavy,)}, Weights()) == near
    assert nearest_miss({far: (heavy,), near: (light,)}, Weights()) == near
    assert nearest_miss({far: (light,), near: (heavy,)}, Weights(cost=95)) == near
    assert nearest_miss({able: (), near: (heavy,)}, Weights()) == near
    assert nearest_miss({WorkerId("b"): (light,), WorkerId("a"): (light,)}, Weights()) == WorkerId("a")
    assert nearest_miss({able: ()}, Weights()) is None
