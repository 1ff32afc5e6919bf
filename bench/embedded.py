"""Goal 5: whole durable cycles on SQLite beside the queues that live in a PostgreSQL with its own, durable settings.

A cycle is enqueue, lease and completion. The peers may do theirs in lists; each of our fifty callers has one job at a
time and waits for the commit of every call.
"""

from __future__ import annotations

from bench._measure import Case, Entry, Plan, entry, in_turn, rate, ratio, ratio_range
from bench._peers import check, run
from bench._places import Place

_CALLERS = 50
_JOBS = {"pgqueuer": 10_000, "procrastinate": 1_000}
_ASKED = {"pgqueuer": ">= 3.5", "procrastinate": ">= 45"}


async def durable_cycles(plan: Plan, kind: str) -> list[Entry]:
    check(tuple(_JOBS))
    async with Place("postgres") as place:

        def peer(name: str) -> Case:
            async def measure() -> float:
                jobs = plan.size(_JOBS[name])
                # A new database each time: what was done before is not in the way.
                told = await run(name, place.database(is_durable=True), jobs, _CALLERS)
                return jobs / told.process_s

            return measure

        async def ours() -> float:
            seconds = plan.seconds(3)
            return (await run("ours embedded", "--only", "--callers", _CALLERS, "--seconds", seconds)).rate

        cases: dict[str, Case] = {name: peer(name) for name in _JOBS} | {"plain": ours}
        rates = await in_turn(cases, plan.rounds)
    entries = []
    for letter, name in zip("ab", _JOBS, strict=True):
        entries.append(
            entry(
                f"5{letter}",
                kind,
                f"whole durable cycles, 50 callers, three calls a cycle: cycles/s / {name}'s",
                ratio(rates["plain"], rates[name]),
                _ASKED[name],
                "ratio",
                range=ratio_range(rates["plain"], rates[name]),
                cycles_a_second={case: rate(found) for case, found in rates.items()},
            )
        )
    return entries
