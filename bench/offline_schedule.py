"""What a schedule reaches that knows a whole batch beforehand: the goals of a batch are stated beside it.

It uses the mean times of the workflows and knows nothing of the engine.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from comfyfleet.simulation.world import ServerSpec, SimulatedJob, SimulatedWorkflow

_STEPS = 20_000
_LOAD_WORTH = 0.001
"""A load less is worth this share of the makespan: among equally short schedules the one with fewer loads is better."""


class OfflineSchedule(NamedTuple):
    makespan_s: float
    loads: int


def offline_schedule(
    jobs: Sequence[SimulatedJob], servers: Sequence[ServerSpec], seed: int = 0
) -> OfflineSchedule:
    """A short schedule for servers that are cold, found by simulated annealing.

    A server runs all its jobs of a workflow after each other, so a schedule says how many jobs of each workflow
    each server runs. A step moves some of them to another server."""
    rng = random.Random(seed)
    counts = Counter(job.workflow.name for job in jobs)
    workflows = {job.workflow.name: job.workflow for job in jobs}
    able = {name: [s for s, server in enumerate(servers) if server.fits(workflows[name])] for name in counts}
    plan: list[Counter[str]] = [Counter() for _ in servers]
    ends = [0.0] * len(servers)
    for name in sorted(counts, key=lambda each: -counts[each] * workflows[each].run_s):
        least = min(able[name], key=lambda s: ends[s])
        plan[least][name] = counts[name]
        ends[least] = _end_s(plan[least], servers[least], workflows)
    now = best = _judged(plan, ends)
    found = OfflineSchedule(max(ends), sum(map(len, plan)))
    for step in range(_STEPS):
        source = rng.randrange(len(servers))
        if not plan[source]:
            continue
        name = rng.choice(list(plan[source]))
        target = rng.choice(able[name])
        if target == source:
            continue
        count = plan[source][name]
        moved = count if rng.random() < 0.5 else rng.randint(1, count)
        changed = {
            source: plan[source] - Counter({name: moved}),
            target: plan[target] + Counter({name: moved}),
        }
        after = [changed.get(s, each) for s, each in enumerate(plan)]
        after_ends = [
            _end_s(each, servers[s], workflows) if s in changed else ends[s] for s, each in enumerate(after)
        ]
        then = _judged(after, after_ends)
        heat = 0.05 * now * (1 - step / _STEPS) + 1e-9
        if then < now or rng.random() < math.exp((now - then) / heat):
            plan, ends, now = after, after_ends, then
        if now < best:
            best, found = now, OfflineSchedule(max(ends), sum(map(len, plan)))
    return found


def _end_s(plan: Counter[str], server: ServerSpec, workflows: dict[str, SimulatedWorkflow]) -> float:
    return sum(
        workflows[name].load_s / server.disk_speed + count * workflows[name].run_s / server.speed
        for name, count in plan.items()
    )


def _judged(plan: Sequence[Counter[str]], ends: Sequence[float]) -> float:
    return max(ends) * (1 + _LOAD_WORTH * sum(map(len, plan)))
