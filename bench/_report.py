"""The scoreboard as a file and as a table in the docs, both written by the same run so that they say the same."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench._measure import Entry

_ROOT = Path(__file__).parent.parent
RESULTS = _ROOT / "bench" / "results.json"
PAGE = _ROOT / "docs" / "benchmarks.md"
_OPENING, _CLOSING = "<!-- figures: written by python -m bench -->", "<!-- end of figures -->"


def write(measured: list[Entry]) -> None:
    """What was not measured this time stays as it was."""
    known = msgspec.json.decode(RESULTS.read_bytes(), type=list[Entry]) if RESULTS.exists() else []
    by_goal = {each.goal: each for each in (*known, *measured)}
    entries = sorted(by_goal.values(), key=lambda each: (int(each.goal.rstrip("abcdefghij")), each.goal))
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(entries), indent=2) + b"\n")
    before, _, rest = PAGE.read_text().partition(_OPENING)
    _, _, after = rest.partition(_CLOSING)
    PAGE.write_text(f"{before}{_OPENING}\n{figures(entries)}\n{_CLOSING}{after}")


def figures(entries: list[Entry]) -> str:
    rows = ["| goal | what | value | bound | holds |", "|---|---|---|---|---|"]
    rows += [row(each) for each in entries]
    return "\n".join(rows)


def row(entry: Entry) -> str:
    unit = "" if entry.unit == "ratio" else f" {entry.unit}"
    bound = entry.bound.replace("<=", "≤").replace(">=", "≥")
    holds = "yes" if entry.holds else "**no**"
    return f"| {entry.goal} | {entry.name} | {entry.value:g}{unit} | {bound}{unit} | {holds} |"
