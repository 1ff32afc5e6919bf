"""Goals 3 and 7: the Redis store beside other queues on the same server, in the same rounds.

Every queue works in a process of its own and starts on an empty server. What each does and promises is written in
docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
from typing import Any

from redis import Redis

from bench._measure import Case, Entry, Plan, entry, in_turn, rate, ratio, ratio_range, rounded
from bench._peers import check, run
from bench._places import Place

_SLOTS = 100
# So that each works for seconds, and not for minutes.
_JOBS = {"ours": 20_000, "bullmq": 20_000, "taskiq": 6_000}
_ASKED = {"bullmq": ("BullMQ", ">= 1.5"), "taskiq": ("taskiq", ">= 8")}


async def redis_throughput(plan: Plan, kind: str) -> list[Entry]:
    check(tuple(_JOBS))
    entries: list[Entry] = []
    # With every write on the disk before it is answered the disk decides more than the queue: reported beside.
    for durability, letters in (("everysec", "abcd"), ("always", "efgh")):
        whole, processing = await _rates(plan, durability)
        for letter, (peer, what, rates) in zip(
            letters,
            (
                ("bullmq", "enqueue and process", whole),
                ("bullmq", "process", processing),
                ("taskiq", "enqueue and process", whole),
                ("taskiq", "process", processing),
            ),
            strict=True,
        ):
            name, bound = _ASKED[peer]
            entries.append(
                entry(
                    f"3{letter}",
                    kind,
                    f"{what}, 100 slots, appendfsync {durability}: jobs/s / {name}'s",
                    ratio(rates["ours"], rates[peer]),
                    bound if durability == "everysec" else None,
                    "ratio",
                    range=ratio_range(rates["ours"], rates[peer]),
                    jobs_a_second={case: rate(found) for case, found in rates.items()},
                    jobs={case: plan.size(jobs) for case, jobs in _JOBS.items()},
                )
            )
    return entries


async def _rates(plan: Plan, durability: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Jobs a second with their enqueue, and without it."""
    async with Place("redis") as place:
        server = place.redis_server(durability)
        whole: dict[str, list[float]] = {}

        def case(name: str, *more: str) -> Case:
            async def measure() -> float:
                with Redis(port=server.port) as redis:
                    redis.flushall()
                jobs = plan.size(_JOBS[name])
                told = await run(name, "throughput", server.url, jobs, _SLOTS, *more)
                whole.setdefault(" ".join((name, *more)), []).append(jobs / (told.enqueue_s + told.process_s))
                return jobs / told.process_s

            return measure

        cases = {name: case(name) for name in _JOBS} | {"ours bare": case("ours", "bare")}
        processing = await in_turn(cases, plan.rounds)
        return whole, processing


async def idle_to_start(plan: Plan, kind: str) -> list[Entry]:
    names = ("ours", "bullmq", "taskiq")
    check(names)
    # In all of the rounds together well above 300.
    samples = plan.repeats(100)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    async with Place(kind) as place:
        server = place.redis_server("everysec")

        def case(name: str) -> Case:
            async def measure() -> float:
                with Redis(port=server.port) as redis:
                    redis.flushall()
                told = await run(name, "latency", server.url, samples, _SLOTS)
                found[name].append(sorted(told.latencies_ms))
                return statistics.median(told.latencies_ms)

            return measure

        middles = await in_turn({name: case(name) for name in names}, plan.rounds)
    slowest = {
        name: _percentile(sorted(one for taken in rounds for one in taken), 0.99)
        for name, rounds in found.items()
    }
    details: dict[str, Any] = {
        "p50_ms": {name: rounded(statistics.median(times)) for name, times in middles.items()},
        "p99_ms": {name: rounded(time) for name, time in slowest.items()},
        "samples": samples * plan.rounds,
    }
    return [
        entry(
            "7a",
            kind,
            "idle to start, p50 / taskiq's",
            ratio(middles["ours"], middles["taskiq"]),
            "<= 1.1",
            "ratio",
            range=ratio_range(middles["ours"], middles["taskiq"]),
            **details,
        ),
        entry(
            "7b",
            kind,
            "idle to start, p99 / taskiq's",
            slowest["ours"] / slowest["taskiq"],
            "<= 1.5",
            "ratio",
            **details,
        ),
    ]


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
