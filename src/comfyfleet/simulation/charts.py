"""SVG charts as text: lines, bars, shares over time and a timeline by server. Names of others are escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

import msgspec

WIDTH = 860
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 34
PALETTE = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#65a30d")


class Line(msgspec.Struct, frozen=True):
    label: str
    points: tuple[tuple[float, float], ...]


class Bar(msgspec.Struct, frozen=True):
    """A run on the timeline: loading first, then running."""

    row: int
    start_s: float
    load_s: float
    end_s: float
    kind: int
    """Its colour."""
    title: str


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def line_chart(lines: Sequence[Line], x_title: str, y_title: str, *, height: int = 260) -> str:
    most_x = max((x for line in lines for x, _ in line.points), default=1.0) or 1.0
    most_y = max((y for line in lines for _, y in line.points), default=1.0) or 1.0
    parts, to_x, to_y = _axes(most_x, most_y, x_title, y_title, height)
    for number, line in enumerate(lines):
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in line.points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour(number)}" stroke-width="1.8">'
            f"<title>{escape(line.label)}</title></polyline>"
        )
    return _svg(parts, height, y_title) + legend([line.label for line in lines])


def bar_chart(bars: Sequence[tuple[str, float]], unit: str) -> str:
    """Horizontal bars with their values."""
    most = max((value for _, value in bars), default=1.0) or 1.0
    row, left = 26, 190
    parts = []
    for number, (label, value) in enumerate(bars):
        y, length = number * row + 4, (WIDTH - left - 120) * value / most
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(label)}</text>')
        parts.append(
            f'<rect x="{left}" y="{y}" width="{max(1.0, length):.1f}" height="18" fill="{colour(number)}"/>'
        )
        parts.append(
            f'<text x="{left + length + 8:.1f}" y="{y + 14}">{number_text(value)}{escape(unit)}</text>'
        )
    return _svg(parts, len(bars) * row + 8, unit)


def share_chart(
    useful: Sequence[float], loading: Sequence[float], until_s: float, *, height: int = 150
) -> str:
    """Shares of all servers over time: useful below, loading on top."""
    parts, to_x, to_y = _axes(until_s, 1.0, "time, s", "share of servers", height)
    step = until_s / max(1, len(useful))
    lower = [(0.0, 0.0), *(((n + 0.5) * step, share) for n, share in enumerate(useful)), (until_s, 0.0)]
    upper = [
        (0.0, 0.0),
        *(((n + 0.5) * step, a + b) for n, (a, b) in enumerate(zip(useful, loading, strict=True))),
        (until_s, 0.0),
    ]
    for points, fill in ((upper, PALETTE[1]), (lower, PALETTE[0])):
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y in points)
        parts.append(f'<polygon points="{path}" fill="{fill}"/>')
    return _svg(parts, height, "utilisation")


def timeline(rows: Sequence[str], bars: Sequence[Bar], until_s: float) -> str:
    row_height = 18 if len(rows) <= 24 else 9
    height = len(rows) * row_height + _TOP + _BOTTOM
    until_s = until_s or 1.0
    left = 110

    def to_x(x: float) -> float:
        return left + (WIDTH - left - _RIGHT) * x / until_s

    parts = []
    for number, name in enumerate(rows):
        y = _TOP + number * row_height
        if row_height > 9:
            parts.append(f'<text x="{left - 6}" y="{y + 13}" text-anchor="end">{escape(name[:16])}</text>')
    for bar in bars:
        y, begin, run = _TOP + bar.row * row_height, to_x(bar.start_s), to_x(bar.start_s + bar.load_s)
        title = f"<title>{escape(bar.title)}</title>"
        fill = colour(bar.kind)
        if bar.load_s > 0:
            parts.append(
                f'<rect x="{begin:.1f}" y="{y}" width="{max(0.4, run - begin):.1f}" height="{row_height - 2}" '
                f'fill="{fill}" fill-opacity=".35" stroke="{fill}" stroke-width=".6">{title}</rect>'
            )
        parts.append(
            f'<rect x="{run:.1f}" y="{y}" width="{max(0.4, to_x(bar.end_s) - run):.1f}" height="{row_height - 2}" '
            f'fill="{fill}">{title}</rect>'
        )
    bottom = height - _BOTTOM
    for tick in _ticks(until_s):
        parts.append(
            f'<text x="{to_x(tick):.1f}" y="{bottom + 14}" text-anchor="middle">{number_text(tick)}</text>'
        )
    parts.append(f'<text x="{WIDTH / 2}" y="{height - 4}" text-anchor="middle">time, s</text>')
    return _svg(parts, height, "timeline by server")


def legend(labels: Sequence[str]) -> str:
    items = "".join(
        f'<span><i style="background:{colour(number)}"></i>{escape(label)}</span>'
        for number, label in enumerate(labels)
    )
    return f'<p class="legend">{items}</p>'


def number_text(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2g}"


class _Scale:
    def __init__(self, most: float, start: float, length: float) -> None:
        self._most, self._start, self._length = most, start, length

    def __call__(self, value: float) -> float:
        return self._start + self._length * value / self._most


def _axes(
    most_x: float, most_y: float, x_title: str, y_title: str, height: int
) -> tuple[list[str], _Scale, _Scale]:
    most_x, most_y = most_x or 1.0, most_y or 1.0
    to_x = _Scale(most_x, _LEFT, WIDTH - _LEFT - _RIGHT)
    to_y = _Scale(most_y, height - _BOTTOM, -(height - _TOP - _BOTTOM))
    parts = []
    for tick in _ticks(most_y):
        y = to_y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number_text(tick)}</text>')
    for tick in _ticks(most_x):
        parts.append(
            f'<text x="{to_x(tick):.1f}" y="{height - _BOTTOM + 15}" text-anchor="middle">{number_text(tick)}</text>'
        )
    parts.append(f'<text x="{WIDTH / 2}" y="{height - 4}" text-anchor="middle">{escape(x_title)}</text>')
    middle = (height - _BOTTOM) / 2
    parts.append(
        f'<text x="13" y="{middle:.0f}" transform="rotate(-90 13 {middle:.0f})" text-anchor="middle">'
        f"{escape(y_title)}</text>"
    )
    return parts, to_x, to_y


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to at most `most`."""
    rough = most / 6
    unit = 10 ** floor(log10(rough)) if rough > 0 else 1.0
    step = next(unit * each for each in (1, 2, 5, 10) if unit * each >= rough)
    return [number * step for number in range(ceil(most / step) + 1) if number * step <= most * 1.0001]


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
