"""Tiny worlds whose figures can be worked out by hand."""

from __future__ import annotations

import msgspec
import pytest
from tests.simulation._scenes import EVERY_POLICY, arriving, measured, played, servers, workflow

from comfyfleet.simulation.workload import Stream, checkpoints, draw_jobs, full_rate
from comfyfleet.simulation.world import DETECTION_S, ServerSpec, SimulatedJob, SimulatedServer

RED, BLUE = workflow("red"), workflow("blue", run_s=2.0, load_s=5.0)


def test_first_come_loads_for_every_change_of_models() -> None:
    jobs = played("first-come", servers(1), arriving((0, RED), (0, BLUE), (0, RED)))
    # 3 + 1, then 5 + 2, then 3 + 1.
    assert [(job.start_s, job.load_s, job.end_s) for job in jobs] == [(0, 3, 4), (4, 5, 11), (11, 3, 15)]


def test_overtaking_takes_the_warm_job_first() -> None:
    jobs = played("overtaking", servers(1), arriving((0, RED), (0, BLUE), (0, RED)))
    assert [job.end_s for job in jobs] == [4, 12, 5]


def test_the_engine_takes_the_warm_job_first() -> None:
    jobs = played("comfyfleet", servers(1), arriving((0, RED), (0, BLUE), (0, RED)))
    assert [job.end_s for job in jobs] == [4, 12, 5]


def test_a_shortest_queue_deals_jobs_out_as_they_come() -> None:
    jobs = played("shortest-queue", servers(2), arriving((0, RED), (0, BLUE), (0, RED), (0, BLUE)))
    assert [job.server for job in jobs] == ["gpu-1", "gpu-2", "gpu-1", "gpu-2"]
    assert [job.end_s for job in jobs] == [4, 7, 5, 9]


def test_the_least_loaded_server_counts_with_loads() -> None:
    jobs = played("least-loaded", servers(2), arriving((0, RED), (0, BLUE), (0, RED), (0, RED)))
    assert [job.server for job in jobs] == ["gpu-1", "gpu-2", "gpu-1", "gpu-1"]


def test_selectivity_leaves_the_large_card_to_those_who_need_it() -> None:
    large = workflow("large", size_gb=20.0)
    specs = [ServerSpec("large", 24.0), ServerSpec("small", 8.0)]
    jobs = arriving((0, RED), (0, large))
    # First come, first served gives the first server to whoever is first.
    assert [job.server for job in played("first-come", specs, jobs)] == ["large", "large"]
    assert [job.server for job in played("selectivity", specs, jobs)] == ["small", "large"]


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_faster_servers_and_disks_shorten_their_part(policy: str) -> None:
    (job,) = played(policy, [ServerSpec("fast", speed=2.0, disk_speed=3.0)], arriving((10, RED)))
    assert (job.start_s, job.load_s) == (10, 1)
    assert job.end_s == pytest.approx(11.5)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_job_runs_only_where_its_models_fit(policy: str) -> None:
    large = workflow("large", size_gb=20.0)
    jobs = arriving(*((number, large) for number in range(6)))
    specs = [ServerSpec("small", 8.0), ServerSpec("large", 24.0)]
    assert {job.server for job in played(policy, specs, jobs)} == {"large"}


@pytest.mark.parametrize(
    "policy", [each for each in EVERY_POLICY if each not in ("shortest-queue", "least-loaded")]
)
def test_a_higher_priority_goes_first(policy: str) -> None:
    jobs = arriving((0, RED), (1, RED), (1, RED))
    jobs[2].priority = 5
    assert [job.start_s for job in played(policy, servers(1), jobs)] == [0, 5, 4]


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_the_job_of_a_server_that_dies_runs_again(policy: str) -> None:
    specs = [ServerSpec("dies", absences=((2.0, 500.0),)), ServerSpec("stays")]
    jobs = played(policy, specs, arriving((0, RED), (0.5, BLUE)))
    lost = next(job for job in jobs if job.restarts)
    # Nobody knows of the death before the lease ends.
    assert lost.restarts == 1 and lost.start_s >= 2 + DETECTION_S - 5
    assert all(job.has_ended and job.server == "stays" for job in jobs)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_server_that_returns_has_nothing_loaded(policy: str) -> None:
    specs = [ServerSpec("blinks", absences=((10.0, 20.0),))]
    jobs = played(policy, specs, arriving((0, RED), (5, RED), (30, RED)))
    assert [job.load_s for job in jobs] == [3, 0, 3]


def test_the_default_cache_keeps_the_models_of_the_last_prompt() -> None:
    server = SimulatedServer(0, ServerSpec("a", 100.0))
    server.use(RED)
    server.use(BLUE)
    assert server.is_warm(BLUE) and not server.is_warm(RED)


def test_an_lru_cache_keeps_what_fits() -> None:
    server = SimulatedServer(0, ServerSpec("a", 13.0, cache="lru"))
    green = workflow("green")
    for each in (RED, BLUE, RED):
        server.use(each)
    assert server.is_warm(RED) and server.is_warm(BLUE)
    server.use(green)
    assert server.is_warm(RED) and server.is_warm(green) and not server.is_warm(BLUE), (
        "blue was used longest ago"
    )


def test_the_engine_learns_that_servers_keep_the_models_of_earlier_runs() -> None:
    specs = tuple(ServerSpec(f"gpu-{number}", 24.0, cache="lru") for number in range(4))
    stream = Stream(200, 0.6 * full_rate(checkpoints(), specs))
    loads = {
        policy: sum(
            measured(policy, specs, draw_jobs(checkpoints(), stream, seed)).loads for seed in range(3)
        )
        for policy in ("overtaking", "comfyfleet")
    }
    # The other policy is shown what the servers keep, the engine has to find out.
    assert loads["comfyfleet"] <= 0.6 * loads["overtaking"]


def test_only_the_missing_of_several_models_is_loaded() -> None:
    both = msgspec.structs.replace(BLUE, models=(*RED.models, *BLUE.models))
    server = SimulatedServer(0, ServerSpec("a", 24.0))
    assert server.begin(SimulatedJob(0, 0, RED), 0.0) == (3, 1)
    assert server.begin(SimulatedJob(1, 0, both), 4.0) == (5, 2)


def test_the_measured_figures_of_a_world() -> None:
    found = measured("first-come", servers(1), arriving((2, RED), (2, BLUE), (2, RED)))
    assert (found.jobs, found.makespan_s, found.loads, found.load_s) == (3, 15, 3, 11)
    assert found.mean_s == pytest.approx((4 + 11 + 15) / 3)
    assert (found.longest_wait_s, found.p50_s, found.p99_s) == (11, 11, 15)
    assert found.useful_share == pytest.approx(4 / 15)


@pytest.mark.parametrize(
    "policy", [each for each in EVERY_POLICY if each not in ("shortest-queue", "least-loaded")]
)
def test_tenants_with_equal_weights_share_the_fleet(policy: str) -> None:
    one = workflow("one", run_s=10.0, load_s=0.0)
    jobs = arriving(*((0, one) for _ in range(60)))
    for job in jobs:
        job.tenant = "small" if job.number >= 50 else "big"
    ended = played(policy, servers(1), jobs, {"big": 1.0, "small": 1.0})
    last_of_small = max(job.end_s for job in ended if job.tenant == "small")
    # In the order of arrival it would be the last of all, at 600 s.
    assert last_of_small < 300
