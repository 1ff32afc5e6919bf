"""The scoreboard as a file and as a table in the docs, both written by the same run so that they say the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec

from bench._measure import STORES, Entry

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results.json"
BENCH_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
PICTURES = {
    "batch": "Seconds and model loads of a batch with each policy",
    "arrivals": "Mean latency and model loads as the fleet gets busier, with each policy",
    "worlds": "Random worlds: mean latency, p99 and longest wait beside the policy before",
    "leases": "Microseconds a lease at 100 and at many waiting jobs, for each store",
    "redis": "Jobs a second on one Redis beside other queues",
    "embedded": "Durable jobs a second beside queues on PostgreSQL",
    "latency": "Milliseconds from enqueue to start on an idle fleet",
}
_OPENING, _CLOSING = "<!-- figures: written by python -m bench -->", "<!-- end of figures -->"


def write(measured: list[Entry]) -> None:
    """What was not measured this time stays as it was."""
    known = msgspec.json.decode(RESULTS.read_bytes(), type=list[Entry]) if RESULTS.exists() else []
    by_goal = {(each.goal, each.store): each for each in (*known, *measured)}
    entries = sorted(by_goal.values(), key=lambda each: (each.order, STORES.index(each.store), each.goal))
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(entries), indent=2) + b"\n")
    before, _, rest = PAGE.read_text().partition(_OPENING)
    _, _, after = rest.partition(_CLOSING)
    PAGE.write_text(f"{before}{_OPENING}\n{figures(entries)}\n{_CLOSING}{after}")


def draw() -> None:
    """The pictures, by the Python that has the library for it."""
    if not BENCH_PYTHON.exists():
        raise SystemExit("the pictures were not drawn: `make bench` installs what draws them")
    subprocess.run([BENCH_PYTHON, "-m", "bench.pictures"], check=True, cwd=ROOT)
    # The page shows those there are.
    write([])


def figures(entries: list[Entry]) -> str:
    pictures = [
        f"![{text}](images/bench-{name}.svg)\n"
        for name, text in PICTURES.items()
        if (IMAGES / f"bench-{name}.svg").exists()
    ]
    rows = [*pictures, "| goal | store | what | value | bound | holds |", "|---|---|---|---|---|---|"]
    rows += [row(each) for each in entries]
    return "\n".join(rows)


def row(entry: Entry) -> str:
    unit = "" if entry.unit == "ratio" else f" {entry.unit}"
    bound, holds = "reported", ""
    if entry.bound is not None:
        bound = entry.bound.replace("<=", "≤").replace(">=", "≥") + unit
        holds = "yes" if entry.holds else "**no**"
    worst = f", worst {entry.details['worst']:g}{unit}" if "worst" in entry.details else ""
    return (
        f"| {entry.goal} | {entry.store} | {entry.name} | {entry.value:g}{unit}{worst} | {bound} | {holds} |"
    )
