"""What a run of a workload is judged by: latencies, waits, loads, utilisation."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from comfyfleet.simulation.world import ServerSpec, SimulatedJob


class SimulationRun(msgspec.Struct, frozen=True):
    """One policy on one workload."""

    label: str
    servers: tuple[ServerSpec, ...]
    jobs: tuple[SimulatedJob, ...]
    unfinished: int = 0
    """Jobs that no server can run, or that had failed or still waited when the simulation gave up."""
    took_s: float = 0.0
    """Real seconds of computing."""


class RunMetrics(msgspec.Struct, frozen=True):
    jobs: int
    makespan_s: float
    """From the first arrival to the last end."""
    mean_s: float
    """The mean of the latencies: from the arrival of a job to its end."""
    p50_s: float
    p95_s: float
    p99_s: float
    longest_wait_s: float
    loads: int
    """How many jobs had to load a model."""
    load_s: float
    useful_share: float
    """Of the time of all servers in the makespan, the share in which they ran jobs without loading."""
    restarts: int


def measure(outcome: SimulationRun) -> RunMetrics:
    ended = [job for job in outcome.jobs if job.has_ended]
    latencies = sorted(job.latency_s for job in ended)
    first_s = min((job.arrives_s for job in ended), default=0.0)
    makespan_s = max((job.end_s for job in ended), default=0.0) - first_s
    load_s = sum(job.load_s for job in ended)
    useful_s = sum(job.end_s - job.start_s for job in ended) - load_s
    return RunMetrics(
        jobs=len(ended),
        makespan_s=makespan_s,
        mean_s=sum(latencies) / len(latencies) if latencies else 0.0,
        p50_s=quantile(latencies, 0.5),
        p95_s=quantile(latencies, 0.95),
        p99_s=quantile(latencies, 0.99),
        longest_wait_s=max((job.wait_s for job in ended), default=0.0),
        loads=sum(job.load_s > 0 for job in ended),
        load_s=load_s,
        useful_share=useful_s / (makespan_s * len(outcome.servers)) if makespan_s else 0.0,
        restarts=sum(job.restarts for job in outcome.jobs),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    if not ordered:
        return 0.0
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
