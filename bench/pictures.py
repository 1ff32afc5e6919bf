"""Draws the figures of bench/results.json into docs/images: `python -m bench.pictures`, with the Python of .venv-bench.

It knows nothing of the product and measures nothing. What has no entry is left out of its picture.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot

_ROOT = Path(__file__).parent.parent
_FOLDER = _ROOT / "docs" / "images"
_STYLE = {
    "figure.figsize": (6.4, 3.2),
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    # The same figures make the same file.
    "svg.hashsalt": "comfyfleet",
    "svg.fonttype": "none",
}
_OURS, _PEER = "#2b6cb0", "#a0aec0"
_NAMES = {
    "ours": "ComfyFleet",
    "bullmq": "BullMQ",
    "taskiq": "taskiq",
    "arq": "arq",
    "saq": "SAQ",
    "dramatiq": "dramatiq",
    "celery": "Celery",
    "rq": "RQ",
    "plain": "ComfyFleet (SQLite)",
    "pgqueuer": "pgqueuer (PostgreSQL)",
    "procrastinate": "procrastinate (PostgreSQL)",
}
_POLICIES = {
    "first-come": "first come",
    "shortest-queue": "shortest queue",
    "least-loaded": "least loaded",
    "overtaking": "policy before",
    "comfyfleet": "ComfyFleet",
}
_OFFLINE = "knows all jobs"
_STORES = {"memory": "memory", "sqlite": "SQLite", "redis": "Redis", "postgres": "PostgreSQL"}


def main() -> None:
    entries: list[dict[str, Any]] = json.loads((_ROOT / "bench" / "results.json").read_text())
    found = {(each["goal"], each["store"]): each["details"] for each in entries}
    _FOLDER.mkdir(exist_ok=True)
    mpl.rcParams.update(_STYLE)
    if ("A1a", "memory") in found:
        _batch(found["A1a", "memory"])
    if ("A2a", "memory") in found:
        _arrivals(found["A2a", "memory"])
    if ("A8a", "memory") in found:
        _worlds(found)
    _leases(found)
    if ("3a", "redis") in found:
        rates = found["3a", "redis"]["jobs_a_second"]
        _bars("redis", "On one Redis, 100 slots: enqueue and process", "jobs a second", _known(rates))
    if ("5a", "sqlite") in found:
        rates = found["5a", "sqlite"]["cycles_a_second"]
        _bars("embedded", "Durable, 50 callers: enqueue, lease and complete", "jobs a second", _known(rates))
    if ("7a", "redis") in found:
        _latency(found["7a", "redis"])


def _batch(details: dict[str, Any]) -> None:
    seconds = {_POLICIES[name]: value for name, value in details["makespan_s"].items()}
    loads = {_POLICIES[name]: value for name, value in details["loads"].items()}
    seconds[_OFFLINE], loads[_OFFLINE] = details["offline"]
    figure, both = pyplot.subplots(1, 2, figsize=(6.4, 2.6), sharey=True)
    for axes, values, unit in (
        (both[0], seconds, "seconds until all are done"),
        (both[1], loads, "model loads"),
    ):
        colours = [_OURS if name == "ComfyFleet" else _PEER for name in values]
        bars = axes.barh(list(values), list(values.values()), color=colours, height=0.6)
        axes.bar_label(bars, labels=[f" {value:.0f}" for value in values.values()])
        axes.set_xlabel(unit)
        axes.set_xlim(right=max(values.values()) * 1.15)
    both[0].invert_yaxis()
    both[0].set_title("64 jobs at once, 4 servers, 7 checkpoints (simulated)")
    _save(figure, "batch")


def _arrivals(details: dict[str, Any]) -> None:
    figure, both = pyplot.subplots(1, 2, figsize=(6.4, 3.0))
    share = [100 * load for load in details["load"]]
    for axes, of, title in (
        (both[0], "mean_s", "Mean latency, seconds"),
        (both[1], "loads", "Model loads of 300 jobs"),
    ):
        for name, values in details[of].items():
            is_ours = name == "comfyfleet"
            axes.plot(
                share, values, marker="o", markersize=3, label=_POLICIES[name], linewidth=2 if is_ours else 1
            )
        axes.set_title(title)
        axes.set_xlabel("jobs, % of capacity")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
    lines, labels = both[0].get_legend_handles_labels()
    figure.legend(
        lines, labels, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4, frameon=False, fontsize=8
    )
    _save(figure, "arrivals")


def _worlds(found: dict[tuple[str, str], dict[str, Any]]) -> None:
    figure, axes = pyplot.subplots()
    for goal, name in (("A8a", "mean latency"), ("A8b", "p99 of the latency"), ("A8c", "longest wait")):
        ratios = found[goal, "memory"]["quantiles"]
        shares = [100 * number / (len(ratios) - 1) for number in range(len(ratios))]
        axes.plot(shares, [max(each, 0.02) for each in ratios], label=name)
    axes.axhline(1, color="black", linewidth=0.6)
    axes.set(yscale="log", xlabel="% of the worlds, best first", ylabel="beside the policy before")
    axes.set_yticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5], ["0.05", "0.1", "0.2", "0.5", "1", "2", "5"])
    axes.yaxis.set_minor_formatter("")
    axes.set_title("200 random worlds: below 1 is better")
    axes.legend(frameon=False)
    axes.grid(axis="y", alpha=0.3)
    _save(figure, "worlds")


def _known(values: dict[str, float]) -> dict[str, float]:
    return {name: values[name] for name in _NAMES if name in values}


def _leases(found: dict[tuple[str, str], dict[str, Any]]) -> None:
    figure, axes = pyplot.subplots()
    for store, name in _STORES.items():
        details = found.get(("1a", store))
        if details is None:
            continue
        sizes = details.get("waiting", [100, 1_000_000])
        (line,) = axes.plot(sizes, details["lease_next_us"], marker="o", label=name)
        axes.annotate(
            f" {name}",
            (sizes[-1], details["lease_next_us"][-1]),
            color=line.get_color(),
            va="center",
            xytext=(4, 0),
            textcoords="offset points",
        )
    axes.set(xscale="log", yscale="log", xlabel="waiting jobs", ylabel="microseconds a lease")
    axes.set_title("A lease and what waits")
    # Whole decades: an axis that fits one store alone would make a mountain of a tenth.
    low, high = axes.get_ylim()
    axes.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlim(right=axes.get_xlim()[1] * 5)
    axes.grid(axis="y", alpha=0.3)
    _save(figure, "leases")


def _bars(name: str, title: str, unit: str, values: dict[str, float]) -> None:
    figure, axes = pyplot.subplots(figsize=(6.4, 0.9 + 0.45 * len(values)))
    labels = [_NAMES.get(each, each) for each in values]
    colours = [_OURS if label.startswith("ComfyFleet") else _PEER for label in labels]
    bars = axes.barh(labels, list(values.values()), color=colours, height=0.6)
    axes.bar_label(bars, labels=[f" {value:,.0f}" for value in values.values()])
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.set_xlim(right=max(values.values()) * 1.15)
    _save(figure, name)


def _latency(details: dict[str, Any]) -> None:
    names = list(_known(details["p50_ms"]))
    figure, axes = pyplot.subplots(figsize=(6.4, 0.9 + 0.6 * len(names)))
    for shift, key, colour in ((-0.18, "p50_ms", _OURS), (0.18, "p99_ms", _PEER)):
        places = [place + shift for place in range(len(names))]
        values = [details[key][name] for name in names]
        bars = axes.barh(places, values, height=0.34, color=colour, label=key)
        axes.bar_label(bars, labels=[f" {value:g}" for value in values])
    axes.set_yticks(range(len(names)), [_NAMES.get(name, name) for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds from the enqueue to the start of the job")
    axes.set_title("Idle to start on Redis")
    axes.set_xlim(right=max(details["p99_ms"].values()) * 1.1)
    axes.legend(["half of the jobs (p50)", "99 of 100 jobs (p99)"], frameon=False, loc="lower right")
    _save(figure, "latency")


def _save(figure: Any, name: str) -> None:
    figure.savefig(_FOLDER / f"bench-{name}.svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
