"""A hub's own jobs become a scenario: times of runs and loads, speeds of servers, arrivals."""

from __future__ import annotations

import pytest

from comfyfleet.simulation.history import PastJob, PastWorker, read_history
from comfyfleet.simulation.metrics import measure
from comfyfleet.simulation.runner import run_variant, variants_of
from comfyfleet.simulation.scenario import ScenarioMistake, read_worker, with_workers

START = 1_700_000_000.0


def run(workflow: str, worker: str, submitted: float, started: float, seconds: float) -> PastJob:
    return PastJob(workflow, worker, START + submitted, START + started, START + started + seconds)


# gpu-a needs 2 s when warm and 6 s more to load; gpu-b is half as fast.
PAST = [
    run("red", "gpu-a", 0, 0, 8),
    run("red", "gpu-a", 0, 8, 2),
    run("blue", "gpu-b", 1, 1, 16),
    run("blue", "gpu-b", 2, 17, 4),
    run("blue", "gpu-a", 3, 10, 8),
    run("blue", "gpu-a", 4, 18, 2),
    run("red", "gpu-b", 5, 21, 16),
    run("red", "gpu-b", 6, 37, 4),
]
WORKERS = [PastWorker("gpu-a", 24.0), PastWorker("gpu-b", 12.0)]


def test_what_was_recorded_is_told_as_it_was() -> None:
    recorded = measure(read_history(PAST, WORKERS).recorded)
    assert (recorded.jobs, recorded.makespan_s, recorded.loads) == (8, 41, 4)


def test_run_times_load_times_and_speeds_are_found() -> None:
    scenario = read_history(PAST, WORKERS).scenario
    a, b = scenario.servers
    assert a.speed == pytest.approx(2 * b.speed)
    (red,) = {job.workflow.name: job.workflow for job in scenario.jobs if job.workflow.name == "red"}.values()
    assert red.run_s / a.speed == pytest.approx(2)
    assert 0 < red.load_s < 20
    assert [job.arrives_s for job in scenario.jobs] == [0, 0, 1, 2, 3, 4, 5, 6]


def test_a_worker_that_is_gone_did_its_share_too() -> None:
    scenario = read_history(PAST, [PastWorker("gpu-a")]).scenario
    assert [server.name for server in scenario.servers] == ["gpu-a", "gpu-b"]


def test_each_slot_is_a_server() -> None:
    scenario = read_history(PAST, [PastWorker("gpu-a", 24.0, slots=2), PastWorker("gpu-b")]).scenario
    assert [server.name for server in scenario.servers] == ["gpu-a/1", "gpu-a/2", "gpu-b"]


def test_what_if_there_were_two_more_cards() -> None:
    scenario = read_history(PAST, WORKERS).scenario
    larger = with_workers(scenario, [read_worker("2x24GB")])
    (ours,) = variants_of(["comfyfleet"])
    now, then = (measure(run_variant(each, ours)) for each in (scenario, larger))
    assert len(larger.servers) == 4
    assert then.mean_s < now.mean_s


def test_a_hub_without_jobs_says_what_to_do() -> None:
    with pytest.raises(ScenarioMistake, match="widen it with --since"):
        read_history([], WORKERS)
