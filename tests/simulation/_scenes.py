"""Small worlds for the tests of the simulation."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from comfyfleet.simulation.engine_run import run_engine
from comfyfleet.simulation.metrics import RunMetrics, SimulationRun, measure
from comfyfleet.simulation.policies import ENGINE, POLICIES
from comfyfleet.simulation.queue_simulation import QueueSimulation
from comfyfleet.simulation.world import ServerSpec, SimulatedJob, SimulatedModel, SimulatedWorkflow

EVERY_POLICY = (*POLICIES, ENGINE)


def workflow(name: str, run_s: float = 1.0, load_s: float = 3.0, size_gb: float = 6.0) -> SimulatedWorkflow:
    return SimulatedWorkflow(name, (SimulatedModel(f"{name}.safetensors", size_gb, load_s),), run_s)


def servers(count: int = 4) -> tuple[ServerSpec, ...]:
    return tuple(ServerSpec(f"gpu-{number + 1}") for number in range(count))


def arriving(*jobs: tuple[float, SimulatedWorkflow]) -> list[SimulatedJob]:
    return [SimulatedJob(number, at_s, each) for number, (at_s, each) in enumerate(jobs)]


def played(
    policy: str,
    specs: Sequence[ServerSpec],
    jobs: Sequence[SimulatedJob],
    weights: dict[str, float] | None = None,
) -> list[SimulatedJob]:
    """A copy of the jobs, with what became of them."""
    jobs = [msgspec.structs.replace(job) for job in jobs]
    if policy == ENGINE:
        run_engine(specs, jobs, weights=weights)
    else:
        QueueSimulation(specs, jobs, POLICIES[policy](), weights).run()
    return jobs


def measured(policy: str, specs: Sequence[ServerSpec], jobs: Sequence[SimulatedJob]) -> RunMetrics:
    return measure(SimulationRun(policy, tuple(specs), tuple(played(policy, specs, jobs))))
