"""The same draws give the same figures as an independent implementation of the worlds, the policies and the engine's
policy. `tests/data/simulation_reference.json` holds its figures."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.simulation._scenes import measured, servers

from comfyfleet.simulation.workload import Stream, checkpoints, draw_jobs, full_rate
from comfyfleet.simulation.world import ServerSpec

REFERENCE: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "data" / "simulation_reference.json").read_text()
)
MIXED = (
    ServerSpec("fast", 24.0, 2.0, 1.5),
    *(ServerSpec(f"slow-{number}", 8.0, 0.5, 0.5) for number in (1, 2, 3)),
)


@pytest.mark.parametrize("drawn", REFERENCE["draws"], ids=lambda each: f"seed {each['seed']}")
def test_draws_are_the_same(drawn: dict[str, Any]) -> None:
    stream = Stream(
        drawn["count"],
        drawn["rate"],
        drawn["burst"],
        tuple((str(number), share) for number, share in enumerate(drawn["tenants"])),
        tuple(enumerate(drawn["priorities"])),
    )
    jobs = draw_jobs(checkpoints(), stream, drawn["seed"])
    for number, arrived, name, tenant, priority, run, load in drawn["jobs"]:
        job = jobs[number]
        assert (job.arrives_s, job.workflow.name, job.priority) == (arrived, name, priority)
        assert job.tenant == (str(tenant) if drawn["tenants"] else "default")
        assert (job.run_factor, job.load_factor) == (run, load)


@pytest.mark.parametrize("row", REFERENCE["policies"], ids=lambda row: f"{row['policy']}, load {row['load']}")
def test_the_policies_to_compare_with_give_the_same_figures(row: dict[str, Any]) -> None:
    workflows, specs = checkpoints(), servers()
    rate = None if row["load"] is None else row["load"] * full_rate(workflows, specs)
    found = measured(row["policy"], specs, draw_jobs(workflows, Stream(row["count"], rate), row["seed"]))
    assert found.loads == row["loads"]
    assert found.makespan_s == pytest.approx(row["makespan_s"])
    assert found.mean_s == pytest.approx(row["mean_s"])
    assert found.useful_share == pytest.approx(row["useful"])


@pytest.mark.parametrize("row", REFERENCE["engine"], ids=lambda row: row["title"])
def test_the_engine_loads_as_often_as_its_policy_should(row: dict[str, Any]) -> None:
    """Both learn all times from nothing. Medians over the seeds, within 10 %, or one load of a dozen."""
    workflows = checkpoints(is_disk_slow=row["is_disk_slow"])
    specs = MIXED if row["fleet"] == "mixed" else servers(int(row["fleet"]))
    rate = None if row["load"] is None else row["load"] * full_rate(workflows, specs)
    found = [
        measured("comfyfleet", specs, draw_jobs(workflows, Stream(row["count"], rate), seed))
        for seed in range(len(row["loads"]))
    ]
    loads, expected = median(each.loads for each in found), median(row["loads"])
    assert abs(loads - expected) <= max(1, 0.1 * expected)
    assert median(each.mean_s for each in found) <= 1.1 * median(row["mean_s"])
