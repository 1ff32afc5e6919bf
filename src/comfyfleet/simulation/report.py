"""What people see of a simulation: rows for a table in the terminal, and one HTML page with all charts inside.

The page loads nothing: no script, no font, no picture. Names of workflows, servers and tenants come from others and are
escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from comfyfleet.simulation.charts import (
    Bar,
    Line,
    bar_chart,
    legend,
    line_chart,
    number_text,
    share_chart,
    timeline,
)
from comfyfleet.simulation.metrics import RunMetrics, SimulationRun, measure, quantile

HEADINGS = ("policy", "all done", "mean", "p95", "p99", "max wait", "loads", "useful")
_BUCKETS = 120
_MAX_ROWS = 48
_MAX_BARS = 3_000
_MAX_KINDS = 7
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:920px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}h3{font-size:1rem;margin-bottom:.2rem}
table{border-collapse:collapse;width:100%}th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #8884}
th:first-child,td:first-child{text-align:left}
svg{width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:currentColor}
.grid{stroke:#8884}.legend span{margin-right:1.2rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em}.note{opacity:.75}
"""


def table_rows(outcomes: Sequence[SimulationRun]) -> list[list[str]]:
    return [_row(outcome.label, measure(outcome)) for outcome in outcomes]


def seconds_text(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 36_000 else f"{seconds / 3600:.1f} h"


def notes_on(outcomes: Sequence[SimulationRun]) -> list[str]:
    """Sentences that the table needs: the gain over first come, first served, and jobs that never ended."""
    notes = []
    by_label = {outcome.label: measure(outcome) for outcome in outcomes}
    first, ours = by_label.get("first-come"), by_label.get("comfyfleet")
    if first is not None and ours is not None and first.loads and first.mean_s:
        notes.append(
            f"comfyfleet loads models {ours.loads} times where first-come does {first.loads} times; "
            f"its mean latency is {ours.mean_s / first.mean_s:.0%} of first-come's."
        )
    for outcome in outcomes:
        if outcome.unfinished:
            notes.append(
                f"{outcome.label}: {outcome.unfinished} jobs had not ended when nothing happened any more."
            )
        if by_label[outcome.label].restarts:
            notes.append(
                f"{outcome.label}: {by_label[outcome.label].restarts} runs were lost with their server."
            )
    return notes


def html_page(outcomes: Sequence[SimulationRun], title: str, subtitle: str) -> str:
    labels = [outcome.label for outcome in outcomes]
    metrics = [measure(outcome) for outcome in outcomes]
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in _row(label, each))}</tr>"
        for label, each in zip(labels, metrics, strict=True)
    )
    head = "".join(f"<th>{escape(text)}</th>" for text in HEADINGS)
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(subtitle)}</p>",
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes_on(outcomes)),
        "<h2>Mean latency</h2>",
        bar_chart([(label, each.mean_s) for label, each in zip(labels, metrics, strict=True)], " s"),
        "<h2>Model loads</h2>",
        bar_chart([(label, each.loads) for label, each in zip(labels, metrics, strict=True)], ""),
        "<h2>How long jobs waited</h2><p class=note>The share of jobs that had begun after so many seconds.</p>",
        line_chart([_waits(outcome) for outcome in outcomes], "seconds until the start", "share of jobs"),
        "<h2>Loads over time</h2>",
        line_chart([_loads(outcome) for outcome in outcomes], "time, s", "loads so far"),
        "<h2>Utilisation</h2><p class=note>Blue: running jobs. Orange: loading models. The rest is idle.</p>",
    ]
    until_s = max((job.end_s for outcome in outcomes for job in outcome.jobs), default=0.0) or 1.0
    for outcome in outcomes:
        useful, loading = _utilisation(outcome, until_s)
        parts.append(f"<h3>{escape(outcome.label)}</h3>{share_chart(useful, loading, until_s)}")
    parts.append("<h2>Timeline by server</h2>")
    parts += [_timeline(outcome) for outcome in outcomes]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _row(label: str, found: RunMetrics) -> list[str]:
    return [
        label,
        seconds_text(found.makespan_s),
        *(seconds_text(value) for value in (found.mean_s, found.p95_s, found.p99_s, found.longest_wait_s)),
        f"{found.loads}",
        f"{found.useful_share:.0%}",
    ]


def _waits(outcome: SimulationRun) -> Line:
    waits = sorted(job.wait_s for job in outcome.jobs if job.has_ended)
    shares = [number / 100 for number in range(101)]
    return Line(outcome.label, tuple((quantile(waits, share), share) for share in shares))


def _loads(outcome: SimulationRun) -> Line:
    starts = sorted(job.start_s for job in outcome.jobs if job.load_s > 0 and job.has_ended)
    step = max(1, len(starts) // 400)
    points = [(0.0, 0.0), *((at, float(n + 1)) for n, at in enumerate(starts) if n % step == 0)]
    if starts:
        points.append((starts[-1], float(len(starts))))
    return Line(outcome.label, tuple(points))


def _utilisation(outcome: SimulationRun, until_s: float) -> tuple[list[float], list[float]]:
    width = until_s / _BUCKETS
    useful, loading = [0.0] * _BUCKETS, [0.0] * _BUCKETS
    for job in outcome.jobs:
        if job.has_ended:
            warm_s = job.start_s + job.load_s
            _spread(loading, job.start_s, warm_s, width)
            _spread(useful, warm_s, job.end_s, width)
    full = width * len(outcome.servers)
    return [each / full for each in useful], [each / full for each in loading]


def _spread(buckets: list[float], start_s: float, end_s: float, width: float) -> None:
    for number in range(int(start_s / width), min(len(buckets) - 1, int(end_s / width)) + 1):
        buckets[number] += max(0.0, min(end_s, (number + 1) * width) - max(start_s, number * width))


def _timeline(outcome: SimulationRun) -> str:
    servers = [server.name for server in outcome.servers][:_MAX_ROWS]
    places = {name: number for number, name in enumerate(servers)}
    shown = [job for job in outcome.jobs if job.has_ended and job.server in places]
    shown.sort(key=lambda job: job.start_s)
    notes = []
    if len(outcome.servers) > _MAX_ROWS:
        notes.append(f"the first {_MAX_ROWS} of {len(outcome.servers)} servers")
    if len(shown) > _MAX_BARS:
        shown = shown[:_MAX_BARS]
        notes.append(f"the first {_MAX_BARS:,} runs")
    common = [name for name, _ in Counter(job.workflow.name for job in outcome.jobs).most_common(_MAX_KINDS)]
    kinds = {name: number for number, name in enumerate(common)}
    bars = [
        Bar(
            places[job.server],
            job.start_s,
            job.load_s,
            job.end_s,
            kinds.get(job.workflow.name, _MAX_KINDS),
            f"job {job.number}, {job.workflow.name}, {job.tenant}: "
            f"load {number_text(job.load_s)} s, run {number_text(job.end_s - job.start_s - job.load_s)} s",
        )
        for job in shown
    ]
    others = ["others"] if len({job.workflow.name for job in outcome.jobs}) > _MAX_KINDS else []
    note = f'<p class="note">Shown: {escape(", ".join(notes))}.</p>' if notes else ""
    until_s = max((job.end_s for job in shown), default=1.0)
    return (
        f"<h3>{escape(outcome.label)}</h3>{note}{timeline(servers, bars, until_s)}{legend([*common, *others])}"
        '<p class="note">A pale part is the load of the models.</p>'
    )
