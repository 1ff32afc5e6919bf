"""Goals 3 and 7: the Redis store beside other queues on the same server, in the same rounds.

Every queue works in a process of its own and starts on an empty server. What each does and promises is written in
docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
from redis import Redis

from bench._measure import Case, Entry, Plan, entry, in_turn, rate, ratio, ratio_range, rounded
from bench._peers import FURTHER, NAMES, check, run, that_run
from bench._places import Place
from bench.through_hub import through_hub

_SLOTS = 100
# So that each works for seconds, and not for minutes.
_JOBS = {
    "ours": 20_000,
    "bullmq": 20_000,
    "taskiq": 6_000,
    "arq": 4_000,
    "saq": 4_000,
    "dramatiq": 6_000,
    "celery": 3_000,
    "rq": 1_000,
}
_ALWAYS = ("ours", "bullmq", "taskiq")
_PHASES = ("enqueue and process", "process")


async def redis_throughput(plan: Plan, kind: str) -> list[Entry]:
    check(_names(plan))
    entries: list[Entry] = []

    def add(
        letter: str, what: str, rates: dict[str, list[float]], peer: str, called: str, bound: str | None
    ) -> None:
        entries.append(
            entry(
                f"3{letter}",
                kind,
                f"{what}: jobs/s / {called}",
                ratio(rates["ours"], rates[peer]),
                bound,
                "ratio",
                range=ratio_range(rates["ours"], rates[peer]),
                jobs_a_second={case: rate(found) for case, found in rates.items()},
                jobs={case: plan.size(_JOBS[case]) for case in rates if case in _JOBS},
                **details,
            )
        )

    # With every write on the disk before it is answered the disk decides more than the queue: reported beside.
    for durability, letters in (("everysec", "abcd"), ("always", "efgh")):
        is_asked = durability == "everysec"
        measured, failed, *both = await _rates(plan, durability, _names(plan) if is_asked else _ALWAYS)
        details = {"did_not_run": failed} if failed else {}
        for phase, rates, to_bullmq, to_python in zip(_PHASES, both, letters[:2], letters[2:], strict=True):
            what = f"{phase}, 100 slots, appendfsync {durability}"
            add(to_bullmq, what, rates, "bullmq", "BullMQ's", ">= 1.5" if is_asked else None)
            python = [name for name in measured if name not in ("ours", "bullmq")]
            best = max(python, key=lambda name: rate(rates[name]))
            called = "taskiq's" if len(python) == 1 else f"the best Python peer's ({_called(best)})"
            add(to_python, what, rates, best, called, ">= 8" if is_asked else None)
            if plan.all_peers and is_asked:
                # Two letters a peer, the same in every run.
                for peer, pair in zip(
                    ("taskiq", *FURTHER), ("ij", "kl", "mn", "op", "qr", "st"), strict=True
                ):
                    if peer in measured:
                        add(pair[_PHASES.index(phase)], what, rates, peer, f"{_called(peer)}'s", None)
    return _commanded(plan, entries)


async def _rates(
    plan: Plan, durability: str, names: Sequence[str]
) -> tuple[Sequence[str], dict[str, str], dict[str, list[float]], dict[str, list[float]]]:
    """Who was measured and why others were not; jobs a second with their enqueue, and without it."""
    async with Place("redis") as place:
        server = place.redis_server(durability)
        measured, failed = await _able(names, server.url)
        whole: dict[str, list[float]] = {}

        def case(name: str) -> Case:
            async def measure() -> float:
                with Redis(port=server.port) as redis:
                    redis.flushall()
                jobs = plan.size(_JOBS[name])
                told = await run(name, "throughput", server.url, jobs, _SLOTS)
                whole.setdefault(name, []).append(jobs / (told.enqueue_s + told.process_s))
                return jobs / told.process_s

            return measure

        processing = await in_turn({name: case(name) for name in measured}, plan.rounds)
        return measured, failed, whole, processing


async def idle_to_start(plan: Plan, kind: str) -> list[Entry]:
    return [*await _beside_peers(plan, kind), *await through_hub(plan, kind)]


async def _beside_peers(plan: Plan, kind: str) -> list[Entry]:
    check(_names(plan))
    # In all of the rounds together well above 300.
    samples = plan.repeats(100)
    async with Place(kind) as place:
        server = place.redis_server("everysec")
        measured, failed = await _able(_names(plan), server.url)
        found: dict[str, list[list[float]]] = {name: [] for name in measured}

        def case(name: str) -> Case:
            async def measure() -> float:
                with Redis(port=server.port) as redis:
                    redis.flushall()
                told = await run(name, "latency", server.url, samples, _SLOTS)
                found[name].append(sorted(told.latencies_ms))
                return statistics.median(told.latencies_ms)

            return measure

        middles = await in_turn({name: case(name) for name in measured}, plan.rounds)
    slowest = {
        name: _percentile(sorted(one for taken in rounds for one in taken), 0.99)
        for name, rounds in found.items()
    }
    details: dict[str, Any] = {
        "p50_ms": {name: rounded(statistics.median(times)) for name, times in middles.items()},
        "p99_ms": {name: rounded(time) for name, time in slowest.items()},
        "samples": samples * plan.rounds,
    }
    if failed:
        details["did_not_run"] = failed
    entries: list[Entry] = []
    pairs = ("ab", "cd", "ef", "gh", "ij", "kl")
    for peer, pair in zip(("taskiq", *FURTHER), pairs, strict=True):
        if peer not in measured:
            continue
        is_asked = peer == "taskiq"
        entries += (
            entry(
                f"7{pair[0]}",
                kind,
                f"idle to start, p50 / {_called(peer)}'s",
                ratio(middles["ours"], middles[peer]),
                "<= 1.1" if is_asked else None,
                "ratio",
                range=ratio_range(middles["ours"], middles[peer]),
                **details,
            ),
            entry(
                f"7{pair[1]}",
                kind,
                f"idle to start, p99 / {_called(peer)}'s",
                slowest["ours"] / slowest[peer],
                "<= 1.5" if is_asked else None,
                "ratio",
                **details,
            ),
        )
    return _commanded(plan, entries)


def _names(plan: Plan) -> tuple[str, ...]:
    return (*_ALWAYS, *FURTHER) if plan.all_peers else _ALWAYS


async def _able(names: Sequence[str], url: str) -> tuple[Sequence[str], dict[str, str]]:
    """A peer of a goal that fails ends the run; a further one is left out, and the entries say why."""
    able, failed = await that_run([name for name in names if name in FURTHER], url, _SLOTS)
    return [name for name in names if name not in FURTHER or name in able], failed


def _called(peer: str) -> str:
    return NAMES.get(peer, peer)


def _commanded(plan: Plan, entries: list[Entry]) -> list[Entry]:
    """Each with the command that measures it as it was measured."""
    more = " --all-peers" if plan.all_peers else ""
    return [msgspec.structs.replace(each, command=each.command + more) for each in entries]


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
