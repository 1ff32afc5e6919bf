"""Ranks: each soft dimension moves the score in its direction, and nothing else does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policy._fleets import capabilities, classes

from comfyfleet.model.ids import ProfileKey, TenantId, WorkerId
from comfyfleet.model.requirement import HardwareNeed, Preferences, RequirementClass, Requirements
from comfyfleet.model.worker import (
    Capabilities,
    Cost,
    Gpu,
    Hardware,
    LiveState,
    Location,
    Performance,
    Service,
    TenantAccess,
    WorkerRecord,
)
from comfyfleet.policy.assignment import score
from comfyfleet.policy.rules import Weights

ACME = TenantId("acme")
PLAIN = Capabilities(
    (Service("comfyui", models=frozenset({"flux", "sdxl/base"})),), Hardware(Gpu(1, 24, "RTX"))
)
NOTHING_KNOWN = LiveState()
JOB = RequirementClass(Requirements(), tenant=ACME)


def worker(offers: Capabilities = PLAIN, live: LiveState = NOTHING_KNOWN) -> WorkerRecord:
    return WorkerRecord(WorkerId("north"), offers, ProfileKey("profile"), 1, 0.0, 0.0, live)


def with_(**values: object) -> Capabilities:
    return msgspec.structs.replace(PLAIN, **values)


def wishing(**wishes: object) -> RequirementClass:
    return msgspec.structs.replace(JOB, preferences=msgspec.structs.replace(Preferences(), **wishes))


def points(
    cls: RequirementClass, record: WorkerRecord, load: float = 0.0, expected_s: float | None = None
) -> float:
    return score(cls, record, load, Weights(), expected_s)


@given(capabilities(), classes(), st.floats(-1, 3), st.none() | st.floats(0, 1e6))
def test_a_score_stays_between_nothing_and_the_sum_of_the_weights(
    offers: Capabilities, cls: RequirementClass, load: float, expected_s: float | None
) -> None:
    weights = Weights()
    most = sum(getattr(weights, name) for name in Weights.__struct_fields__ if name != "service")
    assert 0.0 <= score(cls, worker(offers), load, weights, expected_s) <= most


@pytest.mark.parametrize(
    ("cls", "better", "worse"),
    [
        pytest.param(
            JOB, worker(with_(hardware=Hardware(Gpu(1, 48)))), worker(), id="a larger card has more room"
        ),
        pytest.param(
            JOB,
            worker(live=LiveState(free_vram_gb=20)),
            worker(live=LiveState(free_vram_gb=4)),
            id="what is free now counts before the card's size",
        ),
        pytest.param(
            wishing(models=("flux",)),
            worker(),
            worker(with_(services=(Service("comfyui", models=frozenset()),))),
            id="a preferred model is installed",
        ),
        pytest.param(
            wishing(models=("base",)),
            worker(live=LiveState(loaded_models=frozenset({"sdxl\\base"}))),
            worker(),
            id="a preferred model is loaded",
        ),
        pytest.param(
            RequirementClass(Requirements(models=("flux",)), tenant=ACME),
            worker(live=LiveState(loaded_models=frozenset({"flux"}))),
            worker(live=LiveState(loaded_models=frozenset({"sdxl/base"}))),
            id="a needed model is loaded",
        ),
        pytest.param(
            JOB,
            worker(with_(tenant_access=TenantAccess("loose", (ACME,)))),
            worker(with_(tenant_access=TenantAccess("loose", (TenantId("globex"),)))),
            id="a loose worker lists the tenant",
        ),
        pytest.param(
            wishing(quality="best"),
            worker(with_(performance=Performance(("fast", "best")))),
            worker(with_(performance=Performance(("fast",)))),
            id="the quality level is offered",
        ),
        pytest.param(
            JOB, worker(with_(performance=Performance(speed=2.0))), worker(), id="faster by its word"
        ),
        pytest.param(
            wishing(region="eu"),
            worker(with_(location=Location("EU"))),
            worker(with_(location=Location("us"))),
            id="the preferred region",
        ),
        pytest.param(
            JOB,
            worker(with_(cost=Cost(rate_per_hour=0.4))),
            worker(with_(cost=Cost(rate_per_hour=2.0))),
            id="a lower rate",
        ),
        pytest.param(
            wishing(cost_tier="economy"),
            worker(with_(cost=Cost("standard"))),
            worker(with_(cost=Cost("premium"))),
            id="a tier nearer to the preferred one",
        ),
    ],
)
def test_of_two_workers_the_better_one_scores_higher(
    cls: RequirementClass, better: WorkerRecord, worse: WorkerRecord
) -> None:
    assert points(cls, better) > points(cls, worse)


def test_an_idle_worker_scores_higher_than_a_busy_one() -> None:
    assert points(JOB, worker(), load=0.0) - points(JOB, worker(), load=0.5) == pytest.approx(15)
    assert points(JOB, worker(), load=7.0) == points(JOB, worker(), load=1.0)


def test_a_shorter_expected_time_scores_higher_and_outdoes_the_declared_speed() -> None:
    boaster = worker(with_(performance=Performance(speed=100.0)))
    assert points(JOB, worker(), expected_s=10) > points(JOB, worker(), expected_s=100)
    assert points(JOB, boaster, expected_s=100) == points(JOB, worker(), expected_s=100)


def test_a_job_too_large_for_what_is_free_has_no_room_and_still_a_score() -> None:
    large = RequirementClass(Requirements(hardware=HardwareNeed(gpu_memory_gb=24)), tenant=ACME)
    tight, full = worker(live=LiveState(free_vram_gb=24)), worker(live=LiveState(free_vram_gb=1))
    assert points(large, tight) == points(large, full) > 0


def test_a_dimension_without_weight_does_not_count() -> None:
    none = Weights(hardware=0, models=0, tenant=0, performance=0, location=0, cost=0, load=0)
    assert score(JOB, worker(), 0.0, none, 3.0) == 0.0
