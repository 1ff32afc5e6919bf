"""What all HTML pages share, and the status page. Foreign text is escaped; there is no script and nothing from
other hosts.

`pages.py` decides who may see a page, supplies its values and renders the API.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape

from comfyfleet.wire.answers import JobBody, StatsBody, WorkerBody
from comfyfleet.wire.problems import ProblemAnswer

REFRESH_S = 5

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
    ".wide{overflow-x:auto;margin:0 0 2rem}"
    "table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #8884;vertical-align:top}"
    "td{white-space:nowrap}td:last-child{white-space:normal;overflow-wrap:anywhere;min-width:6rem}"
    "dl{display:flex;flex-wrap:wrap;gap:.5rem 2rem}dt{opacity:.7}"
    "dd{margin:0;font-size:1.4rem}.bad{color:#c33}.good{color:#2a7}small{opacity:.7}"
    ".api td{white-space:normal}summary{cursor:pointer;padding:.25rem 0}details[open]{margin-bottom:2rem}"
    "pre{overflow-x:auto;background:#8882;padding:.75rem}nav ul{display:flex;flex-wrap:wrap;gap:.5rem 1.5rem;"
    "list-style:none;padding:0}[id]{scroll-margin-top:3rem}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

_COUNTS = (
    "waiting",
    "delayed",
    "paused",
    "leased",
    "completed",
    "failed",
    "cancelled",
    "workers",
    "idle_slots",
)
_GOOD = frozenset({"idle", "busy", "completed"})
_BAD = frozenset({"offline", "failed"})


def status_page(
    stats: StatsBody, workers: Sequence[WorkerBody] | None, jobs: Sequence[JobBody], now: float, version: str
) -> str:
    """`workers` is None if the caller may not see them."""
    counts = "".join(
        f"<div><dt>{name.replace('_', ' ')}</dt><dd>{getattr(stats, name)}</dd></div>" for name in _COUNTS
    )
    parts = ["<h1>ComfyFleet</h1>"]
    if stats.is_paused:
        parts.append("<p class=bad>The queue is paused.</p>")
    parts.append(f"<dl>{counts}</dl>")
    if workers is not None:
        parts.append("<h2>Workers</h2>")
        parts.append(
            _table(("worker", "status", "runs", "completed", "failed", "seen"), map_workers(workers, now))
        )
    parts.append("<h2>Recent jobs</h2>")
    parts.append(
        _table(("job", "status", "priority", "worker", "submitted", "last error"), map_jobs(jobs, now))
    )
    parts.append(f"<p><small>ComfyFleet {escape(version)} · <a href=/docs>API</a></small></p>")
    return page("".join(parts), refresh=True)


def map_workers(workers: Sequence[WorkerBody], now: float) -> Iterable[tuple[str, ...]]:
    for worker in workers:
        yield (
            worker.id,
            f"{worker.status.value} (fake)" if worker.is_fake else worker.status.value,
            f"{len(worker.current_jobs)} of {worker.slots}",
            str(worker.completed),
            str(worker.failed),
            _ago(worker.last_seen_at, now),
        )


def map_jobs(jobs: Sequence[JobBody], now: float) -> Iterable[tuple[str, ...]]:
    for job in jobs:
        error = "" if job.error is None else f"{job.error.kind.value}: {job.error.message[:200]}"
        ago = _ago(job.submitted_at, now)
        yield (job.id, job.status, str(job.priority), job.worker_id or "–", ago, error)


def _ago(at: float, now: float) -> str:
    seconds = max(0.0, now - at)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def refusal_page(answered: ProblemAnswer) -> str:
    """The error and, if the key is missing, how to enter one."""
    body = answered.body
    parts = [f"<h1>{escape(str(body['title']))}</h1>"]
    if answered.status != 401:
        parts.append(f"<p>{escape(str(body.get('detail', '')))}</p>")
    else:
        parts.append(
            "<p>Reload this page. Enter any user name and, as the password, a key that may view the fleet, such as "
            "the one that the hub printed at its first start.</p>"
        )
    return page("".join(parts))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{heading}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    if not body:
        return "<p>None.</p>"
    # A phone scrolls the table sideways instead of breaking every word.
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(text: str) -> str:
    kind = " class=good" if text in _GOOD else " class=bad" if text in _BAD else ""
    return f"<td{kind}>{escape(text)}</td>"


def page(body: str, *, title: str = "ComfyFleet", refresh: bool = False) -> str:
    again = f'<meta http-equiv=refresh content="{REFRESH_S}">' if refresh else ""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f"<title>{escape(title)}</title>"
        f'<meta name=viewport content="width=device-width, initial-scale=1">{again}<style>{_STYLE}</style></head>'
        f"<body>{body}</body></html>"
    )
