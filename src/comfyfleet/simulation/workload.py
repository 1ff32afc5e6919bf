"""Generated workloads: models by popularity, jobs as a batch, a Poisson stream or in bursts, tenants, priorities.

Everything is drawn from a seed in a fixed order, so that a workload can be compared between policies and versions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from comfyfleet.simulation.world import ServerSpec, SimulatedJob, SimulatedModel, SimulatedWorkflow

T = TypeVar("T")

# Measured with ComfyUI 0.7 on an H200: size in GB, seconds of a warm run, seconds of loading.
_SDXL = (6.9, 0.95, 2.8)
_SD15 = (2.1, 0.5, 1.2)
_MEASURED = {"sdxl_1": 30, "sdxl_2": 20, "sdxl_3": 12, "sdxl_4": 8, "sd15_1": 20, "sd15_2": 7, "sd15_3": 3}
_SMALL_GB = 5.0
_LEAST_FACTOR = 0.3


class Stream(msgspec.Struct, frozen=True):
    """How jobs arrive. `rate` is in jobs per second; None: all at once. `burst`: so many of one workflow together."""

    count: int
    rate: float | None = None
    burst: int = 1
    tenants: tuple[tuple[str, float], ...] = ()
    """Names and shares of the jobs."""
    priorities: tuple[tuple[int, float], ...] = ()
    noise: float = 0.08
    """The standard deviation of run and load times, as a share of their mean."""


def checkpoints(
    count: int = 7, *, cold_ratio: float | None = None, skew: float | None = None, is_disk_slow: bool = False
) -> tuple[SimulatedWorkflow, ...]:
    """Workflows with one checkpoint each: the seven that were measured, or any number by Zipf's law. `cold_ratio`: how
    many times as long as a warm run a cold one takes."""
    if count == 7 and skew is None:
        kinds = [
            (name, weight, _SDXL if name.startswith("sdxl") else _SD15) for name, weight in _MEASURED.items()
        ]
    else:
        power = 1.0 if skew is None else skew
        kinds = [(f"model_{n + 1}", 1 / (n + 1) ** power, (_SDXL, _SDXL, _SD15)[n % 3]) for n in range(count)]
    found = []
    for name, weight, (size_gb, run_s, load_s) in kinds:
        if is_disk_slow:
            load_s = 29.0 if size_gb > _SMALL_GB else 9.0
        if cold_ratio is not None:
            load_s = run_s * (cold_ratio - 1)
        found.append(
            SimulatedWorkflow(
                name, (SimulatedModel(f"{name}.safetensors", size_gb, load_s),), run_s, float(weight)
            )
        )
    return tuple(found)


def draw_jobs(workflows: Sequence[SimulatedWorkflow], stream: Stream, seed: int) -> list[SimulatedJob]:
    rng, at_s = random.Random(seed), 0.0
    weights = [workflow.weight for workflow in workflows]
    found: list[SimulatedJob] = []
    workflow = workflows[0]
    for number in range(stream.count):
        if stream.burst == 1 or number % stream.burst == 0:
            at_s += rng.expovariate(stream.rate / stream.burst) if stream.rate else 0.0
            workflow = rng.choices(workflows, weights)[0]
        if stream.burst > 1 and rng.random() < 0.2:
            workflow = rng.choices(workflows, weights)[0]
        tenant = _drawn(rng, stream.tenants, "default")
        priority = _drawn(rng, stream.priorities, 0)
        run_factor = max(_LEAST_FACTOR, rng.gauss(1, stream.noise))
        load_factor = max(_LEAST_FACTOR, rng.gauss(1, stream.noise))
        found.append(SimulatedJob(number, at_s, workflow, tenant, priority, run_factor, load_factor))
    return found


def _drawn(rng: random.Random, shares: Sequence[tuple[T, float]], default: T) -> T:
    if not shares:
        return default
    return rng.choices([value for value, _ in shares], [share for _, share in shares])[0]


def full_rate(workflows: Sequence[SimulatedWorkflow], servers: Sequence[ServerSpec]) -> float:
    """Jobs per second at which the servers would be busy all the time if every model were loaded everywhere."""
    total = sum(workflow.weight for workflow in workflows)
    mean_s = sum(workflow.run_s * workflow.weight / total for workflow in workflows)
    return sum(server.speed for server in servers) / mean_s
