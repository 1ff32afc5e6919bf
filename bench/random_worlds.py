"""Goal A8: in worlds drawn at random, the engine is never much worse than the policy before it.

Fleets, models, loads, bursts and load times are drawn from a seed; the engine plays them on simulated time.
"""

from __future__ import annotations

import random

from bench._fleets import UNEQUAL, in_thread, play, servers
from bench._measure import Entry, Plan, entry, rounded
from comfyfleet.simulation.metrics import quantile
from comfyfleet.simulation.policies import ENGINE
from comfyfleet.simulation.scenario import Scenario
from comfyfleet.simulation.workload import Stream, checkpoints, draw_jobs, full_rate

_WORLDS = 200


async def random_worlds(plan: Plan, _: str) -> list[Entry]:
    return await in_thread(_measure_worlds, plan)


def _measure_worlds(plan: Plan) -> list[Entry]:
    found: dict[str, list[float]] = {"mean_s": [], "p99_s": [], "longest_wait_s": []}
    later: list[float] = []
    for seed in range(5 if plan.quick else _WORLDS):
        world = _random_world(seed)
        ours, before, first = (play(policy, world) for policy in (ENGINE, "overtaking", "first-come"))
        for of, values in found.items():
            # A wait of a moment is none: a multiple of it says nothing.
            base = max(getattr(before.found, of), 0.5 if of == "longest_wait_s" else 0.0)
            values.append(getattr(ours.found, of) / base)
        slowest = max(job.workflow.load_s for job in world.jobs) / min(
            each.disk_speed for each in world.servers
        )
        starts = zip(ours.jobs, first.jobs, strict=True)
        later.append(max(job.start_s - other.start_s for job, other in starts) / slowest)
    title = f"{_WORLDS} random worlds:"
    before_us = "/ that of the policy before, the worst world"
    return [
        _worlds_entry("A8a", f"{title} mean {before_us}", found["mean_s"], "<= 1.05"),
        _worlds_entry("A8b", f"{title} p99 {before_us}", found["p99_s"], None),
        _worlds_entry("A8c", f"{title} longest wait {before_us}", found["longest_wait_s"], None),
        _worlds_entry(
            "A8d",
            f"{title} latest start after first come, first served, the worst world",
            later,
            None,
            "loads",
        ),
    ]


def _worlds_entry(goal: str, name: str, values: list[float], bound: str | None, unit: str = "ratio") -> Entry:
    ordered = sorted(values)
    parts = {f"p{round(100 * share)}": rounded(quantile(ordered, share)) for share in (0.05, 0.5, 0.95, 0.99)}
    worse = {"worse_by_5_percent": sum(each > 1.05 for each in values)} if unit == "ratio" else {}
    shown = {"quantiles": [rounded(quantile(ordered, number / 40)) for number in range(41)]}
    return entry(goal, "memory", name, max(values), bound, unit, **parts, **worse, **shown)


def _random_world(seed: int) -> Scenario:
    rng = random.Random(seed)
    workflows = checkpoints(
        rng.choice((1, 2, 3, 7, 12, 20, 50)),
        skew=rng.choice((0.0, 0.7, 1.0, 2.0)),
        cold_ratio=rng.choice((1.5, 2, 4, 10, 30)),
    )
    fleets = (
        *(servers(count) for count in (1, 2, 4, 8, 12)),
        servers(4, vram_gb=24.0, cache="lru"),
        UNEQUAL,
    )
    chosen = rng.choice(fleets)
    load, burst = rng.choice((None, 0.05, 0.2, 0.5, 0.8, 1.0, 1.3)), rng.choice((1, 1, 4, 16))
    rate = None if load is None else load * full_rate(workflows, chosen)
    return Scenario(chosen, tuple(draw_jobs(workflows, Stream(200, rate, burst), seed)))
