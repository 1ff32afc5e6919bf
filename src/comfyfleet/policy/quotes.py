"""What learned figures say about one job: its duration with a range, and its cost. Pure."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from comfyfleet.model.estimate import CreditRange, Range
from comfyfleet.model.ledger import FlatPrice, GpuPrice, OutputPrice, Price, ServicePrice, Usage
from comfyfleet.model.workflow_stats import WorkflowStats
from comfyfleet.policy.accounting import ceiling, cost

KNOWN_AFTER_RUNS = 5
"""From so many runs on an expectation is more than a guess."""
_SPREADS = 2.5
"""Distances from the mean that a run seldom exceeds: of a normal distribution, so many mean distances hold 95 %."""
_UNKNOWN = 3.0
"""A workflow that never ran may take so many times as long as others, or as little."""


class KnownRun(NamedTuple):
    """How long a workflow is expected to run on a worker class."""

    seconds: Range
    runs: int

    @property
    def is_rough(self) -> bool:
        return self.runs < KNOWN_AFTER_RUNS


def known_run(stats: WorkflowStats | None, worker_class: str, expected_s: float) -> KnownRun:
    """`expected_s` is used where nothing was learned. Runs of other worker classes are a hint only."""
    durations = {} if stats is None else stats.durations
    exact = durations.get(worker_class)
    if exact is not None:
        # Few runs show less than the whole spread.
        width = _SPREADS * exact.spread_s * (1 + 1 / exact.runs) if exact.runs > 1 else exact.mean_s / 2
        low, high = max(0.0, exact.mean_s - width), exact.mean_s + width
        return KnownRun(Range(exact.mean_s, low, high), exact.runs)
    means = [each.mean_s for each in durations.values()]
    low, high = (min(means) / 2, max(means) * 2) if means else (expected_s / _UNKNOWN, expected_s * _UNKNOWN)
    return KnownRun(Range(expected_s, min(low, expected_s), max(high, expected_s)), 0)


def expected_credits(price: Price, service: str, used_s: Range) -> CreditRange:
    """`used_s`: how long the job would use a worker, with its loads."""
    most = ceiling(price, service)
    match price:
        case FlatPrice() | ServicePrice():
            return CreditRange(most, most, most)
        case OutputPrice():
            # The number of outputs is not known before.
            return CreditRange(most, cost(price, Usage(service, outputs=0)), most)
        case GpuPrice():
            low, expected = (
                cost(price, Usage(service, gpu_milliseconds=ceil(1000 * seconds)))
                for seconds in (used_s.low, used_s.expected)
            )
            return CreditRange(expected, low, most)
