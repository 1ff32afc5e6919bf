"""Fleets and workloads on simulated time for the goals of scheduling, and how a policy plays them.

The engine of a run begins knowing no times and learns them from reports, as in production. Every figure follows from
seeds, so a run repeats it exactly on any machine.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bench._measure import Entry, Plan, entry, rounded
from comfyfleet.simulation.engine_run import run_engine
from comfyfleet.simulation.metrics import RunMetrics, SimulationRun, measure
from comfyfleet.simulation.policies import ENGINE, POLICIES
from comfyfleet.simulation.queue_simulation import QueueSimulation
from comfyfleet.simulation.scenario import Scenario
from comfyfleet.simulation.workload import Stream, checkpoints, draw_jobs, full_rate
from comfyfleet.simulation.world import ServerSpec, SimulatedJob, SimulatedWorkflow

BATCH = 64
_STREAM = 300


def servers(count: int, **options: Any) -> tuple[ServerSpec, ...]:
    return tuple(ServerSpec(f"gpu-{number + 1}", **options) for number in range(count))


FOUR = servers(4)
UNEQUAL = (ServerSpec("fast", 24.0, 2.0, 1.5), *(ServerSpec(f"slow-{n}", 8.0, 0.5, 0.5) for n in (1, 2, 3)))


class Played(msgspec.Struct):
    jobs: tuple[SimulatedJob, ...]
    found: RunMetrics


def play(policy: str, scenario: Scenario) -> Played:
    jobs = scenario.fresh_jobs()
    if policy == ENGINE:
        run_engine(scenario.servers, jobs, weights=scenario.weights)
    else:
        QueueSimulation(scenario.servers, jobs, POLICIES[policy](), scenario.weights).run()
    assert all(job.has_ended for job in jobs), f"{policy}: every job is run"
    return Played(tuple(jobs), measure(SimulationRun(policy, scenario.servers, tuple(jobs))))


def batch_of(seed: int, servers: tuple[ServerSpec, ...] = FOUR, count: int = BATCH, **kind: Any) -> Scenario:
    return Scenario(servers, tuple(draw_jobs(checkpoints(**kind), Stream(count), seed)))


def arriving(
    seed: int,
    load: float,
    servers: tuple[ServerSpec, ...] = FOUR,
    workflows: Sequence[SimulatedWorkflow] | None = None,
    **stream: Any,
) -> Scenario:
    workflows = workflows or checkpoints()
    rate = load * full_rate(workflows, servers)
    return Scenario(servers, tuple(draw_jobs(workflows, Stream(_STREAM, rate, **stream), seed)))


def median_entry(goal: str, name: str, values: Sequence[float], bound: str | None, **details: Any) -> Entry:
    """The median of the seeds, with the worst beside it."""
    return entry(
        goal,
        "memory",
        name,
        statistics.median(values),
        bound,
        "ratio",
        worst=rounded(max(values)),
        seeds=len(values),
        **details,
    )


async def in_thread(measured: Callable[[Plan], list[Entry]], plan: Plan) -> list[Entry]:
    # A simulation runs an event loop of its own.
    return await asyncio.to_thread(measured, plan)


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(values, base, strict=True)]


def medians(found: dict[str, list[RunMetrics]], of: str) -> dict[str, float]:
    return {
        name: rounded(statistics.median(getattr(each, of) for each in rows)) for name, rows in found.items()
    }
