"""How everything here is measured: cases in turn, several rounds, the median of the ratios within a round.

Where it can be, a time is CPU time, so that a neighbour on the machine costs a round little. What is measured belongs
to the files of the goals; what a figure has to be, to their entries.
"""

from __future__ import annotations

import gc
import random
import statistics
import string
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

cpu_s = time.process_time

ROUNDS = 5
STORES = ("memory", "sqlite", "redis", "postgres")

Case = Callable[[], Awaitable[float]]


class Plan(msgspec.Struct, frozen=True):
    """How much is measured: `quick` shows that everything runs, its figures are rough; `all_peers` adds those that are
    no part of a goal."""

    quick: bool = False
    all_peers: bool = False

    @property
    def rounds(self) -> int:
        return 2 if self.quick else ROUNDS

    def size(self, full: int) -> int:
        """A number of jobs, lanes or classes; a hundredth of it when quick."""
        return max(100, full // 100) if self.quick else full

    def seconds(self, full: float) -> float:
        return full / 5 if self.quick else full

    def repeats(self, full: int) -> int:
        return max(2, full // 5) if self.quick else full


class Entry(msgspec.Struct, frozen=True):
    """One line of the scoreboard."""

    goal: str
    store: str
    name: str
    value: float
    bound: str | None
    """A comparison and a number: `<= 1.3`. None: reported, nothing is asked of it."""
    holds: bool | None
    unit: str
    command: str
    details: dict[str, Any] = {}

    @property
    def goal_name(self) -> str:
        """Without the letter of the part."""
        return self.goal.rstrip(string.ascii_lowercase)

    @property
    def order(self) -> tuple[bool, int]:
        """Goals of scheduling (A1) come before the others, each group by number."""
        return not self.goal.startswith("A"), int(self.goal_name.removeprefix("A"))


def entry(
    goal: str, store: str, name: str, value: float, bound: str | None, unit: str, **details: Any
) -> Entry:
    value = float(f"{value:.4g}")
    command = f"python -m bench --goal {goal.rstrip(string.ascii_lowercase)} --store {store}"
    return Entry(goal, store, name, value, bound, is_met(value, bound), unit, command, details)


def is_met(value: float, bound: str | None) -> bool | None:
    if bound is None:
        return None
    comparison, number = bound.split()
    match comparison:
        case "<=":
            return value <= float(number)
        case ">=":
            return value >= float(number)
        case _:
            raise ValueError(f"a bound is '<= number' or '>= number', not {bound!r}")


async def in_turn(cases: Mapping[str, Case], rounds: int) -> dict[str, list[float]]:
    """Every case once a round, in shuffled order: what slows the machine for a while slows all of them."""
    shuffled = random.Random(1)
    names = list(cases)
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        shuffled.shuffle(names)
        for name in names:
            found[name].append(await cases[name]())
    return found


def ratio(measured: list[float], base: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(measured, base, strict=True))


def ratio_range(measured: list[float], base: list[float]) -> list[float]:
    """The lowest and the highest ratio of a round: how much the median is worth."""
    ratios = [one / other for one, other in zip(measured, base, strict=True)]
    return [rounded(min(ratios)), rounded(max(ratios))]


def in_microseconds(seconds: list[float]) -> float:
    return rounded(statistics.median(seconds) * 1e6)


def settle_memory() -> None:
    """What was built for a measurement is taken out of the collector's sight, as a service does after its start."""
    gc.collect()
    gc.freeze()


def clear_memory() -> None:
    gc.unfreeze()
    gc.collect()


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def rate(measured: list[float]) -> int:
    """The median of so many a second."""
    return round(statistics.median(measured))
