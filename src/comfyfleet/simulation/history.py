"""A scenario from what a hub has run: the same arrivals, and run and load times as they were.

A hub's job list has no models, so every workflow counts as a model set of its own. A run is cold if the worker ran
another workflow before it. The run time of a workflow is the median of its warm runs; its load time is what cold runs
took longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from comfyfleet.simulation.metrics import SimulationRun
from comfyfleet.simulation.scenario import Scenario, ScenarioMistake
from comfyfleet.simulation.world import ServerSpec, SimulatedJob, SimulatedModel, SimulatedWorkflow

_UNKNOWN_VRAM_GB = 24.0
_FACTORS = (0.1, 10.0)
"""The bounds of one job's factor: a run that hung says nothing about its workflow."""
_SHORTEST_S = 0.001


class PastJob(msgspec.Struct, frozen=True):
    """A completed job as a hub lists it."""

    workflow: str
    worker: str
    submitted_at: float
    started_at: float
    completed_at: float
    tenant: str = "default"
    priority: int = 0

    @property
    def seconds(self) -> float:
        return max(_SHORTEST_S, self.completed_at - self.started_at)


class PastWorker(msgspec.Struct, frozen=True):
    name: str
    vram_gb: float = _UNKNOWN_VRAM_GB
    slots: int = 1


class History(msgspec.Struct, frozen=True):
    scenario: Scenario
    recorded: SimulationRun
    """What happened, as far as the job list tells it."""


def read_history(
    past: Sequence[PastJob], workers: Sequence[PastWorker], weights: Mapping[str, float] | None = None
) -> History:
    if not past:
        raise ScenarioMistake(
            "the hub has no completed job in that time: widen it with --since, or simulate a generated workload"
        )
    past = sorted(past, key=lambda job: (job.submitted_at, job.started_at))
    cold = _cold_runs(past)
    speeds = _speeds(past, cold)
    workflows = _workflows(past, cold, speeds)
    known = {worker.name: worker for worker in workers}
    for name in sorted({job.worker for job in past} - known.keys()):
        # It is gone, and its share of the work was done all the same.
        known[name] = PastWorker(name)
    servers = tuple(
        ServerSpec(
            worker.name if worker.slots == 1 else f"{worker.name}/{slot + 1}",
            worker.vram_gb,
            speeds.get(worker.name, 1.0),
        )
        for worker in known.values()
        for slot in range(worker.slots)
    )
    began = past[0].submitted_at
    jobs, recorded = list[SimulatedJob](), list[SimulatedJob]()
    for number, each in enumerate(past):
        workflow, is_cold = workflows[each.workflow], number in cold
        speed = speeds[each.worker]
        load_s = min(workflow.load_s, each.seconds) if is_cold else 0.0
        factor = max(_SHORTEST_S, each.seconds - load_s) * speed / workflow.run_s
        job = SimulatedJob(
            number,
            each.submitted_at - began,
            workflow,
            each.tenant,
            each.priority,
            run_factor=1.0 if is_cold else min(_FACTORS[1], max(_FACTORS[0], factor)),
        )
        jobs.append(job)
        recorded.append(
            msgspec.structs.replace(
                job,
                server=each.worker,
                start_s=each.started_at - began,
                load_s=load_s,
                end_s=each.completed_at - began,
            )
        )
    shares = {tenant: weight for tenant, weight in (weights or {}).items() if weight}
    scenario = Scenario(servers, tuple(jobs), shares if len(shares) > 1 else {})
    return History(scenario, SimulationRun("recorded", servers, tuple(recorded)))


def _cold_runs(past: Sequence[PastJob]) -> set[int]:
    """The places of the runs whose worker ran another workflow before."""
    last: dict[str, str] = {}
    cold = set()
    for place in sorted(range(len(past)), key=lambda place: past[place].started_at):
        job = past[place]
        if last.get(job.worker) != job.workflow:
            cold.add(place)
        last[job.worker] = job.workflow
    return cold


def _speeds(past: Sequence[PastJob], cold: set[int]) -> dict[str, float]:
    """By worker: how fast it is beside all workers, from warm runs of the same workflows."""
    everywhere, there = defaultdict[str, list[float]](list), defaultdict[tuple[str, str], list[float]](list)
    for place, job in enumerate(past):
        if place not in cold:
            everywhere[job.workflow].append(job.seconds)
            there[job.worker, job.workflow].append(job.seconds)
    ratios = defaultdict[str, list[float]](list)
    for (worker, workflow), seconds in there.items():
        ratios[worker].append(median(everywhere[workflow]) / median(seconds))
    return {job.worker: median(ratios[job.worker]) if ratios[job.worker] else 1.0 for job in past}


def _workflows(
    past: Sequence[PastJob], cold: set[int], speeds: Mapping[str, float]
) -> dict[str, SimulatedWorkflow]:
    warm_s, cold_s = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for place, job in enumerate(past):
        (cold_s if place in cold else warm_s)[job.workflow].append(job.seconds * speeds[job.worker])
    differences = [
        median(cold_s[name]) - median(warm_s[name]) for name in warm_s if cold_s[name] and warm_s[name]
    ]
    usual_s = max(0.0, median(differences)) if differences else 0.0
    found = {}
    for name in dict.fromkeys(job.workflow for job in past):
        if warm_s[name]:
            run_s = median(warm_s[name])
            load_s = max(0.0, median(cold_s[name]) - run_s) if cold_s[name] else usual_s
        else:
            # It never ran twice in a row: assume the usual load.
            load_s = min(usual_s, min(cold_s[name]) / 2)
            run_s = median(cold_s[name]) - load_s
        model = SimulatedModel(f"{name[:12]}.safetensors", 0.0, load_s)
        weight = len(warm_s[name]) + len(cold_s[name])
        found[name] = SimulatedWorkflow(name, (model,), max(_SHORTEST_S, run_s), float(weight))
    return found
