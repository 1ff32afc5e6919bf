"""Goals A1 to A6: what a fleet gets done, with the real engine on simulated time (`_fleets`).

The policies beside it see the same jobs and servers. What decisions cost is measured elsewhere (`deciding`).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from bench._fleets import (
    BATCH,
    FOUR,
    UNEQUAL,
    arriving,
    batch_of,
    in_thread,
    median_entry,
    medians,
    play,
    ratios,
)
from bench._measure import Entry, Plan, entry, rounded
from bench.offline_schedule import OfflineSchedule, offline_schedule
from comfyfleet.engine.engine import Engine
from comfyfleet.model.ids import JobId
from comfyfleet.simulation.engine_run import run_engine
from comfyfleet.simulation.event_loop import START
from comfyfleet.simulation.metrics import RunMetrics
from comfyfleet.simulation.policies import ENGINE
from comfyfleet.simulation.scenario import Scenario
from comfyfleet.simulation.workload import Stream, checkpoints, draw_jobs
from comfyfleet.simulation.world import ServerSpec, SimulatedJob, SimulatedWorkflow

_LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.2)
"""How fast jobs arrive, as a share of what the servers could do with all models loaded."""
_PATIENCE = 2.0
_NEAR_S, _NEAR_SHARE, _KNOWN_RUNS = 2.0, 0.25, 5

# A1 and A3: batches


async def batch(plan: Plan, _: str) -> list[Entry]:
    return await in_thread(_measure_batch, plan)


def _measure_batch(plan: Plan) -> list[Entry]:
    found, best = _batches([batch_of(seed) for seed in range(2 if plan.quick else 15)])
    ours, theirs = found[ENGINE], found["shortest-queue"]
    makespans = [each.makespan_s for each in ours]
    by_policy = {
        "makespan_s": medians(found, "makespan_s"),
        "mean_s": medians(found, "mean_s"),
        "loads": medians(found, "loads"),
        "offline": [rounded(statistics.median(each[n] for each in best)) for n in (0, 1)],
    }
    title = f"batch of {BATCH}, 4 servers, 7 checkpoints:"
    return [
        median_entry(
            "A1a",
            f"{title} makespan / that of a schedule that knows all",
            ratios(makespans, [each.makespan_s for each in best]),
            "<= 1.15",
            **by_policy,
        ),
        median_entry(
            "A1b",
            f"{title} makespan / a shortest queue's",
            ratios(makespans, [each.makespan_s for each in theirs]),
            "<= 0.5",
        ),
        median_entry(
            "A1c",
            f"{title} loads / those of a schedule that knows all",
            ratios([each.loads for each in ours], [each.loads for each in best]),
            "<= 1.5",
        ),
    ]


async def slow_loads(plan: Plan, _: str) -> list[Entry]:
    return await in_thread(_measure_slow_loads, plan)


def _measure_slow_loads(plan: Plan) -> list[Entry]:
    scenarios = [batch_of(seed, count=96, is_disk_slow=True) for seed in range(2 if plan.quick else 10)]
    found, best = _batches(scenarios)
    ours = found[ENGINE]
    title = "batch of 96, 4 servers, loads of 30 s:"
    return [
        median_entry(
            "A3a",
            f"{title} loads / those of a schedule that knows all",
            ratios([each.loads for each in ours], [each.loads for each in best]),
            "<= 1.5",
            loads=medians(found, "loads"),
            makespan_s=medians(found, "makespan_s"),
            offline=[rounded(statistics.median(each[n] for each in best)) for n in (0, 1)],
        ),
        median_entry(
            "A3b",
            f"{title} makespan / that of a schedule that knows all",
            ratios([each.makespan_s for each in ours], [each.makespan_s for each in best]),
            None,
        ),
    ]


def _batches(scenarios: Sequence[Scenario]) -> tuple[dict[str, list[RunMetrics]], list[OfflineSchedule]]:
    found = {
        policy: [play(policy, each).found for each in scenarios]
        for policy in ("first-come", "shortest-queue", "least-loaded", "overtaking", ENGINE)
    }
    return found, [offline_schedule(each.jobs, each.servers) for each in scenarios]


# A2: jobs that arrive one by one


async def arrivals(plan: Plan, _: str) -> list[Entry]:
    return await in_thread(_measure_arrivals, plan)


def _measure_arrivals(plan: Plan) -> list[Entry]:
    policies = ("first-come", "shortest-queue", "overtaking", ENGINE)
    seeds = range(2 if plan.quick else 8)
    worst: dict[str, list[float]] = {"mean_s": [], "p95_s": []}
    by_load: dict[str, dict[str, list[float]]] = {"mean_s": {}, "p95_s": {}, "loads": {}}
    beside_queue: list[float] = []
    for load in _LOADS:
        found = {policy: [play(policy, arriving(seed, load)).found for seed in seeds] for policy in policies}
        for of, worse in worst.items():
            ours, *others = (
                [getattr(each, of) for each in found[policy]]
                for policy in (ENGINE, "first-come", "shortest-queue")
            )
            # The larger of both ratios: beside whichever of the two was better with these jobs.
            worse += [mine / min(theirs) for mine, *theirs in zip(ours, *others, strict=True)]
        for of, rows in by_load.items():
            for policy, value in medians(found, of).items():
                rows.setdefault(policy, []).append(value)
        if load == 0.8:
            means = ([each.mean_s for each in found[policy]] for policy in (ENGINE, "shortest-queue"))
            beside_queue = ratios(*means)
    title = "4 servers at 30 % to 120 % of capacity:"
    both = "the better of a shortest queue and first come, first served"
    return [
        entry(
            f"A2{part}",
            "memory",
            f"{title} {name} / that of {both}, the worst of {len(_LOADS)} loads and {len(seeds)} seeds",
            max(worst[of]),
            "<= 1",
            "ratio",
            median=rounded(statistics.median(worst[of])),
            load=list(_LOADS),
            **{of: by_load[of]},
            **({"loads": by_load["loads"]} if part == "a" else {}),
        )
        for part, of, name in (("a", "mean_s", "mean"), ("b", "p95_s", "p95"))
    ] + [
        median_entry(
            "A2c", "4 servers at 80 % of capacity: mean / a shortest queue's", beside_queue, "<= 0.7"
        ),
    ]


# A4: who waits


async def promises(plan: Plan, _: str) -> list[Entry]:
    return await in_thread(_measure_promises, plan)


def _measure_promises(plan: Plan) -> list[Entry]:
    seeds = range(2 if plan.quick else 8)
    kinds: dict[str, Callable[[int], Scenario]] = {
        "batch": batch_of,
        "batch, loads of 30 s": lambda seed: batch_of(seed, count=96, is_disk_slow=True),
        "30 %": lambda seed: arriving(seed, 0.3),
        "50 %": lambda seed: arriving(seed, 0.5),
        "80 %": lambda seed: arriving(seed, 0.8),
        "120 %": lambda seed: arriving(seed, 1.2),
        "unequal cards, 40 %": lambda seed: arriving(seed, 0.4, UNEQUAL),
    }
    late = {}
    for name, make in kinds.items():
        pairs = [(play(ENGINE, make(seed)), play("first-come", make(seed)), make(seed)) for seed in seeds]
        late[name] = [_late_s(ours.jobs, first.jobs, made.servers) for ours, first, made in pairs]
    high = {policy: [_mean_of_high(policy, seed) for seed in seeds] for policy in ("first-come", ENGINE)}
    small = {policy: [_mean_of_small(policy, seed) for seed in seeds] for policy in ("first-come", ENGINE)}
    worst = [value for values in late.values() for value in values]
    return [
        entry(
            "A4a",
            "memory",
            "start after that of first come, first served + 2 loads + one run with its load: the worst job of "
            f"{len(kinds)} workloads and {len(seeds)} seeds",
            max(worst),
            "<= 0",
            "s",
            worst_by_workload={name: rounded(max(values)) for name, values in late.items()},
            share_of_seeds_within=rounded(sum(each <= 0 for each in worst) / len(worst)),
        ),
        median_entry(
            "A4b",
            "90 % of capacity, one job in five of high priority: mean of these / with first come, first served",
            ratios(high[ENGINE], high["first-come"]),
            "<= 1",
            mean_s={name: rounded(statistics.median(values)) for name, values in high.items()},
        ),
        median_entry(
            "A4c",
            "batch of 200, two tenants of equal weight, 90 % and 10 % of the jobs: mean of the small one / with first "
            "come, first served",
            ratios(small[ENGINE], small["first-come"]),
            "<= 1",
            mean_s={name: rounded(statistics.median(values)) for name, values in small.items()},
        ),
    ]


def _late_s(
    ours: Sequence[SimulatedJob], first: Sequence[SimulatedJob], servers: Sequence[ServerSpec]
) -> float:
    """How much later than promised the job that was hurt most started. Nothing is interrupted, so whoever is due may
    have to wait for one run with its load."""
    run_s = max(job.end_s - job.start_s for job in ours)
    slowest = min(server.disk_speed for server in servers)
    return max(
        job.start_s - other.start_s - _PATIENCE * job.workflow.load_s / slowest - run_s
        for job, other in zip(ours, first, strict=True)
    )


def _mean_of_high(policy: str, seed: int) -> float:
    played = play(policy, arriving(seed, 0.9, priorities=((0, 4), (1, 1))))
    return statistics.fmean(job.latency_s for job in played.jobs if job.priority)


def _mean_of_small(policy: str, seed: int) -> float:
    stream = Stream(200, tenants=(("big", 9), ("small", 1)))
    jobs = tuple(draw_jobs(checkpoints(), stream, seed))
    played = play(policy, Scenario(FOUR, jobs, {"big": 1.0, "small": 1.0}))
    return statistics.fmean(job.latency_s for job in played.jobs if job.tenant == "small")


# A5: unequal cards


async def unequal_cards(plan: Plan, _: str) -> list[Entry]:
    return await in_thread(_measure_unequal_cards, plan)


def _measure_unequal_cards(plan: Plan) -> list[Entry]:
    seeds = range(2 if plan.quick else 10)
    found, best = _batches([batch_of(seed, UNEQUAL) for seed in seeds])
    means = {
        policy: [
            play(policy, arriving(seed, load, UNEQUAL)).found.mean_s
            for load in (0.2, 0.4, 0.7)
            for seed in seeds
        ]
        for policy in ("overtaking", ENGINE)
    }
    cards = "one card of double speed, three of half:"
    return [
        median_entry(
            "A5a",
            f"{cards} batch of {BATCH}, makespan / that of a schedule that knows all",
            ratios([each.makespan_s for each in found[ENGINE]], [each.makespan_s for each in best]),
            "<= 1.15",
            makespan_s=medians(found, "makespan_s"),
            loads=medians(found, "loads"),
            offline=[rounded(statistics.median(each[n] for each in best)) for n in (0, 1)],
        ),
        median_entry(
            "A5b",
            f"{cards} 20 %, 40 % and 70 % of capacity, mean / that of the policy before",
            ratios(means[ENGINE], means["overtaking"]),
            None,
        ),
    ]


# A6: estimates


class _Predictions:
    """Asks the engine at each submission when the job will start, once its workflow has run five times."""

    def __init__(self) -> None:
        self._asked: list[tuple[SimulatedJob, float, float]] = []
        self._submitted: list[SimulatedJob] = []

    async def ask(self, engine: Engine, job_id: JobId, job: SimulatedJob) -> None:
        known = Counter(each.workflow.name for each in self._submitted if each.has_ended)
        self._submitted.append(job)
        if known[job.workflow.name] < _KNOWN_RUNS:
            return
        dispatch = (await engine.get(job_id)).dispatch
        estimate = (await engine.estimates([dispatch])).get(job_id)
        if estimate is not None:
            self._asked.append((job, job.arrives_s, estimate.starts_at - START))

    def good(self) -> tuple[float, int]:
        good = [
            abs(expected_s - job.start_s) <= max(_NEAR_S, _NEAR_SHARE * (job.start_s - asked_s))
            for job, asked_s, expected_s in self._asked
        ]
        assert len(good) > len(self._submitted) / 2, "most jobs are predicted"
        return sum(good) / len(good), len(good)


async def estimates(plan: Plan, _: str) -> list[Entry]:
    return await in_thread(_measure_estimates, plan)


def _measure_estimates(plan: Plan) -> list[Entry]:
    seeds = range(2 if plan.quick else 6)
    good = {f"{load:.0%}": [_good(arriving(seed, load)) for seed in seeds] for load in (0.3, 0.5, 0.8, 0.9)}
    good["unequal cards, 40%"] = [_good(arriving(seed, 0.4, UNEQUAL)) for seed in seeds]
    shares = {name: [100 * share for share, _ in found] for name, found in good.items()}
    counts = [(share * asked, asked) for found in good.values() for share, asked in found]
    unknown = [
        play(ENGINE, arriving(seed, 0.8, workflows=_renamed(checkpoints(), 15))).found.mean_s
        for seed in seeds
    ]
    known = [play(ENGINE, arriving(seed, 0.8)).found.mean_s for seed in seeds]
    return [
        entry(
            "A6a",
            "memory",
            "starts predicted at submit within 2 s or 25 %, of workflows that have run five times",
            100 * sum(each for each, _ in counts) / sum(asked for _, asked in counts),
            ">= 90",
            "%",
            worst=rounded(min(share for found in shares.values() for share in found)),
            by_load={name: rounded(statistics.median(found)) for name, found in shares.items()},
            predictions=sum(asked for _, asked in counts),
        ),
        median_entry(
            "A6b",
            "80 % of capacity, 105 workflows of which most never ran: mean / with 7 workflows",
            ratios(unknown, known),
            "<= 1.1",
            mean_s=[rounded(statistics.median(unknown)), rounded(statistics.median(known))],
        ),
    ]


def _good(scenario: Scenario) -> tuple[float, int]:
    """The share of good predictions, and how many there were."""
    predictions, jobs = _Predictions(), scenario.fresh_jobs()
    run_engine(scenario.servers, jobs, on_submit=predictions.ask)
    return predictions.good()


def _renamed(workflows: Iterable[SimulatedWorkflow], times: int) -> list[SimulatedWorkflow]:
    """So many workflows for each, which differ in nothing else."""
    return [
        msgspec.structs.replace(each, name=f"{each.name} {number}", weight=each.weight / times)
        for each in workflows
        for number in range(times)
    ]
