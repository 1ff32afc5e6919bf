"""How the command line shows estimates: expected starts and ends, quotes, and the capacity that is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from comfyfleet.cli.output import echo, print_pairs, print_table

if TYPE_CHECKING:
    from comfyfleet.model.estimate import CapacityReport, JobEstimate, Quote, Range
    from comfyfleet.wire.answers import JobBody


def duration(seconds: float) -> str:
    """In one unit."""
    if seconds < 0.95:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def expectation(job: JobBody, now: float) -> str:
    """When a job is expected to start or to end. Empty: not known."""
    estimate = job.estimate
    if estimate is None:
        return ""
    guess = " (a guess)" if estimate.is_rough else ""
    if job.status == "queued":
        return f"starts in about {duration(estimate.starts_at - now)}{guess}"
    return f"ends in about {duration(estimate.ends_at - now)}{guess}"


def print_quotes(found: Sequence[tuple[str, Quote]], now: float) -> None:
    for number, (name, quote) in enumerate(found):
        if len(found) > 1:
            echo(("\n" if number else "") + name)
        _print_quote(quote, now)


def _print_quote(quote: Quote, now: float) -> None:
    runs = "1 run" if quote.runs == 1 else f"{quote.runs} runs"
    details: dict[str, object] = {
        **_when(quote.estimate, now),
        "run": f"{_range(quote.run_s)}, from {runs}" if quote.runs else f"{_range(quote.run_s)}, a guess",
    }
    if quote.load_s:
        details["load"] = f"{duration(quote.load_s)} before it, for models that are not loaded"
    if quote.credits is not None:
        cost = quote.credits
        details["credits"] = (
            str(cost.expected) if cost.low == cost.high else f"{cost.expected} ({cost.low} to {cost.high})"
        )
    print_pairs(details)
    for each in quote.unworkable:
        echo(f"Warning: no worker can run it now: {each}", err=True)


def _when(estimate: JobEstimate | None, now: float) -> dict[str, str]:
    if estimate is None:
        return {"start": "not known: no worker can run it now, or the queue is paused"}
    guess = ", which is a guess" if estimate.is_rough else ""
    return {
        "start": f"in about {duration(estimate.starts_at - now)}{guess}",
        "end": f"in about {duration(estimate.ends_at - now)}",
    }


def _range(found: Range) -> str:
    return f"{duration(found.expected)} ({duration(found.low)} to {duration(found.high)})"


def print_capacity(report: CapacityReport) -> None:
    rows = [
        [
            each.needs,
            each.waiting,
            f"{each.gpu_seconds:.0f}" + (" (a guess)" if each.is_rough else ""),
            each.slots,
        ]
        for each in report.classes
    ]
    print_table(["jobs that need", "waiting", "GPU seconds", "slots"], rows, empty="No job waits.")
    for more in report.wanted:
        workers = "1 more worker" if more.workers == 1 else f"{more.workers} more workers"
        kind = f"like {more.kind}" if more.worker_class is not None else f"with {more.kind}"
        echo(f"{workers} {kind} would do the rest within {duration(report.within_s)}.")
    if rows and not report.wanted:
        echo(f"The present workers do it within {duration(report.within_s)}.")
